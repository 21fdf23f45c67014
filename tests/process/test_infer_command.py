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

from hone.cli.main import main
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
    picture: models.Dims = ("batch", 3, 5, 7)
    means: models.Dims = ("batch", 3, 1, 1)
    rgb = models.model(average, {"IN": ("FP32", picture)}, {"OUT": ("FP32", means)})
    models.write_model(repository, "rgb", rgb)
    (repository / "digits").symlink_to(ROOT / "model_repo" / "digits")
    with run_server(repository, *EVERYTHING) as running:
        yield running


class Command:
    """Calls of `hone infer` within the test's process; the server is another one."""

    def __init__(self, server: RunningServer, capture: pytest.CaptureFixture[str]) -> None:
        self.url = f"127.0.0.1:{server.http_port}"
        self._capture = capture

    def run(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Exit code, output, errors. What would be a traceback is raised."""
        self._capture.readouterr()
        try:
            code = main(["infer", *map(str, arguments)])
        except SystemExit as ended:  # argparse's way
            code = int(ended.code or 0)
        return code, *self._capture.readouterr()

    def told(self, *arguments: str | Path) -> str:
        """What a call that has to work prints."""
        code, output, errors = self.run(*arguments, "--url", self.url)
        assert (code, errors) == (0, "")
        return output

    def refusal(self, *arguments: str | Path) -> str:
        """What a call that has to fail says."""
        code, output, errors = self.run(*arguments, "--url", self.url)
        assert (code, output) == (1, ""), errors
        assert errors.startswith("hone infer: ")
        return errors


@pytest.fixture
def hone(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(server, capsys)


def json_file(folder: Path, content: object) -> Path:
    file = folder / "input.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return file


def npy_file(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "input.npy", array)
    return folder / "input.npy"


@pytest.mark.parametrize("name", ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
def test_pictures_of_digits(hone: Command, name: str) -> None:
    answer = hone.told("digits", ROOT / "examples" / "digits" / f"{name}.png")
    output, first, *others = answer.splitlines()
    assert output == "probabilities:"
    assert first.split()[0] == name, answer
    assert len(others) == 2, "the three most probable classes"


def test_a_picture_of_another_size(hone: Command) -> None:
    answer = hone.told("digits", ROOT / "examples" / "digits" / "seven_64x64.png", "--top", "1")
    assert [line.split()[0] for line in answer.splitlines()] == ["probabilities:", "seven"]


def test_a_picture_in_colour(hone: Command, tmp_path: Path) -> None:
    Image.new("RGB", (14, 10), (255, 0, 51)).save(tmp_path / "red.png")
    assert hone.told("rgb", tmp_path / "red.png") == "OUT FP32 [1, 3, 1, 1]: 1, 0, 0.2\n"


def test_arrays_and_lists(hone: Command, tmp_path: Path) -> None:
    row = np.array([1.0, 2.5, -3.0, 0.0])
    assert hone.told("scale", npy_file(tmp_path, row)) == "OUT FP32 [1, 4]: 3, 7.5, -9, 0\n"
    assert hone.told("scale", npy_file(tmp_path, row[np.newaxis])) == "OUT FP32 [1, 4]: 3, 7.5, -9, 0\n"
    assert hone.told("scale", json_file(tmp_path, [1, 2.5, -3, 0])) == "OUT FP32 [1, 4]: 3, 7.5, -9, 0\n"
    assert hone.told("ints", json_file(tmp_path, [1, -2, 3])) == "OUT INT32 [3]: 1, -2, 3\n"


def test_a_version_and_json(hone: Command, tmp_path: Path) -> None:
    file = json_file(tmp_path, [1, 1, 1, 1])
    answer = json.loads(hone.told("scale", file, "--model-version", "1", "--json"))
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
def test_files_that_cannot_be_sent(hone: Command, tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert reason in hone.refusal("scale", tmp_path / name)


def test_broken_pictures(hone: Command, tmp_path: Path) -> None:
    whole = (ROOT / "examples" / "digits" / "seven.png").read_bytes()
    for name, content in (("text.png", b"not a picture"), ("half.png", whole[: len(whole) // 2])):
        (tmp_path / name).write_bytes(content)
        assert name in hone.refusal("digits", tmp_path / name)


def test_a_picture_for_a_model_that_takes_none(hone: Command) -> None:
    message = hone.refusal("scale", ROOT / "examples" / "digits" / "seven.png")
    assert "a picture does not fit the model's input of shape [4]" in message


def test_pickled_arrays_are_not_opened(hone: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "allow_pickle" in hone.refusal("scale", tmp_path / "objects.npy")


def test_a_file_that_is_not_there(hone: Command, tmp_path: Path) -> None:
    for name in ("absent.json", "absent.npy", "absent.png"):
        assert name in hone.refusal("scale", tmp_path / name)
    (tmp_path / "folder.npy").mkdir()
    assert "folder.npy" in hone.refusal("scale", tmp_path / "folder.npy")


def test_models_and_inputs(hone: Command, tmp_path: Path) -> None:
    file = json_file(tmp_path, [1, 1, 1, 1])
    assert "'absent' is not found" in hone.refusal("absent", file)
    assert "version 9" in hone.refusal("scale", file, "--model-version", "9")
    assert "404" in hone.refusal("scale", file, "--model-version", "newest")
    assert "has 2 inputs (A, B): name one with --input" in hone.refusal("two", file)
    assert "has no input 'C', it has A, B" in hone.refusal("two", file, "--input", "C")
    assert "missing required input" in hone.refusal("two", file, "--input", "A")
    assert "cannot send BYTES inputs" in hone.refusal("text", file)
    assert "cannot send FP16 inputs" in hone.refusal("half", file)


def test_names_that_need_quoting(hone: Command, tmp_path: Path) -> None:
    file = json_file(tmp_path, [1, 1, 1, 1])
    for name in ("a b", "a/b", "größe", "a?b#c", "%"):
        hone.refusal(name, file)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://127.0.0.1:1/"])
def test_no_server(hone: Command, tmp_path: Path, url: str) -> None:
    code, _, errors = hone.run("m", json_file(tmp_path, [1]), "--url", url)
    assert code == 1
    assert "no server at 127.0.0.1:1" in errors
    assert "start one with 'hone serve'" in errors


@pytest.mark.parametrize(
    "url", ["127.0.0.1:port", "127.0.0.1:99999", "", "[::1", "no such host:1", "https://127.0.0.1"]
)
def test_urls_that_make_no_sense(hone: Command, tmp_path: Path, url: str) -> None:
    code, _, errors = hone.run("m", json_file(tmp_path, [1]), "--url", url)
    assert code in (1, 2)
    assert errors.strip()


def test_something_that_is_not_hone(hone: Command, server: RunningServer, tmp_path: Path) -> None:
    code, _, errors = hone.run("m", json_file(tmp_path, [1]), "--url", f"127.0.0.1:{server.metrics_port}")
    assert code == 1
    assert errors.startswith("hone infer: ")


@pytest.mark.parametrize("arguments", [(), ("m",), ("m", "f", "--top=x"), ("m", "f", "--nonsense")])
def test_arguments_that_make_no_sense(hone: Command, arguments: tuple[str, ...]) -> None:
    code, _, errors = hone.run(*arguments)
    assert code == 2
    assert "hone infer: error: " in errors or "hone: error: " in errors


def test_a_reader_that_is_gone(server: RunningServer) -> None:
    """As in `hone infer ... | head -0`: no traceback."""
    arguments = f"digits {ROOT}/examples/digits/seven.png --url 127.0.0.1:{server.http_port}"
    command = ["/bin/sh", "-c", f"{sys.executable} -m hone infer {arguments} | true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
