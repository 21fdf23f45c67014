"""Ten thousand entries: what looking costs is counted in calls to the system, which are the same on any machine."""

from __future__ import annotations

from tests.unit.kernels.support import child

NUM_ENTRIES = 10_000

#: Makes entries as `publish` would, less the syncing; then counts what the cache asks of the system.
MEASURE = """
from collections import Counter
from hone.kernels.entry import EntryName
from hone.kernels.manifest import FileRecord, compose
num_entries = int(sys.argv[2])
cache = KernelsCache(root, size_limit_bytes=10**12)
empty = FileRecord(0, digest_of_bytes(b""))
for number in range(num_entries):
    name = EntryName("decisions", DEVICE, key(number))
    path = root / "v1" / name.relative
    path.mkdir(parents=True, mode=0o700)
    (path / "manifest.json").write_bytes(compose(name, {"a": empty}, {}) if number < 2 else b"x" * 100)
    (path / "a").write_bytes(b"")

calls = Counter()
counting = False
def count(event, arguments):
    if counting and event in ("open", "os.scandir", "os.listdir", "os.remove", "os.rename", "os.utime"):
        calls[event] += 1
sys.addaudithook(count)

def costs(action):
    global counting
    calls.clear()
    counting = True
    result = action()
    counting = False
    return result, dict(calls)

def told(cost, *events):
    return " ".join(str(cost.get(event, 0)) for event in events)

entries, cost = costs(cache.entries)
say(len(entries)); say(told(cost, "open", "os.scandir", "os.listdir"))

size = sum(entry.size_bytes for entry in entries)
report, cost = costs(lambda: cache.evict(size - 1))
say(report.num_evicted); say(told(cost, "os.rename")); say(cost.get("open", 0) < 100)

found, cost = costs(lambda: cache.get("decisions", key(1), DEVICE))
say(bool(found)); say(told(cost, "open", "os.scandir", "os.listdir"))

entry, cost = costs(lambda: cache.publish("decisions", key("new"), DEVICE, {"a": b"a"}, {}))
say(bool(entry))
entry, cost = costs(lambda: cache.publish("decisions", key("newer"), DEVICE, {"a": b"a"}, {}))
say(bool(entry)); say(cost.get("os.scandir", 0) < 10)
opened, cost = costs(lambda: KernelsCache(root, size_limit_bytes=10**12))
say(cost.get("os.scandir", 0) + cost.get("os.listdir", 0) < 10)
"""


def test_looking_at_ten_thousand_entries(root):
    with child(MEASURE, root, str(NUM_ENTRIES)) as measure:
        measure.hears(str(NUM_ENTRIES))
        num_opened, num_scanned, num_listed = map(int, measure.read().split())
        assert num_opened == 0, "a listing opens no file"
        assert NUM_ENTRIES <= num_scanned + num_listed <= NUM_ENTRIES + 10, "and looks into each folder once"

        measure.hears("1")
        measure.hears("1")
        measure.hears("True")  # evicting one opens next to nothing

        measure.hears("True")
        num_opened, num_scanned, num_listed = map(int, measure.read().split())
        assert num_opened <= 6, "a look-up costs its own entry's files"
        assert num_scanned + num_listed == 0

        measure.hears("True")
        measure.hears("True")
        measure.hears("True")  # publishing does not look at all the others each time
        measure.hears("True")  # nor does opening
        measure.finish()
