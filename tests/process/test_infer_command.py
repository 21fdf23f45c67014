"""`hone infer` against a real server: pictures, arrays, lists, and everything that can be wrong with them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from PIL import Image

from tests import models
from tests.process.support import EVERYTHING
from tests.running import RunningServer, run_server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    models.write_model(repository, "scale", models.scale(2.0))
    models.write_model(repository, "scale", models.scale(3.0), version=2, config="version_policy { all { } }")
    models.write_model(repository, "text", models.identity("BYTES"))
    models.write_model(repository, "half", models.identity("FP16"))
    models.write_model(repository, "ints", models.identity("INT32", dims=(3,)))
    models.write_model(repository, "two", models.add_sub())
    average = [helper.make_node("GlobalAveragePool", ["IN"], ["OUT"])]
    picture = {"IN": ("FP32", ("batch", 3, 5, 7))}
    models.write_model(repository, "rgb", models.model(average, picture, {"OUT": ("FP32", ("batch", 3, 1, 1))}))
    (repository / "digits").symlink_to(ROOT / "model_repo" / "digits")
    with run_server(repository, *EVERYTHING) as running:
        yield running


def infer(server: RunningServer, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hone", "infer", *map(str, arguments), "--url", f"127.0.0.1:{server.http_port}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def told(server: RunningServer, *arguments: str | Path) -> str:
    """What a call that has to work prints."""
    done = infer(server, *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def refusal(server: RunningServer, *arguments: str | Path) -> str:
    """What a call that has to fail says."""
    done = infer(server, *arguments)
    assert (done.returncode, done.stdout) == (1, ""), done.stdout
    assert done.stderr.startswith("hone infer: ")
    assert "Traceback" not in done.stderr
    return done.stderr


def json_file(folder: Path, content: object) -> Path:
    file = folder / "input.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def npy_file(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "input.npy", array)
    return folder / "input.npy"


@pytest.mark.parametrize("name", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
def test_pictures_of_digits(server: RunningServer, name: str) -> None:
    answer = told(server, "digits", ROOT / "examples" / "digits" / f"{name}.png")
    output, first, *others = answer.splitlines()
    assert output == "probabilities:"
    assert first.split()[0] == name, answer
    assert len(others) == 2, "the three most probable classes"


def test_a_picture_of_another_size(server: RunningServer) -> None:
    answer = told(server, "digits", ROOT / "examples" / "digits" / "seven_64x64.png", "--top", "1")
    assert [line.split()[0] for line in answer.splitlines()] == ["probabilities:", "seven"]


def test_a_picture_in_colour(server: RunningServer, tmp_path: Path) -> None:
    Image.new("RGB", (14, 10), (255, 0, 51)).save(tmp_path / "red.png")
    assert told(server, "rgb", tmp_path / "red.png") == "OUT FP32 [1, 3, 1, 1]: 1, 0, 0.2\n"


def test_arrays_and_lists(server: RunningServer, tmp_path: Path) -> None:
    row = np.array([1.0, 2.5, -3.0, 0.0])
    assert told(server, "scale", npy_file(tmp_path, row)) == "OUT FP32 [1, 4]: 3, 7.5, -9, 0\n"
    assert told(server, "scale", npy_file(tmp_path, row[np.newaxis])) == "OUT FP32 [1, 4]: 3, 7.5, -9, 0\n"
    assert told(server, "scale", json_file(tmp_path, [1, 2.5, -3, 0])) == "OUT FP32 [1, 4]: 3, 7.5, -9, 0\n"
    assert told(server, "ints", json_file(tmp_path, [1, -2, 3])) == "OUT INT32 [3]: 1, -2, 3\n"


def test_a_version_and_json(server: RunningServer, tmp_path: Path) -> None:
    file = json_file(tmp_path, [1, 1, 1, 1])
    answer = json.loads(told(server, "scale", file, "--model-version", "1", "--json"))
    assert answer["model_version"] == "1"
    assert answer["outputs"] == [{"name": "OUT", "datatype": "FP32", "shape": [1, 4], "data": [2.0, 2.0, 2.0, 2.0]}]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.json", b"[1, 2", "cannot be read as FP32 array"),
        ("x.json", b"\xff\xfe", "cannot be read as FP32 array"),
        ("x.json", b'{"a": 1}', "cannot be read as FP32 array"),
        ("x.json", b"[[1, 2], [3]]", "cannot be read as FP32 array"),
        ("x.json", b'["a", "b", "c", "d"]', "cannot be read as FP32 array"),
        ("x.json", b"[1, 2, 3]", "array of shape [3] does not fit the model's [4]"),
        ("x.json", b"", "cannot be read as FP32 array"),
        ("x.npy", b"no array", "cannot be read as FP32 array"),
        ("x.npy", b"", "x.npy"),
        ("x.png", b"no picture", "x.png"),
        ("x.bin", b"1234", "unknown kind of file '.bin'"),
        ("x", b"1234", "unknown kind of file ''"),
    ],
)
def test_files_that_cannot_be_sent(
    server: RunningServer, tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert reason in refusal(server, "scale", tmp_path / name)


def test_broken_pictures(server: RunningServer, tmp_path: Path) -> None:
    whole = (ROOT / "examples" / "digits" / "seven.png").read_bytes()
    for name, content in (("text.png", b"not a picture"), ("half.png", whole[: len(whole) // 2])):
        (tmp_path / name).write_bytes(content)
        assert name in refusal(server, "digits", tmp_path / name)


def test_a_picture_for_a_model_that_takes_none(server: RunningServer) -> None:
    message = refusal(server, "scale", ROOT / "examples" / "digits" / "seven.png")
    assert "a picture does not fit the model's input of shape [4]" in message


def test_pickled_arrays_are_not_opened(server: RunningServer, tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "allow_pickle" in refusal(server, "scale", tmp_path / "objects.npy")


def test_a_file_that_is_not_there(server: RunningServer, tmp_path: Path) -> None:
    for name in ("absent.json", "absent.npy", "absent.png"):
        assert name in refusal(server, "scale", tmp_path / name)
    (tmp_path / "folder.npy").mkdir()
    assert "folder.npy" in refusal(server, "scale", tmp_path / "folder.npy")


def test_models_and_inputs(server: RunningServer, tmp_path: Path) -> None:
    file = json_file(tmp_path, [1, 1, 1, 1])
    assert "'absent' is not found" in refusal(server, "absent", file)
    assert "version 9" in refusal(server, "scale", file, "--model-version", "9")
    assert "404" in refusal(server, "scale", file, "--model-version", "newest")
    assert "has 2 inputs (A, B): name one with --input" in refusal(server, "two", file)
    assert "has no input 'C', it has A, B" in refusal(server, "two", file, "--input", "C")
    assert "missing required input" in refusal(server, "two", file, "--input", "A")
    assert "cannot send BYTES inputs" in refusal(server, "text", file)
    assert "cannot send FP16 inputs" in refusal(server, "half", file)


def test_names_that_need_quoting(server: RunningServer, tmp_path: Path) -> None:
    file = json_file(tmp_path, [1, 1, 1, 1])
    for name in ("a b", "a/b", "größe", "a?b#c", "%"):
        refusal(server, name, file)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1/"])
def test_no_server(tmp_path: Path, url: str) -> None:
    command = [sys.executable, "-m", "hone", "infer", "m", str(json_file(tmp_path, [1])), "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no server at 127.0.0.1:1" in done.stderr
    assert "start one with 'hone serve'" in done.stderr


@pytest.mark.parametrize(
    "url", ["127.0.0.1:port", "127.0.0.1:99999", "", "[::1", "no such host:1", "https://127.0.0.1"]
)
def test_urls_that_make_no_sense(tmp_path: Path, url: str) -> None:
    command = [sys.executable, "-m", "hone", "infer", "m", str(json_file(tmp_path, [1])), "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_something_that_is_not_hone(server: RunningServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hone", "infer", "m", str(json_file(tmp_path, [1]))]
    command += ["--url", f"127.0.0.1:{server.metrics_port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_a_reader_that_is_gone(server: RunningServer) -> None:
    """As in `hone infer ... | head -0`: no traceback."""
    arguments = f"digits {ROOT}/examples/digits/seven.png --url 127.0.0.1:{server.http_port}"
    command = ["/bin/sh", "-c", f"{sys.executable} -m hone infer {arguments} | true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
