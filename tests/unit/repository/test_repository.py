from __future__ import annotations

import os
from pathlib import Path

import pytest

from hone.errors import ConfigError, ErrorKind, InvalidRequest, NotFound, RepositoryError
from hone.repository import ModelFolder, ModelRepository
from hone.repository.fingerprint import MAX_FILES, Fingerprints, list_files
from hone.types import LoadParameters


def reason(repository, name, parameters=None):
    with pytest.raises(RepositoryError) as caught:
        repository.read(name, *([parameters] if parameters else []))
    assert caught.value.kind is ErrorKind.INTERNAL
    assert str(caught.value).startswith(f"failed to load '{name}', failed to poll from model repository: ")
    return caught.value.reason


# --- finding models ------------------------------------------------------------------------------------------------


def test_scan_finds_folders_and_passes_over_the_rest(disk):
    disk.model("a")
    disk.model("b")
    for name in (".hidden", "c.tmp", "d~", "e.part", "f.swp", ".#g", "lost+found"):
        disk.model(name)
    disk.write("README.md", "not a model")
    (disk.root / "round").symlink_to("round")
    (disk.root / "dangling").symlink_to("nowhere")
    assert list(disk.repository.scan()) == ["a", "b"]
    assert reason(disk.repository, ".hidden") == "model not found in any model repository"
    assert reason(disk.repository, "README.md") == "model not found in any model repository"


def test_a_model_folder_may_be_a_link(disk, tmp_path):
    disk.model("a")
    (disk.root / "a").rename(tmp_path / "elsewhere")
    (disk.root / "a").symlink_to(tmp_path / "elsewhere")
    folder = disk.repository.scan()["a"]
    assert isinstance(folder, ModelFolder)
    assert disk.repository.read("a").versions[1].read_bytes() == b"graph"


def test_a_name_in_two_roots_is_a_problem_for_both(disk, tmp_path):
    other = tmp_path / "other"
    (other / "a" / "1").mkdir(parents=True)
    (other / "a" / "1" / "model.onnx").write_bytes(b"other")
    (other / "b" / "1").mkdir(parents=True)
    (other / "b" / "1" / "model.onnx").write_bytes(b"other")
    disk.model("a")
    repository = ModelRepository([disk.root, other])
    found = repository.scan()
    assert found["a"] == "model appears in two or more repositories"
    assert isinstance(found["b"], ModelFolder)
    assert reason(repository, "a") == "model appears in two or more repositories"
    assert repository.read("b").path == other / "b"


def test_roots_must_be_folders(tmp_path):
    with pytest.raises(NotFound, match="is not a folder"):
        ModelRepository([tmp_path / "missing"])
    with pytest.raises(ValueError, match="plain name"):
        ModelRepository([tmp_path], config_name="../x")


def test_a_root_that_goes_away_leaves_its_models_unusable_and_not_gone(disk):
    disk.model("a")
    disk.repository.scan()
    disk.root.rename(disk.root.with_name("away"))
    assert disk.repository.scan() == {"a": "the model repository's folder cannot be read"}
    disk.root.with_name("away").rename(disk.root)
    assert isinstance(disk.repository.scan()["a"], ModelFolder)


@pytest.mark.parametrize("name", ["", "  ", "a/b", "..", " .. ", ".", "a\0b", "\ud800", "\udcff"])
def test_names_that_cannot_be_a_folders_are_refused_before_looking(disk, name):
    with pytest.raises(InvalidRequest) as caught:
        disk.repository.read(name)
    str(caught.value).encode("utf-8")


def test_a_name_too_long_for_the_file_system(disk):
    assert "File name too long" in reason(disk.repository, "a" * 5000)


def test_a_folder_name_that_is_not_text_is_a_problem(disk):
    (disk.root / os.fsdecode(b"\xff\xfe")).mkdir()
    ((name, problem),) = disk.repository.scan().items()
    name.encode("utf-8")
    assert problem == "expected a folder name in UTF-8"


def test_a_folder_that_cannot_be_listed_is_a_problem_of_that_model_alone(disk, monkeypatch):
    disk.model("a")
    disk.model("b")
    scandir = os.scandir

    def refusing(path):
        if Path(path) == disk.root / "a":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = disk.repository.scan()
    assert found["a"] == "cannot read the model's folder: Permission denied"
    assert isinstance(found["b"], ModelFolder)
    assert reason(disk.repository, "a") == "cannot read the model's folder: Permission denied"


# --- listings ------------------------------------------------------------------------------------------------------


