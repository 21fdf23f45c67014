"""Entries travel as a tar file; what comes in is checked to the last byte, and code only comes in on trust."""

from __future__ import annotations

import io
import json
import os
import tarfile

import pytest

from hone.kernels import Entry, ImportRefused, KernelsCache, digest_of
from hone.kernels import transfer as transfer_module
from tests.unit.kernels.support import ARCHITECTURE, DEVICE, key, mounted, staged

ALL = {"kernels": ARCHITECTURE, "decisions": DEVICE, "artifacts": DEVICE, "constants": ""}


@pytest.fixture
def exported(cache, tmp_path):
    """A file with one entry of each kind."""
    for kind, scope in ALL.items():
        cache.publish(kind, key(1), scope, {"a": f"{kind} a".encode() * 1000, "b.json": b"{}"}, {"kind": kind})
    report = cache.export(tmp_path / "export.tar")
    assert report.num_sound == 4
    assert report.problems == ()
    return tmp_path / "export.tar"


@pytest.fixture
def target(tmp_path):
    return KernelsCache(tmp_path / "target")


def rewrite(path, change):
    """Another tar file, of what `change` makes of the members: a list of (TarInfo, content)."""
    with tarfile.open(path) as tar:
        parts = [(member, tar.extractfile(member).read()) for member in tar.getmembers()]
    parts = change(parts) or parts
    changed = path.with_name("changed.tar")
    with tarfile.open(changed, "w", format=tarfile.USTAR_FORMAT) as tar:
        for member, content in parts:
            if member.isreg():
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if member.isreg() else None)
    return changed


