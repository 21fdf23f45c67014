from __future__ import annotations

import os
import shutil

import pytest

from hone.errors import HoneError
from hone.repository import ModelRepository, RepositoryPoller
from hone.repository.fingerprint import Fingerprints


class Server:
    """A stand-in for what follows the poller: it reads what it is told to, and remembers the fingerprints."""

    def __init__(self, repository: ModelRepository) -> None:
        self.repository = repository
        self.poller = RepositoryPoller(repository)
        self.loaded: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.attempts: list[str] = []

    def poll(self):
        result = self.poller.poll(self.loaded)
        for name in result.load:
            self.attempts.append(name)
            try:
                self.loaded[name] = self.repository.read(name).fingerprint
                self.failed.pop(name, None)
            except HoneError as problem:
                self.failed[name] = str(problem)
        for name in result.unload:
            self.loaded.pop(name, None)
            self.failed.pop(name, None)
        return result

    def settle(self) -> list[str]:
        """Poll until nothing is left to do; what was loaded on the way."""
        self.attempts.clear()
        for _ in range(4):
            self.poll()
        return list(self.attempts)


@pytest.fixture
def server(disk):
    return Server(disk.repository)


def test_a_model_is_taken_when_it_looked_the_same_twice(disk, server):
    disk.model("m")
    assert server.poll().load == []
    assert server.poll().load == ["m"]
    assert server.poll().load == []
    assert list(server.loaded) == ["m"]


def test_a_model_loaded_at_the_start_is_not_loaded_again(disk, server):
    disk.model("m")
    server.loaded["m"] = disk.repository.read("m").fingerprint
    assert server.settle() == []


def test_a_file_that_grows_between_polls_waits(disk, server):
    disk.model("m", content=b"")
    for i in range(5):
        with (disk.root / "m" / "1" / "model.onnx").open("ab") as file:
            file.write(b"part")
        assert server.poll().load == [], i
    assert disk.num_hashed == 0
    assert server.poll().load == ["m"]


def test_a_new_version_that_is_being_copied_leaves_the_old_one(disk, server):
    disk.model("m")
    server.settle()
    first = server.loaded["m"]
    for i in range(3):
        disk.write("m/2/model.onnx", b"x" * (i + 1))
        assert server.poll().load == []
        assert server.loaded["m"] == first
    assert server.settle() == ["m"]
    assert list(disk.repository.read("m").versions) == [2]


def test_temporary_names_are_no_change(disk, server):
    disk.model("m")
    server.settle()
    for name in ("2/model.onnx.tmp", ".config.pbtxt.swp", "config.pbtxt~", "1/.#model.onnx", "3/model.onnx.part"):
        disk.write(f"m/{name}")
    (disk.root / "m" / "4").mkdir()
    disk.model(".staging")
    assert server.settle() == []


def test_a_rename_into_place_is_taken(disk, server):
    disk.model("m")
    server.settle()
    disk.write("m/1/model.onnx.tmp", b"new")
    (disk.root / "m" / "1" / "model.onnx.tmp").rename(disk.root / "m" / "1" / "model.onnx")
    assert server.settle() == ["m"]
    disk.model(".incoming", content=b"all at once")
    (disk.root / ".incoming").rename(disk.root / "n")
    assert server.settle() == ["n"]


def test_new_times_without_new_contents_are_no_change(disk, server):
    disk.model("m", "max_batch_size: 1")
    server.settle()
    for path in (disk.root / "m").rglob("*"):
        os.utime(path, ns=(7, 7))
    assert server.settle() == []
    for path in (disk.root / "m").rglob("*.onnx"):
        path.write_bytes(path.read_bytes())
    assert server.settle() == []


def test_an_overwrite_in_place_with_the_times_put_back_is_taken(disk, server):
    file = disk.model("m") / "1" / "model.onnx"
    server.settle()
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock has ticked
        with file.open("r+b") as opened:
            opened.write(b"GRAPH")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert server.settle() == ["m"]


def test_a_bad_model_is_tried_once_and_again_when_it_is_fixed(disk, server):
    disk.model("good")
    disk.model("bad", "max_batch_size: -1")
    assert server.settle() == ["bad", "good"]
    assert server.settle() == []
    assert "max_batch_size" in server.failed["bad"]
    disk.model("bad", "max_batch_size: 1")
    disk.model("another")
    assert server.settle() == ["another", "bad"]
    assert server.failed == {}
    assert sorted(server.loaded) == ["another", "bad", "good"]


def test_a_served_model_that_turns_bad_and_back_is_told_good_again(disk, server):
    disk.model("m", "max_batch_size: 1")
    server.settle()
    good = server.loaded["m"]
    for _ in range(2):
        disk.write("m/config.pbtxt", "nonsense")
        assert server.settle() == ["m"]
        assert server.loaded["m"] == good
        disk.write("m/config.pbtxt", "max_batch_size: 1")
        assert server.settle() == ["m"]
        assert (server.loaded["m"], server.failed) == (good, {})


