"""What `hone bench` sends: one whole HTTP request for each engine, of noise or of files, encoded once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hone.cli.client import Server, model_path
from hone.cli.infer import read_input
from hone.cli.load import Connection, encode_request
from hone.errors import InvalidRequest
from hone.specialization import Signature
from hone.types import BYTES, ENGINE_PARAMETER, NUMPY_DTYPES, Array, Shape

CURRENT, BASELINE, TUNED = "current", "baseline", "tuned"
"""The engine that the server would choose, and those that a request can ask for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request: `engine` is its kind as the response tells it, empty where it does not."""

    status: int
    engine: str
    error: str


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked of whom: the requests by engine, and the signature that their tensors make."""

    server: Server
    model: str
    version: str
    signature: str
    requests: Mapping[str, bytes]

    @classmethod
    def read(cls, server: Server, arguments: argparse.Namespace) -> Subject:
        """Raises HoneError: the model is not there, an input leaves sizes open, a file does not fit."""
        path = model_path(arguments.model, arguments.model_version)
        metadata = server.call("GET", path)
        batching = server.call("GET", f"{path}/config").get("max_batch_size", 0) > 0
        if not batching and arguments.batch != 1:
            raise InvalidRequest(
                f"--batch: model '{arguments.model}' does not batch, expected 1, found {arguments.batch}"
            )
        arrays = _arrays(metadata, arguments, batching=batching)
        tensors, payloads = [], []
        for spec in metadata["inputs"]:
            array = arrays[spec["name"]]
            payload = _wire_bytes(array, spec["datatype"])
            payloads.append(payload)
            tensors.append(
                {
                    "name": spec["name"],
                    "datatype": spec["datatype"],
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": len(payload)},
                }
            )
        signature = Signature.of((t["name"], t["datatype"], tuple(t["shape"])) for t in tensors).text
        requests = {}
        for engine in (CURRENT, BASELINE, TUNED):
            wanted = {} if engine == CURRENT else {ENGINE_PARAMETER: engine}
            document = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True, **wanted}}).encode()
            requests[engine] = encode_request(f"{path}/infer", server, document, b"".join(payloads))
        return cls(server, arguments.model, arguments.model_version, signature, requests)

    def ask(self, engine: str) -> Answer:
        """One request, before many. Raises Unavailable where nobody answers."""
        connection = Connection(self.server)
        try:
            status, body = connection.exchange(self.requests[engine])
        finally:
            connection.close()
        if status != 200:
            return Answer(status, "", body[:1000].decode("utf-8", "replace"))
        return Answer(status, _engine_of(body), "")


def _engine_of(body: bytes) -> str:
    """The response is JSON, and then (where outputs are not empty) bytes that are none."""
    document, _ = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    return str(document.get("parameters", {}).get(ENGINE_PARAMETER, ""))


def _arrays(metadata: Mapping[str, Any], arguments: argparse.Namespace, *, batching: bool) -> dict[str, Array]:
    """An array for each input, batch included. Raises InvalidRequest."""
    names = [spec["name"] for spec in metadata["inputs"]]
    files = _named(arguments.input, "=", "--input", "INPUT=FILE", names)
    shapes = {
        name: _dims(text) for name, text in _named(arguments.shape, ":", "--shape", "INPUT:DIMxDIM", names).items()
    }
    generator = np.random.default_rng(0)
    arrays = {}
    for spec in metadata["inputs"]:
        name, datatype = spec["name"], spec["datatype"]
        wanted: Shape = tuple(spec["shape"][1:] if batching else spec["shape"])
        if name in files:
            array = read_input(Path(files[name]), datatype, wanted)
        else:
            array = _made_up(generator, datatype, _closed(name, wanted, shapes.get(name)))
        arrays[name] = (
            np.ascontiguousarray(np.broadcast_to(array, (arguments.batch, *array.shape))) if batching else array
        )
    return arrays


def _named(texts: Sequence[str], separator: str, flag: str, expected: str, names: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, given, value = text.partition(separator)
        if not given or not value:
            raise InvalidRequest(f"{flag} {text}: expected {expected}")
        if name not in names:
            raise InvalidRequest(f"{flag} {text}: the model has no input '{name}', it has {', '.join(names)}")
        found[name] = value
    return found


def _dims(text: str) -> Shape:
    try:
        dims = tuple(int(part) for part in text.split("x"))
    except ValueError:
        dims = ()
    if not dims or min(dims) < 1:
        raise InvalidRequest(f"--shape: expected sizes such as 3x224x224, found '{text}'")
    return dims


def _closed(name: str, wanted: Shape, given: Shape | None) -> Shape:
    """The sizes to send, without the batch. Raises InvalidRequest."""
    if given is None:
        if -1 in wanted:
            shown = "x".join("?" if size < 0 else str(size) for size in wanted)
            raise InvalidRequest(f"input '{name}' leaves sizes open ({shown}): give them with --shape {name}:{shown}")
        return wanted
    if len(given) != len(wanted) or any(want not in (-1, got) for want, got in zip(wanted, given, strict=True)):
        raise InvalidRequest(
            f"--shape {name}: expected sizes (without the batch) that fit {list(wanted)}, found {list(given)}"
        )
    return given


def _made_up(generator: np.random.Generator, datatype: str, shape: Shape) -> Array:
    """Noise that any model takes: numbers from 0 to 1, zeros and ones for integers, which may be indices."""
    if datatype == BYTES:
        return np.full(shape, b"0", object)
    dtype = NUMPY_DTYPES[datatype]
    if dtype.kind in "biu":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.random(shape).astype(dtype)


def _wire_bytes(array: Array, datatype: str) -> bytes:
    if datatype == BYTES:
        return b"".join(len(item).to_bytes(4, "little") + item for item in array.reshape(-1))
    return array.tobytes()
