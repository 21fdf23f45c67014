"""What `hone infer` makes of a file, for the shape a model takes. The whole command is in tests/process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hone.cli.infer import read_input
from hone.cli.main import main
from hone.errors import InvalidRequest
from hone.types import NUMPY_DTYPES


def picture(folder: Path, mode: str, colour: Any, size: tuple[int, int] = (4, 2), name: str = "p.png") -> Path:
    Image.new(mode, size, colour).save(folder / name)
    return folder / name


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 2, 4), (1, 2, 4)),
        ((3, 2, 4), (3, 2, 4)),
        ((2, 4, 3), (2, 4, 3)),
        ((2, 4, 1), (2, 4, 1)),
        ((1, 3, 2, 4), (1, 3, 2, 4)),
        ((3, 8, 8), (3, 8, 8)),
        ((3, -1, -1), (3, 2, 4)),
    ],
)
def test_pictures_take_the_shape_of_the_input(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    array = read_input(picture(tmp_path, "RGB", (255, 255, 255)), "FP32", shape)
    assert array.shape == expected
    assert array.dtype == np.float32
    assert np.all(array == 1.0), "scaled to 0..1"


def test_channels_stand_where_the_model_wants_them(tmp_path: Path) -> None:
    red = picture(tmp_path, "RGB", (255, 0, 51))
    first = read_input(red, "FP32", (3, 2, 4))
    np.testing.assert_allclose(first[:, 0, 0], [1.0, 0.0, 0.2])
    np.testing.assert_array_equal(read_input(red, "FP32", (2, 4, 3)), first.transpose(1, 2, 0))


def test_integers_are_not_scaled(tmp_path: Path) -> None:
    array = read_input(picture(tmp_path, "L", 200), "UINT8", (1, 2, 4))
    assert array.dtype == np.uint8
    assert np.all(array == 200)


@pytest.mark.parametrize(("mode", "colour"), [("1", 1), ("LA", (255, 255)), ("RGBA", (255, 255, 255, 255)), ("P", 0)])
def test_pictures_of_every_mode(tmp_path: Path, mode: str, colour: Any) -> None:
    assert read_input(picture(tmp_path, mode, colour), "FP32", (3, 2, 4)).shape == (3, 2, 4)


@pytest.mark.parametrize("name", ["p.jpg", "p.JPEG", "p.bmp", "p.gif", "p.webp"])
def test_pictures_of_every_kind(tmp_path: Path, name: str) -> None:
    assert read_input(picture(tmp_path, "L", 255, name=name), "FP32", (1, 2, 4)).shape == (1, 2, 4)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (5, 2, 4), (2, 3, 2, 4), ()])
def test_inputs_that_take_no_picture(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="a picture does not fit"):
        read_input(picture(tmp_path, "L", 1), "FP32", shape)


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT8", "INT32", "INT64", "FP32", "FP64"])
def test_lists_become_the_model_s_datatype(tmp_path: Path, datatype: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps([[1, 0], [0, 1]]), encoding="utf-8")
    array = read_input(file, datatype, (2, 2))
    assert array.tolist() == [[1, 0], [0, 1]]
    assert read_input(file, datatype, (-1, 2)).shape == (2, 2)


@pytest.mark.parametrize(
    ("datatype", "values"), [("UINT8", [256]), ("INT8", [-129]), ("UINT32", [-1]), ("INT32", [1.5])]
)
def test_numbers_that_would_change_are_refused(tmp_path: Path, datatype: str, values: list[float]) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"x\.json"):
        read_input(file, datatype, (1,))


@pytest.mark.parametrize("datatype", ["BYTES", "FP16", "BF16"])
def test_datatypes_that_json_cannot_carry(
    model_server: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, datatype: str
) -> None:
    model_server.datatype = datatype
    assert main(["infer", "m", str(tmp_path / "x.json"), "--url", model_server.url]) != 0
    assert f"'hone infer' cannot send {datatype} inputs as JSON; use a client library" in capsys.readouterr().err


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_of_files(tmp_path: Path, datatype: str) -> None:
    np.save(tmp_path / "x.npy", np.array([0.1, 3.0]))
    array = read_input(tmp_path / "x.npy", datatype, (2,))
    assert array.dtype == NUMPY_DTYPES[datatype]
    np.testing.assert_array_equal(array, np.array([0.1, 3.0]).astype(NUMPY_DTYPES[datatype]))
    pixels = read_input(picture(tmp_path, "L", 51), datatype, (1, 2, 4)).astype(np.float32)
    np.testing.assert_allclose(pixels, 0.2, rtol=5e-3)


def test_texts_of_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[b"a", b"bc"]]))
    assert read_input(tmp_path / "x.npy", "BYTES", (2,)).tolist() == [b"a", b"bc"]
    with pytest.raises(InvalidRequest, match="a picture does not fit an input of texts"):
        read_input(picture(tmp_path, "L", 1), "BYTES", (1, 2, 4))


def test_shapes_that_do_not_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    for shape in ((3, 2), (6,), (2, 3, 1), (1, 2, 3, 4), ()):
        with pytest.raises(InvalidRequest, match=r"array of shape \[2, 3\] does not fit"):
            read_input(tmp_path / "x.npy", "FP32", shape)


def test_one_batch_axis_is_taken_off(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((1, 2, 3)))
    assert read_input(tmp_path / "x.npy", "FP32", (2, 3)).shape == (2, 3)