def part(name, content=b"x", kind=tarfile.REGTYPE, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.size, member.linkname = kind, len(content) if kind == tarfile.REGTYPE else 0, link
    return member, content


def refused(target, path, *, trust=True):
    """The reason; nothing may have changed."""
    with pytest.raises(ImportRefused) as problem:
        target.import_(path, trust_binaries=trust)
    assert str(path) in str(problem.value)
    assert "nothing was taken" in str(problem.value)
    assert target.entries() == []
    assert staged(target.root) == []
    return problem.value.reason


def test_decisions_come_in_and_binaries_do_not(exported, target):
    report = target.import_(exported)
    assert report.num_imported == {"decisions": 1}
    assert report.num_untrusted == {"kernels": 1, "artifacts": 1, "constants": 1}
    assert {entry.name.kind for entry in target.entries()} == {"decisions"}


def test_all_comes_in_on_trust_bit_for_bit_and_unproven(cache, exported, target):
    report = target.import_(exported, trust_binaries=True)
    assert report.num_imported == dict.fromkeys(ALL, 1)
    for kind, scope in ALL.items():
        there, here = cache.get(kind, key(1), scope), target.get(kind, key(1), scope)
        assert isinstance(here, Entry)
        assert here.manifest == there.manifest
        assert here.created == there.created
        assert {name: path.read_bytes() for name, path in here.files.items()} == {
            name: path.read_bytes() for name, path in there.files.items()
        }
        assert there.proven
        assert not here.proven
        assert here.files["a"].stat().st_mode & 0o777 == 0o600
    assert staged(target.root) == []


def test_what_is_there_stays(exported, target):
    mine = target.publish("decisions", key(1), DEVICE, {"mine": b"measured here"}, {})
    report = target.import_(exported)
    assert (report.num_imported, report.num_present) == ({}, 1)
    assert target.get("decisions", key(1), DEVICE) == mine


def test_importing_twice_changes_nothing(exported, target):
    target.import_(exported)
    assert target.import_(exported).num_present == 1


def test_a_damaged_entry_is_not_exported(cache, tmp_path):
    good = cache.publish("decisions", key(1), DEVICE, {"a": b"a"}, {})
    bad = cache.publish("decisions", key(2), DEVICE, {"a": b"a"}, {})
    bad.files["a"].write_bytes(b"b")
    report = cache.export(tmp_path / "export.tar")
    assert report.num_sound == 1
    assert [name.digest for name, _ in report.problems] == [key(2)]
    with tarfile.open(tmp_path / "export.tar") as tar:
        assert f"{good.name}/a" in tar.getnames()
        assert f"{bad.name}/a" not in tar.getnames()


def test_two_exports_of_the_same_are_the_same(cache, exported, tmp_path):
    cache.export(tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == exported.read_bytes()


def test_the_export_is_a_plain_tar_without_names_of_people_and_machines(exported):
    with tarfile.open(exported) as tar:
        for member in tar.getmembers():
            assert member.isreg()
            assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", 0)
            assert not member.name.startswith("/")


def test_the_longest_names_fit(cache, target, tmp_path):
    cache.publish("kernels", key(1), "x" * 64, {"f" * 100: b"a"}, {})
    cache.publish("artifacts", key(1), "d" * 64, {"f" * 100: b"a"}, {})
    cache.export(tmp_path / "export.tar")
    assert target.import_(tmp_path / "export.tar", trust_binaries=True).num_imported == {"kernels": 1, "artifacts": 1}


def test_an_export_that_fails_leaves_nothing(cache, tmp_path, monkeypatch):
    cache.publish("decisions", key(1), DEVICE, {"a": b"a"}, {})

    def fail(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer_module, "_export_entry", fail)
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "export.tar").write_bytes(b"the last one")
    with pytest.raises(OSError, match="space"):
        cache.export(tmp_path / "exports" / "export.tar")
    assert [path.read_bytes() for path in (tmp_path / "exports").iterdir()] == [b"the last one"]


ENTRY = f"{DEVICE}/decisions/{key(5)}"
SHORT = f"kernels/{ARCHITECTURE}/{key(5)}/a"  # fits into a header of any format


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/cron.d/evil",
        f"{DEVICE}/decisions/../../clock",
        "/etc/passwd",
        f"/{ENTRY}/manifest.json",
        f"{DEVICE}/decisions/{key(1)}/../../../evil",
        f"{DEVICE}/decisions/{key(1)}/sub/a",
        f"{DEVICE}/quarantine/{key(1)}.json",
        f"{DEVICE}/device.json",
        "clock",
        "locks/evict.lock",
        ".staging/x/y",
        f"kernels/../{key(1)}/a",
        f"./{ENTRY}/a",
        f"{ENTRY}//a",
        f"unknown/{key(1)}/a",
        f"{DEVICE}/weights/{key(1)}/a",
        f"{DEVICE}/decisions/{key(1).upper()}/a",
        "hone-cache.json",
    ],
)
def test_names_that_lead_elsewhere_are_refused(exported, target, tmp_path, name):
    before = sorted(path for path in tmp_path.rglob("*") if "target" not in path.parts)
    changed = rewrite(exported, lambda parts: [*parts, part(name)])
    reason = refused(target, changed)
    assert f"'{name}'" in reason or "only one of the manifest and the export" in reason
    assert sorted(path for path in tmp_path.rglob("*") if "target" not in path.parts) == sorted([*before, changed])


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.FIFOTYPE, "pipe"),
        (tarfile.CONTTYPE, "of type"),
    ],
)
def test_what_is_no_plain_file_is_refused(exported, target, kind, told):
    name = f"{ENTRY}/a"
    changed = rewrite(exported, lambda parts: [*parts, part(name, b"", kind, "/etc/passwd")])
    reason = refused(target, changed)
    assert told in reason
    assert name in reason


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_extension_headers_are_refused_unread(exported, target, kind):
    member = tarfile.TarInfo("extension")
    member.type, member.size = kind, 1 << 40
    path = exported.with_name("changed.tar")
    path.write_bytes(exported.read_bytes()[: 2 * 512] + member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert "extension" in refused(target, path)


def test_a_member_larger_than_the_file_is_refused(exported, target):
    """A header is 512 bytes and may claim a petabyte."""
    member = tarfile.TarInfo(SHORT)
    member.size = 1 << 50
    path = exported.with_name("changed.tar")
    path.write_bytes(exported.read_bytes()[: 2 * 512] + member.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    assert "cut off" in refused(target, path)


def test_a_negative_size_is_refused(exported, target):
    member = tarfile.TarInfo(SHORT)
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 11 + b"\x00"  # base-256, negative
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    path = exported.with_name("changed.tar")
    path.write_bytes(exported.read_bytes()[: 2 * 512] + bytes(header) + bytes(1024))
    assert "claims -" in refused(target, path)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_compressed_files_are_refused(exported, target, suffix):
    """So that a small file cannot become a large one."""
    path = exported.with_name(f"export.tar.{suffix}")
    with tarfile.open(path, f"w:{suffix}") as tar:
        tar.addfile(*[part("x")[0], io.BytesIO(b"x")])
    assert "not an uncompressed tar" in refused(target, path)


def test_more_than_the_cache_may_have_is_refused(exported, tmp_path):
    target = KernelsCache(tmp_path / "target", size_limit_bytes=20_000)
    assert "the whole cache may have 20000" in refused(target, exported)
    assert target.import_(exported, trust_binaries=False).num_imported == {"decisions": 1}, "these fit"


def test_decisions_are_small(exported, target, monkeypatch):
    monkeypatch.setattr(transfer_module, "_MAX_DECISION_BYTES", 1000)
    assert "a decision at most 1000" in refused(target, exported, trust=False)


def test_too_many_members_are_refused(exported, target, monkeypatch):
    monkeypatch.setattr(transfer_module, "_MAX_MEMBERS", 5)
    assert "more than 5 members" in refused(target, exported)


def drop(parts, suffix):
    return [item for item in parts if not item[0].name.endswith(suffix)]


def with_content(parts, suffix, content):
    return [(member, content if member.name.endswith(suffix) else data) for member, data in parts]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda parts: with_content(parts, "/a", b"evil" * 2000), "not what its entry's manifest says"),
        (lambda parts: with_content(parts, f"decisions/{key(1)}/a", b"decisions b" * 1000), "not what its entry's"),
        (lambda parts: with_content(parts, "/a", b""), "not what its entry's manifest says"),
        (lambda parts: drop(parts, "/b.json"), "file 'b.json' is in only one"),
        (lambda parts: [*parts, part(f"{DEVICE}/decisions/{key(1)}/extra")], "file 'extra' is in only one"),
        (lambda parts: drop(parts, "manifest.json"), "has no manifest.json"),
        (lambda parts: with_content(parts, "manifest.json", b"{"), "manifest.json is not JSON"),
        (lambda parts: with_content(parts, "manifest.json", b"[" * 100_000), "manifest.json is not JSON"),
        (lambda parts: with_content(parts, "manifest.json", b'{"schema": 2}'), "schema 2, expected 1"),
        (lambda parts: [*parts, parts[-1]], "is there twice"),
        (lambda parts: parts[1:], "its first member is"),
        (lambda parts: with_content(parts, "hone-cache.json", b"{}"), "schema: cannot be read"),
        (lambda parts: with_content(parts, "hone-cache.json", b'{"schema": 7}'), "schema is 7"),
        (lambda _parts: [], "hone-cache.json"),
    ],
)
def test_a_corrupt_export_is_refused_as_a_whole(exported, target, change, told):
    def apply(parts):
        return change(parts) or [part("other", b"")]

    assert told in refused(target, rewrite(exported, apply))