def test_links_that_lead_round_are_followed_once(disk):
    folder = disk.model("a")
    (folder / "1" / "up").symlink_to(folder)
    (folder / "1" / "here").symlink_to(folder / "1")
    (folder / "gone").symlink_to("nowhere")
    assert [entry.relative for entry in list_files(folder)] == ["1/model.onnx"]


def test_a_file_that_links_to_itself_is_a_problem(disk):
    folder = disk.model("a")
    (folder / "labels.txt").symlink_to("labels.txt")
    assert disk.repository.scan()["a"] == "cannot read the model's folder: Too many levels of symbolic links"


def test_pipes_are_never_waited_for(disk):
    folder = disk.model("a")
    os.mkfifo(folder / "pipe")
    os.mkfifo(folder / "1" / "pipe")
    assert [entry.relative for entry in list_files(folder)] == ["1/model.onnx"]
    disk.repository.read("a")


def test_a_link_to_a_whole_tree_stops_at_a_limit(disk, monkeypatch):
    monkeypatch.setattr("hone.repository.fingerprint.MAX_FILES", 3)
    for i in range(4):
        disk.write(f"a/1/{i}")
    assert disk.repository.scan()["a"] == "cannot read the model's folder: more than 3 files"
    assert MAX_FILES == 10_000


# --- reading -------------------------------------------------------------------------------------------------------


def test_a_model_without_a_config(disk):
    disk.model("m")
    definition = disk.repository.read("m")
    assert definition.config.name == "m"
    assert definition.versions == {1: disk.root / "m" / "1" / "model.onnx"}
    assert definition.labels == {}


def test_version_folders_are_numbers_without_leading_zeros(disk):
    disk.model("m", "version_policy { all {} }", 1, 2, 10)
    for name in ("0", "03", "v4", "-5", "1.5", " 6", str(2**63), "٣"):
        disk.write(f"m/{name}/model.onnx")
    (disk.root / "m" / "11").mkdir()  # still to be filled
    disk.write("m/12/model.onnx.part")
    assert list(disk.repository.read("m").versions) == [1, 2, 10]


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", [10]),
        ("version_policy { latest {} }", [10]),
        ("version_policy { latest { num_versions: 2 } }", [2, 10]),
        ("version_policy { latest { num_versions: 9 } }", [1, 2, 10]),
        ("version_policy { all {} }", [1, 2, 10]),
        ("version_policy { specific { versions: [ 10, 1, 1 ] } }", [1, 10]),
        ("version_policy { specific { versions: [ 2, 7 ] } }", [2]),
    ],
)
def test_version_policy(disk, policy, versions):
    disk.model("m", policy, 1, 2, 10)
    assert list(disk.repository.read("m").versions) == versions


def test_no_version_under_the_policy(disk):
    disk.model("m", "version_policy { specific { versions: 7 } }")
    disk.write("empty/config.pbtxt", "")
    for name in ("m", "empty"):
        with pytest.raises(InvalidRequest) as caught:
            disk.repository.read(name)
        assert str(caught.value) == f"at least one version must be available under the version policy of model '{name}'"


def test_a_version_without_its_model_file(disk):
    disk.write("m/1/network.onnx")
    assert reason(disk.repository, "m") == "version 1: expected the model in 'model.onnx', not found"
    disk.write("m/config.pbtxt", "default_model_filename: 'network.onnx'")
    assert disk.repository.read("m").versions[1].name == "network.onnx"


def test_a_large_model_may_be_a_folder_of_the_files_name(disk):
    disk.write("m/1/model.onnx/model.onnx")
    disk.write("m/1/model.onnx/weights.bin")
    assert disk.repository.read("m").versions[1] == disk.root / "m" / "1" / "model.onnx" / "model.onnx"


def test_a_model_file_outside_the_models_folder_is_refused(disk):
    disk.model("secret")
    disk.model("m", "default_model_filename: '../../secret/1/model.onnx'")
    with pytest.raises(ConfigError, match="default_model_filename"):
        disk.repository.read("m")


def test_the_configs_name_must_be_the_folders(disk):
    disk.model("m", 'name: "n"')
    assert reason(disk.repository, "m") == (
        "unexpected directory name 'm' for model 'n', directory name must equal model name"
    )


def test_config_name_selects_a_file_of_configs(disk):
    disk.model("a", "max_batch_size: 1")
    disk.model("b", "max_batch_size: 1")
    disk.write("a/configs/h100.pbtxt", "max_batch_size: 64")
    repository = ModelRepository([disk.root], config_name="h100")
    assert repository.read("a").config.max_batch_size == 64
    assert repository.read("b").config.max_batch_size == 1
    disk.write("a/configs/h100.pbtxt", "nonsense")
    assert "cannot parse configs/h100.pbtxt, line 1" in reason(repository, "a")


