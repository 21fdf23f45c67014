"""What was found wrong here stays out here, across restarts; strikes add up by cause."""

from __future__ import annotations

import json
import threading

import pytest

from hone.kernels import KernelsCache
from tests.unit.kernels.support import DEVICE, child, key


def record_file(cache, number=1):
    return cache.path / DEVICE / "quarantine" / f"{key(number)}.json"


def test_what_is_quarantined_is_so_after_a_restart(cache, root):
    assert cache.quarantined(key(1), DEVICE) is None
    cache.quarantine(key(1), DEVICE, "output 'y': NaN where the baseline has none")
    assert KernelsCache(root).quarantined(key(1), DEVICE) == "output 'y': NaN where the baseline has none"


def test_other_artifacts_and_other_devices_are_free(cache):
    cache.quarantine(key(1), DEVICE, "wrong")
    assert cache.quarantined(key(2), DEVICE) is None
    assert cache.quarantined(key(1), key("other device")) is None


def test_the_second_strike_of_a_cause_puts_it_out(cache, root):
    first = cache.strike(key(1), DEVICE, "latency", "slower by 5 %")
    assert (first.reason, first.strikes) == (None, {"latency": 1})
    assert KernelsCache(root).quarantined(key(1), DEVICE) is None
    assert cache.strike(key(1), DEVICE, "death", "unexplained").strikes == {"latency": 1, "death": 1}
    assert cache.quarantined(key(1), DEVICE) is None, "two causes, one strike each"
    second = KernelsCache(root).strike(key(1), DEVICE, "latency", "slower by 7 %")
    assert second.reason == "slower by 7 %"
    assert cache.quarantined(key(1), DEVICE) == "slower by 7 %"
    assert [event["reason"] for event in second.history] == ["slower by 5 %", "unexplained", "slower by 7 %"]


def test_one_strike_can_be_enough(cache):
    assert cache.strike(key(1), DEVICE, "fault", "SIGSEGV", limit=1).reason == "SIGSEGV"
    with pytest.raises(ValueError, match="limit"):
        cache.strike(key(1), DEVICE, "fault", "SIGSEGV", limit=0)


def test_the_first_reason_stays(cache):
    cache.quarantine(key(1), DEVICE, "first")
    cache.quarantine(key(1), DEVICE, "second")
    assert cache.quarantined(key(1), DEVICE) == "first"


def test_the_history_does_not_grow_for_ever(cache):
    for number in range(100):
        cache.strike(key(1), DEVICE, "latency", str(number), limit=1000)
    record = cache.quarantine_record(key(1), DEVICE)
    assert record.strikes == {"latency": 100}
    assert record.history[-1]["reason"] == "99"
    assert len(record.history) <= 32


def test_a_pardon_forgets_all(cache, root):
    cache.quarantine(key(1), DEVICE, "wrong")
    assert cache.pardon(key(1), DEVICE)
    assert not cache.pardon(key(1), DEVICE)
    assert KernelsCache(root).quarantined(key(1), DEVICE) is None


def test_the_artifact_may_go_and_come_back_and_is_still_out(cache):
    cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {})
    cache.quarantine(key(1), DEVICE, "wrong")
    cache.evict(0)
    cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {})
    assert cache.quarantined(key(1), DEVICE) == "wrong"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"schema": 1}', b"\xff", b"[" * 100_000, b'{"schema": 2, "digest": "", "scope": ""}'],
)
def test_a_record_that_cannot_be_read_keeps_it_out(cache, content):
    cache.quarantine(key(1), DEVICE, "wrong")
    record_file(cache).write_bytes(content)
    reason = cache.quarantined(key(1), DEVICE)
    assert reason is not None
    assert f"remove {record_file(cache)}" in reason


def test_someone_elses_record_keeps_it_out(cache):
    cache.quarantine(key(1), DEVICE, "wrong")
    record_file(cache).chmod(0o666)
    assert "can be written by others" in cache.quarantined(key(1), DEVICE)


def test_a_record_of_another_artifact_is_not_believed(cache):
    cache.strike(key(1), DEVICE, "latency", "slow")
    record_file(cache).rename(record_file(cache, 2))
    assert "of another artifact" in cache.quarantined(key(2), DEVICE)


def test_records_are_listed(cache):
    cache.quarantine(key(1), DEVICE, "wrong")
    cache.strike(key(2), DEVICE, "latency", "slow")
    (record_file(cache).parent / "notes.txt").write_text("")
    records = {record.digest: record.reason for record in cache.quarantine_records(DEVICE)}
    assert records == {key(1): "wrong", key(2): None}
    assert cache.quarantine_records(key("other device")) == []


STRIKE = """
cache = KernelsCache(root)
say("ready")
hear()
for number in range(50):
    cache.strike(key(1), DEVICE, "latency", "slow", limit=1000)
"""


def test_no_strike_is_lost_among_processes_and_threads(cache, root):
    def strike() -> None:
        for _ in range(25):
            cache.strike(key(1), DEVICE, "latency", "slow", limit=1000)

    with child(STRIKE, root) as other:
        other.hears("ready")
        other.tell()
        threads = [threading.Thread(target=strike) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        other.finish()
    assert cache.quarantine_record(key(1), DEVICE).strikes == {"latency": 100}
    assert [path for path in record_file(cache).parent.iterdir() if path.suffix != ".json"] == []


def test_a_record_is_json_for_people(cache):
    cache.strike(key(1), DEVICE, "latency", "slower by 5 %")
    told = json.loads(record_file(cache).read_text())
    assert told["reason"] is None
    assert told["strikes"] == {"latency": 1}
    assert record_file(cache).stat().st_mode & 0o077 == 0
