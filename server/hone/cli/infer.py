"""`hone infer MODEL FILE`: send a picture, a .npy or a .json file to a running server and print the answer."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hone.cli.client import add_server_arguments, model_path, server_of
from hone.errors import InvalidRequest
from hone.types import BYTES, NUMPY_DTYPES, Array, Shape

#: JSON has no numbers of these types, and text instead of bytes.
_NOT_JSON = (BYTES, "FP16", "BF16")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "infer",
        help="ask a running server for one inference",
        description="Send a picture, .npy or .json file to a model and print its answer.",
    )
    parser.add_argument("model", help="name of the model")
    parser.add_argument("file", type=Path, help="a picture (resized and scaled to 0..1), a .npy array or a .json list")
    add_server_arguments(parser)
    parser.add_argument("--model-version", default="", help="version of the model (default: the newest)")
    parser.add_argument("--input", default="", help="input to send the file to, where the model has several")
    parser.add_argument(
        "--top", type=int, default=3, help="classes to print where the model has labels (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    server = server_of(arguments)
    path = model_path(arguments.model, arguments.model_version)
    metadata = server.call("GET", path)
    config = server.call("GET", f"{path}/config")
    spec = _pick_input(metadata, arguments.input)
    batching = config.get("max_batch_size", 0) > 0
    if spec["datatype"] in _NOT_JSON:
        raise InvalidRequest(f"'hone infer' cannot send {spec['datatype']} inputs as JSON; use a client library")
    shape = tuple(spec["shape"])
    array = read_input(arguments.file, spec["datatype"], shape[1:] if batching else shape)
    if batching:
        array = array[np.newaxis]
    labelled = {output["name"] for output in config.get("output", []) if output.get("label_filename")}
    request = {
        "inputs": [_encode(spec["name"], spec["datatype"], array)],
        "outputs": [
            {
                "name": output["name"],
                "parameters": {"classification": arguments.top} if output["name"] in labelled else {},
            }
            for output in metadata["outputs"]
        ],
    }
    answer = server.call("POST", f"{path}/infer", request)
    if arguments.json:
        print(json.dumps(answer))
        return 0
    for output in answer["outputs"]:
        print(_describe(output, labelled=output["name"] in labelled))
    return 0


def read_input(path: Path, datatype: str, shape: Shape) -> Array:
    """The file as an array of the model's datatype and (batchless) shape. Raises InvalidRequest naming the file."""
    dtype = NUMPY_DTYPES[datatype]
    suffix = path.suffix.lower()
    try:
        if suffix == ".npy":
            array: Array = np.asarray(np.load(path, allow_pickle=False))
        elif suffix == ".json":
            array = np.asarray(json.loads(path.read_text(encoding="utf-8")))
        elif suffix in PICTURES and datatype == BYTES:
            raise InvalidRequest(f"{path}: a picture does not fit an input of texts")
        elif suffix in PICTURES:
            return _read_picture(path, dtype, shape)
        else:
            raise InvalidRequest(
                f"{path}: unknown kind of file '{suffix}', expected .npy, .json or one of {', '.join(PICTURES)}"
            )
    except (ValueError, TypeError, EOFError, OverflowError) as problem:
        raise InvalidRequest(f"{path}: cannot be read as {datatype} array: {problem}") from problem
    array = _converted(path, array, datatype)
    if array.ndim == len(shape) + 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != len(shape) or any(want not in (-1, got) for want, got in zip(shape, array.shape, strict=True)):
        raise InvalidRequest(f"{path}: array of shape {list(array.shape)} does not fit the model's {list(shape)}")
    return array


def _converted(path: Path, array: Array, datatype: str) -> Array:
    """The same numbers in the model's datatype. Raises InvalidRequest where they would not be the same."""
    dtype = NUMPY_DTYPES[datatype]
    if datatype == BYTES:
        return _encoded(path, array)
    if array.dtype.kind not in "biuf":
        raise InvalidRequest(f"{path}: cannot be read as {datatype} array: it holds {array.dtype}, not numbers")
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
        kept = converted.astype(array.dtype) == array
    if not _is_floating(dtype) and not kept.all():
        raise InvalidRequest(f"{path}: {array[~kept][0]} is no {datatype}")
    return converted