def test_a_wrong_value_is_told_with_its_file(disk):
    told = "invalid model configuration for 'm': {}: max_batch_size: expected 0 or more, found -1"
    disk.model("m", "max_batch_size: -1")
    disk.write("m/configs/h100.pbtxt", "max_batch_size: -1")
    for repository, file in (
        (disk.repository, "config.pbtxt"),
        (ModelRepository([disk.root], config_name="h100"), "configs/h100.pbtxt"),
        (ModelRepository([disk.root], config_name="other"), "config.pbtxt"),
    ):
        with pytest.raises(ConfigError) as caught:
            repository.read("m")
        assert (caught.value.file, str(caught.value)) == (file, told.format(file))
    with pytest.raises(ConfigError) as caught:
        disk.repository.read("m", LoadParameters(config='{"max_batch_size": -1}'))
    assert str(caught.value) == told.format("the load request")


def test_a_label_file_that_is_not_there_is_told_with_the_file_that_names_it(disk):
    disk.model("m", "output { name: 'OUT' data_type: TYPE_FP32 dims: 4 label_filename: 'absent.txt' }")
    with pytest.raises(ConfigError, match=r"'m': config\.pbtxt: output\[0\]\.label_filename: cannot read 'absent.txt'"):
        disk.repository.read("m")


def test_a_config_override_replaces_the_file(disk):
    disk.model("m", "this does not parse")
    definition = disk.repository.read("m", LoadParameters(config='{"max_batch_size": 3}'))
    assert (definition.config.max_batch_size, definition.config.name) == (3, "m")
    with pytest.raises(ConfigError, match="max_batch_size: expected 0 or more, found -3"):
        disk.repository.read("m", LoadParameters(config='{"max_batch_size": -3}'))
    assert "directory name must equal" in reason(disk.repository, "m", LoadParameters(config='{"name": "n"}'))
    with pytest.raises(InvalidRequest, match="Invalid config override: "):
        disk.repository.read("m", LoadParameters(config=""))


# --- fingerprints of a definition ----------------------------------------------------------------------------------


def test_fingerprints_tell_what_changed(disk):
    disk.model(
        "m", "version_policy { all {} } output { name: 'y' data_type: TYPE_FP32 dims: 1 label_filename: 'l.txt' }", 1
    )
    disk.write("m/l.txt", "one\n")
    before = disk.repository.read("m")

    disk.write("m/2/model.onnx", b"second")
    added = disk.repository.read("m")
    assert added.fingerprint != before.fingerprint
    assert added.version_fingerprints[1] == before.version_fingerprints[1]
    assert added.config_fingerprint == before.config_fingerprint

    disk.write("m/l.txt", "two\n")
    relabelled = disk.repository.read("m")
    assert relabelled.version_fingerprints == added.version_fingerprints
    assert relabelled.config_fingerprint != added.config_fingerprint

    disk.write("m/1/weights.bin", b"1")
    weights = disk.repository.read("m")
    assert weights.version_fingerprints[1] != added.version_fingerprints[1]
    assert weights.version_fingerprints[2] == added.version_fingerprints[2]

    disk.write("m/warmup/x", b"1")
    assert disk.repository.read("m").config_fingerprint != weights.config_fingerprint


def test_a_versions_fingerprint_does_not_depend_on_its_number(disk):
    disk.model("m", "version_policy { all {} }", 1, 2)
    prints = disk.repository.read("m").version_fingerprints
    assert prints[1] == prints[2]


def test_a_comment_changes_the_files_and_not_the_config(disk):
    disk.model("m", "max_batch_size: 1")
    before = disk.repository.read("m")
    disk.write("m/config.pbtxt", "# new\nmax_batch_size: 1")
    after = disk.repository.read("m")
    assert (after.fingerprint != before.fingerprint, after.config_fingerprint) == (True, before.config_fingerprint)


def test_files_that_change_while_they_are_read_are_refused(disk, tmp_path):
    disk.model("m")
    writes = iter(range(100))

    def hash_while_writing(path):
        path.write_bytes(b"x" * next(writes))
        return "digest"

    repository = ModelRepository([disk.root], fingerprints=Fingerprints(hash_file=hash_while_writing))
    assert reason(repository, "m") == "the model's files changed while they were read; load it again"


def test_reading_again_right_after_an_overwrite_sees_it(disk):
    """With the real clock: files younger than the file system's time stamps are told apart by content alone."""
    repository = ModelRepository([disk.root])
    seen = set()
    for i in range(20):
        disk.model("m", content=bytes([i]))
        seen.add(repository.read("m").fingerprint)
    assert len(seen) == 20
