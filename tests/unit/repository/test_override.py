from __future__ import annotations

import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.errors import ConfigError, ErrorKind, InvalidRequest, RepositoryError, Unsupported
from hone.repository import ModelRepository
from hone.repository.override import OverrideFolders
from hone.types import LoadParameters

FILES = {"1/model.onnx": b"brought along"}


def leftovers(tmp_path):
    return [path.name for path in tmp_path.glob("hone-override-*")]


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_files_of_a_request_are_a_model_of_their_own(disk, tmp_path):
    disk.model("m", "max_batch_size: 1")
    definition = disk.repository.read("m", LoadParameters(config="{}", files=FILES))
    assert definition.versions[1].read_bytes() == b"brought along"
    assert definition.config.max_batch_size == 0
    assert not definition.path.is_relative_to(disk.root)
    for path in [definition.path, *definition.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert (disk.root / "m" / "1" / "model.onnx").read_bytes() == b"graph"
    assert disk.repository.read("new", LoadParameters(config="{}", files=FILES)).name == "new"


def test_folders_are_removed_when_told_and_at_the_end(disk, tmp_path):
    first = disk.repository.read("m", LoadParameters(config="{}", files=FILES))
    second = disk.repository.read("m", LoadParameters(config="{}", files=FILES))
    assert first.path != second.path
    disk.repository.release(first)
    disk.repository.release(first)
    assert not first.path.exists()
    assert second.path.is_dir()
    assert leftovers(tmp_path) == [second.path.parent.name]
    disk.repository.close()
    assert leftovers(tmp_path) == []


def test_releasing_a_model_of_the_repository_touches_nothing(disk):
    disk.model("m")
    disk.repository.release(disk.repository.read("m"))
    disk.repository.close()
    assert (disk.root / "m" / "1" / "model.onnx").exists()


def test_files_need_a_config(disk, tmp_path):
    with pytest.raises(InvalidRequest) as caught:
        disk.repository.read("m", LoadParameters(files=FILES))
    assert str(caught.value) == "Load parameter 'config' must be specified for model file override"
    assert leftovers(tmp_path) == []


def test_override_is_off_unless_allowed(disk):
    repository = ModelRepository([disk.root])
    with pytest.raises(Unsupported, match="--allow-file-override=true") as caught:
        repository.read("m", LoadParameters(config="{}", files=FILES))
    assert caught.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../escape",
        "1/../../escape",
        "..",
        "1/..",
        "./1/model.onnx",
        "1//model.onnx",
        "1/",
        "a\0b",
        "\ud800",
        ".hidden",
        "1/model.onnx.tmp",
        "x" * 256,
        "/".join("x" * 17),
        "config.pbtxt",
    ],
)
def test_paths_that_do_not_stay_inside_are_refused(disk, tmp_path, path):
    with pytest.raises(RepositoryError) as caught:
        disk.repository.read("m", LoadParameters(config="{}", files={**FILES, path: b"evil"}))
    assert "invalid file parameter 'file:" in caught.value.reason
    str(caught.value).encode("utf-8")
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "escape").exists()


def test_a_file_cannot_be_a_folder_too(disk, tmp_path):
    for files in ({"1": b"", "1/model.onnx": b""}, {"1/model.onnx": b"", "1": b""}, {"a": b"", "a/b/c": b""}):
        with pytest.raises(RepositoryError, match="another file has it as its folder"):
            disk.repository.read("m", LoadParameters(config="{}", files=files))
    assert leftovers(tmp_path) == []


def test_too_many_files_are_refused(disk, tmp_path):
    files = {f"1/{i}": b"" for i in range(1001)}
    with pytest.raises(RepositoryError, match="1001 files, expected at most 1000"):
        disk.repository.read("m", LoadParameters(config="{}", files=files))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{", InvalidRequest),
        ('{"max_batch_size": -1}', ConfigError),
        ('{"name": "other"}', RepositoryError),
        ('{"default_model_filename": "x"}', RepositoryError),
        ('{"version_policy": {"specific": {"versions": [2]}}}', InvalidRequest),
    ],
)
def test_a_refused_load_leaves_nothing_behind(disk, tmp_path, config, problem):
    with pytest.raises(problem):
        disk.repository.read("m", LoadParameters(config=config, files=FILES))
    assert leftovers(tmp_path) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    folders = OverrideFolders()
    monkeypatch.setattr("os.fdopen", full)
    with pytest.raises(RepositoryError, match="No space left on device"):
        folders.write("m", FILES)
    assert leftovers(tmp_path) == []


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.text("ab./~\\\0é1", max_size=12), st.binary(max_size=3), min_size=1, max_size=4))
def test_any_paths_are_written_inside_or_refused(tmp_path_factory, files):
    root = tmp_path_factory.mktemp("override")
    folders = OverrideFolders()
    try:
        folder = folders.write("m", files)
    except RepositoryError:
        assert folders._folders == set()
        return
    try:
        written = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert written == files
        assert list(root.iterdir()) == []
    finally:
        folders.close()
    assert not folder.exists()