def test_a_vanished_folder_unloads_once_it_stayed_away(disk, server):
    disk.model("m")
    server.settle()
    shutil.rmtree(disk.root / "m")
    assert server.poll().unload == []
    assert server.poll().unload == ["m"]
    assert server.poll().unload == []
    disk.model("m")
    assert server.settle() == ["m"]


def test_a_folder_away_for_one_poll_keeps_serving(disk, server):
    disk.model("m")
    server.settle()
    (disk.root / "m").rename(disk.root / ".old")
    assert server.poll().unload == []
    disk.model("m", content=b"new")
    assert server.settle() == ["m"]
    assert "m" in server.loaded


def test_a_failed_model_that_vanishes_is_told_too(disk, server):
    disk.model("bad", "nonsense")
    server.settle()
    shutil.rmtree(disk.root / "bad")
    server.poll()
    assert server.poll().unload == ["bad"]


def test_a_model_replaced_by_a_file_unloads(disk, server):
    disk.model("m")
    server.settle()
    shutil.rmtree(disk.root / "m")
    disk.write("m", b"a file now")
    server.settle()
    assert server.loaded == {}


def test_a_name_in_two_roots_unloads_and_comes_back(disk, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    repository = ModelRepository([disk.root, other])
    server = Server(repository)
    disk.model("m")
    assert server.settle() == ["m"]
    shutil.copytree(disk.root / "m", other / "m")
    result = [server.poll(), server.poll()]
    assert (result[0].unload, result[0].problems) == ([], {})
    assert (result[1].unload, result[1].problems) == (["m"], {"m": "model appears in two or more repositories"})
    server.loaded["m"] = ""  # a server may list it with its problem
    assert server.poll().unload == []
    shutil.rmtree(disk.root / "m")
    assert server.settle() == ["m"]


def test_an_unreadable_folder_keeps_serving_and_says_why(disk, server, monkeypatch):
    disk.model("m")
    disk.model("n")
    server.settle()
    with monkeypatch.context() as patch:
        scandir = os.scandir

        def refusing(path):
            if str(path) == str(disk.root / "m"):
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)

        patch.setattr(os, "scandir", refusing)
        disk.model("n", content=b"new")
        assert server.settle() == ["n"]
        result = server.poll()
        assert (result.unload, result.problems) == ([], {"m": "cannot read the model's folder: Permission denied"})
    assert sorted(server.loaded) == ["m", "n"]
    assert server.settle() == ["m"]  # told again, so that nobody goes on saying it is unreadable
    assert server.poll().problems == {}


def test_a_file_that_cannot_be_read_is_tried_at_every_poll(disk):
    refusing = True

    def hash_file(path):
        if refusing:
            raise OSError(5, "Input/output error", str(path))
        return "digest"

    server = Server(ModelRepository([disk.root], fingerprints=Fingerprints(hash_file=hash_file)))
    disk.model("m")
    server.poll()
    for _ in range(2):
        result = server.poll()
        assert (result.load, result.problems) == ([], {"m": "cannot read the model's files: Input/output error"})
    refusing = False
    assert server.poll().load == ["m"]


def test_a_root_away_keeps_serving(disk, server):
    disk.model("m")
    server.settle()
    disk.root.rename(disk.root.with_name("away"))
    for _ in range(3):
        result = server.poll()
        assert result.unload == []
    assert list(result.problems) == ["m"]
    disk.root.with_name("away").rename(disk.root)
    num_hashed = disk.num_hashed
    assert server.settle() == ["m"]
    assert disk.num_hashed == num_hashed


def test_links_that_lead_round_are_one_models_problem(disk, server):
    disk.model("good")
    folder = disk.model("m")
    (folder / "1" / "up").symlink_to(folder)
    (disk.model("bad") / "self").symlink_to("self")
    assert server.settle() == ["good", "m"]
    assert server.poll().problems == {"bad": "cannot read the model's folder: Too many levels of symbolic links"}


def test_a_thousand_models_are_read_once_and_then_only_what_changed(disk, monkeypatch):
    for i in range(1000):
        disk.model(f"m{i}", "")
    poller = RepositoryPoller(disk.repository)
    loaded: dict[str, str] = {}
    poller.poll(loaded)
    assert disk.num_hashed == 0
    names = poller.poll(loaded).load
    assert (len(names), disk.num_hashed) == (1000, 2000)
    for name in names:
        loaded[name] = disk.repository.read(name).fingerprint
    assert disk.num_hashed == 2000  # reading a model uses the digests of the poll

    opened = []
    monkeypatch.setattr("hone.repository.fingerprint.open_regular", opened.append)
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    for _ in range(3):
        assert poller.poll(loaded).load == []
    assert (disk.num_hashed, opened) == (2000, [])
    assert len(listed) == 3 * 2001  # the root, and of each model its folder and its version's
    monkeypatch.undo()

    disk.model("m7", content=b"new")
    poller.poll(loaded)
    assert poller.poll(loaded).load == ["m7"]
    assert disk.num_hashed <= 2002