def test_a_manifest_moved_to_another_digest_is_refused(exported, target):
    def move(parts):
        for member, _ in parts:
            member.name = member.name.replace(f"decisions/{key(1)}", f"decisions/{key(2)}")

    assert "it is of" in refused(target, rewrite(exported, move))


def test_a_key_that_is_not_of_the_digest_is_refused(cache, target, tmp_path):
    fields = {"graph": "abc"}
    cache.publish("decisions", digest_of(fields), DEVICE, {"a": b"a"}, {"key": fields})
    cache.export(tmp_path / "export.tar")

    def forge(parts):
        from hone.kernels.digest import canonical_json, digest_of_bytes

        forged = []
        for member, content in parts:
            if member.name.endswith("manifest.json"):
                told = json.loads(content)
                told.pop("seal")
                told["content"]["key"]["graph"] = "other"
                told["seal"] = digest_of_bytes(canonical_json(told))
                forged.append((member, json.dumps(told).encode()))
            else:
                forged.append((member, content))
        return forged

    assert "key in the manifest" in refused(target, rewrite(tmp_path / "export.tar", forge))


def test_every_cut_is_refused(exported, target):
    whole = exported.read_bytes()
    with tarfile.open(exported) as tar:
        end = max(member.offset_data + member.size for member in tar.getmembers())
    for size in [0, 1, 511, 512, 700, *range(1024, end, 1536), end - 1]:
        path = exported.with_name("cut.tar")
        path.write_bytes(whole[:size])
        refused(target, path)


