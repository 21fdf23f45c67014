"""Whatever lies where an entry should be, `get` answers; it says why there is none, counts it, and goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from hone.kernels import Entry, KernelsCache, MissReason, digest_of
from hone.kernels.digest import canonical_json, digest_of_bytes
from tests.unit.kernels.support import DEVICE, key, staged, warnings_of


@pytest.fixture
def entry(cache):
    published = cache.publish("artifacts", key(1), DEVICE, {"module.so": b"code" * 100, "b.json": b"{}"}, {"n": 1})
    assert isinstance(published, Entry)
    return published


def rewrite(entry: Entry, change, *, seal: bool = True) -> None:
    """Changes the manifest, with a right seal or the old one."""
    path = entry.path / "manifest.json"
    told = json.loads(path.read_bytes())
    change(told)
    if seal:
        told.pop("seal")
        told["seal"] = digest_of_bytes(canonical_json(told))
    path.write_text(json.dumps(told))


def flip_a_bit(entry):
    data = bytearray(entry.files["module.so"].read_bytes())
    data[7] ^= 1
    entry.files["module.so"].write_bytes(data)


def truncate(entry):
    os.truncate(entry.files["module.so"], 10)


def grow(entry):
    with entry.files["module.so"].open("ab") as file:
        file.write(b"x")


def cut_manifest(entry):
    path = entry.path / "manifest.json"
    os.truncate(path, path.stat().st_size // 2)


def empty_manifest(entry):
    (entry.path / "manifest.json").write_bytes(b"")


def binary_manifest(entry):
    (entry.path / "manifest.json").write_bytes(b"\xff\x00" * 100)


def deep_manifest(entry):
    (entry.path / "manifest.json").write_bytes(b"[" * 100_000)


def huge_number(entry):
    (entry.path / "manifest.json").write_bytes(b'{"schema": ' + b"1" * 10_000 + b"}")


def list_manifest(entry):
    (entry.path / "manifest.json").write_bytes(b"[]")


def content_changed(entry):
    rewrite(entry, lambda told: told["content"].update(n=2), seal=False)


def other_digest(entry):
    rewrite(entry, lambda told: told.update(digest=key(2)))


def other_kind(entry):
    rewrite(entry, lambda told: told.update(kind="decisions"))


def no_files(entry):
    rewrite(entry, lambda told: told.pop("files"))


def size_is_text(entry):
    rewrite(entry, lambda told: told["files"]["module.so"].update(size="400"))


def escaping_name(entry):
    rewrite(entry, lambda told: told["files"].update({"../../../clock": told["files"].pop("b.json")}))


def wrong_key(entry):
    rewrite(entry, lambda told: told["content"].update(key={"other": 1}))


def not_a_number(entry):
    rewrite(entry, lambda told: told["content"].update(n=None))
    path = entry.path / "manifest.json"
    path.write_text(path.read_text().replace('"n": null', '"n": NaN'))


CORRUPTIONS = [
    flip_a_bit,
    truncate,
    grow,
    cut_manifest,
    empty_manifest,
    binary_manifest,
    deep_manifest,
    list_manifest,
    content_changed,
    other_digest,
    other_kind,
    no_files,
    size_is_text,
    escaping_name,
    wrong_key,
    not_a_number,
    huge_number,
]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("damage", CORRUPTIONS, ids=lambda damage: damage.__name__)
def test_a_corrupt_entry_is_a_miss_and_taken_away(cache, entry, damage, hold, caplog):
    damage(entry)
    miss = cache.get("artifacts", key(1), DEVICE, hold=hold)
    assert not miss
    assert miss.reason is MissReason.CORRUPT
    assert str(entry.path) in miss.detail
    counts = cache.statistics.snapshot()
    assert counts.misses == {("artifacts", "corrupt"): 1}
    assert counts.num_discarded == 1
    assert not entry.path.exists()
    assert staged(cache.root) == []
    assert len(warnings_of(caplog)) == 1
    assert isinstance(cache.publish("artifacts", key(1), DEVICE, {"a": b"new"}, {}), Entry)


@pytest.mark.parametrize("name", ["module.so", "manifest.json"])
def test_a_missing_file_makes_it_incomplete(cache, entry, name):
    (entry.path / name).unlink()
    assert cache.get("artifacts", key(1), DEVICE).reason is MissReason.INCOMPLETE
    assert not entry.path.exists()


@pytest.mark.parametrize("schema", [0, 2, "1", None])
def test_another_schema_is_a_miss_and_stays(cache, entry, schema):
    rewrite(entry, lambda told: told.update(schema=schema))
    assert cache.get("artifacts", key(1), DEVICE).reason is MissReason.SCHEMA
    assert entry.path.exists()
    assert isinstance(cache.publish("artifacts", key(1), DEVICE, {"a": b"new"}, {}), Entry), "and is replaced"


def writable_folder(entry, _tmp_path):
    entry.path.chmod(0o770)


def writable_file(entry, _tmp_path):
    entry.files["module.so"].chmod(0o666)


def writable_manifest(entry, _tmp_path):
    (entry.path / "manifest.json").chmod(0o620)


def linked_folder(entry, tmp_path):
    entry.path.rename(tmp_path / "elsewhere")
    entry.path.symlink_to(tmp_path / "elsewhere")


def linked_file(entry, tmp_path):
    entry.files["module.so"].rename(tmp_path / "elsewhere")
    entry.files["module.so"].symlink_to(tmp_path / "elsewhere")


def linked_manifest(entry, tmp_path):
    (entry.path / "manifest.json").rename(tmp_path / "elsewhere")
    (entry.path / "manifest.json").symlink_to(tmp_path / "elsewhere")


def pipe(entry, _tmp_path):
    entry.files["module.so"].unlink()
    os.mkfifo(entry.files["module.so"])


def pipe_for_manifest(entry, _tmp_path):
    (entry.path / "manifest.json").unlink()
    os.mkfifo(entry.path / "manifest.json", 0o600)


def folder_for_file(entry, _tmp_path):
    entry.files["module.so"].unlink()
    entry.files["module.so"].mkdir()


def file_for_folder(entry, _tmp_path):
    shutil.rmtree(entry.path)
    entry.path.write_bytes(b"")


FOREIGN = [
    writable_folder,
    writable_file,
    writable_manifest,
    linked_folder,
    linked_file,
    linked_manifest,
    pipe,
    pipe_for_manifest,
    folder_for_file,
    file_for_folder,
]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("change", FOREIGN, ids=lambda change: change.__name__)
def test_what_others_may_have_made_is_not_used_and_not_touched(cache, entry, change, hold, tmp_path, caplog):
    change(entry, tmp_path)
    assert cache.get("artifacts", key(1), DEVICE, hold=hold).reason is MissReason.FOREIGN
    assert cache.get("artifacts", key(1), DEVICE, hold=hold).reason is MissReason.FOREIGN
    assert os.path.lexists(entry.path)
    assert len(warnings_of(caplog)) == 1, "told once"
    failure = cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {})
    assert not failure
    assert failure.reason == "foreign"
    assert cache._store.holds.num_held == 0


@pytest.mark.parametrize("which", ["folder", "manifest.json", "module.so"])
def test_someone_elses_entry_is_foreign(cache, entry, which, monkeypatch):
    path = entry.path if which == "folder" else entry.path / which
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:  # only root can give files away: seen as another user, all of them are someone else's
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.get("artifacts", key(1), DEVICE).reason is MissReason.FOREIGN
    assert entry.path.exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("hold", [False, True])
def test_an_entry_that_cannot_be_read_now_stays(cache, entry, number, hold, monkeypatch):
    real = os.open

    def refuse(path, flags, *arguments, **names):
        if str(path).endswith("manifest.json"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *arguments, **names)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        miss = cache.get("artifacts", key(1), DEVICE, hold=hold)
    assert miss.reason is MissReason.UNREADABLE
    assert os.strerror(number) in miss.detail
    assert isinstance(cache.get("artifacts", key(1), DEVICE), Entry)


def test_damage_of_one_entry_costs_no_other(cache, entry):
    other = cache.publish("artifacts", key(2), DEVICE, {"a": b"a"}, {})
    flip_a_bit(entry)
    assert not cache.get("artifacts", key(1), DEVICE)
    assert cache.get("artifacts", key(2), DEVICE) == other


def test_verify_tells_of_every_bad_entry_and_touches_none(cache, entry):
    cache.publish("artifacts", key(2), DEVICE, {"a": b"a"}, {})
    lonely = cache.publish("decisions", key(3), DEVICE, {"a": b"a"}, {})
    flip_a_bit(entry)
    (lonely.path / "a").unlink()
    report = cache.verify()
    assert report.num_sound == 1
    assert {(name.digest, miss.reason) for name, miss in report.problems} == {
        (key(1), MissReason.CORRUPT),
        (key(3), MissReason.INCOMPLETE),
    }
    assert entry.path.exists()
    assert cache.verify(remove=True).num_removed == 2
    assert cache.verify().problems == ()


def test_a_copied_entry_is_sound_but_not_proven(cache, entry, root, tmp_path):
    shutil.copytree(root, tmp_path / "seeded")
    seeded = KernelsCache(tmp_path / "seeded")
    found = seeded.get("artifacts", key(1), DEVICE)
    assert isinstance(found, Entry)
    assert not found.proven
    assert seeded.prove(found).proven
    assert seeded.get("artifacts", key(1), DEVICE).proven
    assert cache.get("artifacts", key(1), DEVICE).proven


def test_digest_fields_can_be_read_back(cache):
    fields = {"graph": "abc"}
    cache.publish("artifacts", digest_of(fields), DEVICE, {"a": b"a"}, {"key": fields})
    assert cache.get("artifacts", digest_of(fields), DEVICE).manifest["key"] == fields