def _encoded(path: Path, array: Array) -> Array:
    """Texts as the bytes that the protocol sends."""
    if array.dtype.kind not in "SU":
        raise InvalidRequest(f"{path}: cannot be read as BYTES array: it holds {array.dtype}, not texts")
    encoded = np.empty(array.shape, object)
    for place, item in np.ndenumerate(array):
        encoded[place] = item.encode("utf-8") if isinstance(item, str) else bytes(item)
    return encoded


def _is_floating(dtype: Any) -> bool:
    """bfloat16 is of no kind that numpy knows."""
    return bool(np.dtype(dtype).kind == "f" or dtype == NUMPY_DTYPES["BF16"])


@dataclass(frozen=True, slots=True)
class _Picture:
    """How a picture fits an input: sizes in pixels, where the channels stand."""

    height: int
    width: int
    channels: int
    channels_first: bool

    @classmethod
    def of(cls, shape: Shape) -> _Picture | None:
        if len(shape) == 3 and shape[0] in (1, 3):
            return cls(shape[1], shape[2], shape[0], channels_first=True)
        if len(shape) == 3 and shape[2] in (1, 3):
            return cls(shape[0], shape[1], shape[2], channels_first=False)
        return None


def _read_picture(path: Path, dtype: Any, shape: Shape) -> Array:
    from PIL import Image, UnidentifiedImageError

    fit = _Picture.of(shape[1:] if len(shape) == 4 and shape[0] == 1 else shape)
    if fit is None:
        raise InvalidRequest(f"{path}: a picture does not fit the model's input of shape {list(shape)}")
    try:
        with Image.open(path) as opened:
            picture = opened.convert("L" if fit.channels == 1 else "RGB")
    except UnidentifiedImageError as problem:
        raise InvalidRequest(f"{path}: not a picture") from problem
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
        if isinstance(problem, OSError) and problem.filename is not None:
            raise  # the file cannot be opened: the system names it
        raise InvalidRequest(f"{path}: cannot be read as a picture: {problem}") from problem
    if fit.height > 0 and fit.width > 0:
        picture = picture.resize((fit.width, fit.height), Image.Resampling.BOX)
    pixels = np.asarray(picture)
    pixels = pixels[..., np.newaxis] if pixels.ndim == 2 else pixels
    if fit.channels_first:
        pixels = pixels.transpose(2, 0, 1)
    scaled = pixels.astype(dtype) / 255 if _is_floating(dtype) else pixels.astype(dtype)
    scaled = scaled.astype(dtype)
    return scaled[np.newaxis] if len(shape) == 4 else scaled


def _pick_input(metadata: dict[str, Any], name: str) -> dict[str, Any]:
    inputs: list[dict[str, Any]] = metadata["inputs"]
    names = [spec["name"] for spec in inputs]
    if name:
        if name not in names:
            raise InvalidRequest(f"model '{metadata['name']}' has no input '{name}', it has {', '.join(names)}")
        return inputs[names.index(name)]
    if len(inputs) != 1:
        raise InvalidRequest(
            f"model '{metadata['name']}' has {len(inputs)} inputs ({', '.join(names)}): name one with --input"
        )
    return inputs[0]


def _encode(name: str, datatype: str, array: Array) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.reshape(-1).tolist()}


def _describe(output: dict[str, Any], *, labelled: bool) -> str:
    head = f"{output['name']} {output['datatype']} {output['shape']}"
    data = output.get("data", [])
    if not labelled:
        shown = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in data[:10])
        return f"{head}: {shown}{', ...' if len(data) > 10 else ''}"
    lines = []
    for entry in data:
        value, index, *label = entry.split(":", 2)
        lines.append(f"  {label[0] if label else index:<16} {float(value):.4f}")
    return "\n".join([f"{output['name']}:", *lines])
