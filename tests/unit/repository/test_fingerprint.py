from __future__ import annotations

import os
from pathlib import Path

import pytest

from hone.repository.fingerprint import Fingerprints, hash_file, list_files

NOW = 2**62


class Counted:
    def __init__(self, now_ns: int = NOW) -> None:
        self.read: list[str] = []
        self.fingerprints = Fingerprints(hash_file=self._hash, now_ns=lambda: now_ns)

    def _hash(self, path: Path) -> str:
        self.read.append(path.name)
        return hash_file(path)

    def of(self, folder: Path) -> str:
        return self.fingerprints.of(folder, list_files(folder))


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "m"
    (made / "1").mkdir(parents=True)
    (made / "1" / "model.onnx").write_bytes(b"graph")
    (made / "config.pbtxt").write_bytes(b"")
    return made


def test_files_are_read_once_while_they_look_the_same(folder):
    counted = Counted()
    first = counted.of(folder)
    assert sorted(counted.read) == ["config.pbtxt", "model.onnx"]
    assert counted.of(folder) == first
    assert len(counted.read) == 2


def test_a_new_modification_time_costs_a_look_and_changes_nothing(folder):
    counted = Counted()
    first = counted.of(folder)
    os.utime(folder / "1" / "model.onnx", ns=(5, 5))
    assert counted.of(folder) == first
    assert counted.read.count("model.onnx") == 2


def test_an_overwrite_in_place_with_size_and_time_restored_is_seen(folder):
    """The change time cannot be set; the clock of the cache says that the first digest was of a settled file."""
    counted = Counted()
    file = folder / "1" / "model.onnx"
    first, before = counted.of(folder), file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock has ticked
        with file.open("r+b") as opened:
            opened.write(b"GRAPH")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert counted.of(folder) != first


def test_a_rename_into_place_with_size_and_time_restored_is_seen(folder):
    counted = Counted()
    file = folder / "1" / "model.onnx"
    first, before = counted.of(folder), file.stat()
    (folder / "1" / "model.onnx.tmp").write_bytes(b"GRAPH")
    (folder / "1" / "model.onnx.tmp").rename(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert counted.of(folder) != first


def test_a_file_younger_than_a_tick_is_read_again(folder):
    young = Counted(now_ns=max(entry.ctime_ns for entry in list_files(folder)) + 1)
    young.of(folder)
    young.of(folder)
    assert young.read.count("model.onnx") == 2


def test_names_count(folder):
    counted = Counted()
    first = counted.of(folder)
    (folder / "1" / "model.onnx").rename(folder / "1" / "net.onnx")
    assert counted.of(folder) != first


def test_contents_do_not_run_into_names(tmp_path):
    for name, files in {"a": {"x": b"1", "y": b"2"}, "b": {"x": b"12", "y": b""}, "c": {"xy": b"12"}}.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
    counted = Counted()
    assert len({counted.of(tmp_path / name) for name in "abc"}) == 3


def test_the_same_files_elsewhere_have_the_same_fingerprint(folder, tmp_path):
    counted = Counted()
    first = counted.of(folder)
    folder.rename(tmp_path / "n")
    assert counted.of(tmp_path / "n") == first


def test_digests_of_files_that_are_gone_are_forgotten(folder):
    counted = Counted()
    for i in range(50):
        (folder / "1" / "model.onnx").write_bytes(b"x" * (i + 1))
        counted.of(folder)
    assert len(counted.fingerprints._digests) > 10
    counted.fingerprints.keep_only([(folder, list_files(folder))])
    assert len(counted.fingerprints._digests) == 2
    counted.read.clear()
    counted.of(folder)
    assert counted.read == []