def test_random_damage_is_refused_or_harmless(exported, target):
    """A bit anywhere: where it is in what is taken, it is found."""
    whole = exported.read_bytes()
    first_content = 2 * 512
    for position in range(first_content, len(whole), 613):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path = exported.with_name("damaged.tar")
        path.write_bytes(damaged)
        try:
            target.import_(path, trust_binaries=True)
        except ImportRefused:
            assert target.entries() == []
        else:
            assert target.verify().problems == ()
            for entry in target.entries():
                assert target.get(entry.name.kind, entry.name.digest, entry.name.scope).manifest["kind"] in ALL
            target.evict(0)
    assert staged(target.root) == []


def test_what_changes_after_the_check_is_not_taken(exported, target, monkeypatch):
    real = transfer_module._check_sizes

    def then_change(*arguments):
        real(*arguments)
        with exported.open("r+b") as file, tarfile.open(exported) as tar:
            for member in tar.getmembers():
                if member.name.endswith("/a"):
                    file.seek(member.offset_data)
                    file.write(b"evil")

    monkeypatch.setattr(transfer_module, "_check_sizes", then_change)
    report = target.import_(exported, trust_binaries=True)
    assert report.num_imported == {}
    assert {failure.detail.split(" ", 2)[2] for _, failure in report.failures} == {"changed while it was read"}
    assert target.entries() == []
    assert staged(target.root) == []


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo, lambda path: None])
def test_what_is_no_file_is_an_error_and_not_waited_for(target, tmp_path, make):
    make(tmp_path / "odd.tar")
    with pytest.raises(OSError, match=r"odd\.tar"):
        target.import_(tmp_path / "odd.tar")


def test_a_link_to_an_export_is_as_good(exported, target, tmp_path):
    (tmp_path / "link.tar").symlink_to(exported)
    assert target.import_(tmp_path / "link.tar").num_imported == {"decisions": 1}


def test_an_import_into_a_full_disk_keeps_whole_entries(cache, exported, tmp_path):
    with mounted(tmp_path / "small", "size=64k,mode=0700") as can_mount:
        if not can_mount:
            pytest.skip("mounting a small tmpfs takes root")
        target = KernelsCache(tmp_path / "small" / "cache")
        cache.publish("kernels", key(2), ARCHITECTURE, {"a": bytes(100_000)}, {})
        cache.export(tmp_path / "large.tar")
        with pytest.raises(OSError, match="space"):
            target.import_(tmp_path / "large.tar", trust_binaries=True)
        assert target.verify().problems == ()
        assert staged(target.root) == []


def test_a_device_that_is_told_of_is_shown(cache):
    from hone.kernels import DeviceKey

    device = DeviceKey({"kind": "cuda", "name": "NVIDIA H200", "architecture": "sm_90a"})
    cache.describe(device)
    cache.describe(device)
    cache.publish("decisions", key(1), DEVICE, {"a": b"a"}, {})
    assert cache.devices() == {device.digest: device, DEVICE: None}
