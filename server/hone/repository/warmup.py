"""Warm-up samples: the arrays that a version is run with before it becomes ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hone.errors import ConfigError, InvalidRequest
from hone.protos import config_pb
from hone.repository.datatypes import datatype_name, protocol_datatype
from hone.repository.definition import ModelDefinition
from hone.repository.files import read_limited, reason_of, relative_path
from hone.repository.shapes import VARIABLE, show, to_engine
from hone.strings import from_length_prefixed
from hone.types import BYTES, NUMPY_DTYPES, Array, TensorSpec, num_elements

WARMUP_FOLDER = "warmup"
_MAX_SAMPLE_BYTES = 2 * 1024**3
_MAX_RANDOM_INTEGER = 100


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """One sample: `inputs` as the engine takes them, batch dimension included, to be run `count` times."""

    name: str
    count: int
    inputs: dict[str, Array]


def warmup_samples(
    definition: ModelDefinition, config: config_pb.ModelConfig, inputs: Sequence[TensorSpec]
) -> list[WarmupSample]:
    """Samples of a completed config, for an engine with these inputs. Raises ConfigError.

    As in Triton, a sample of batch size 0 is left out.
    """
    shapes = {spec.name: spec.shape for spec in inputs}
    samples = []
    for i, sample in enumerate(config.model_warmup):
        if sample.batch_size == 0:
            continue
        path = f"model_warmup[{i}]"
        _check_names(config, sample, definition.name, path)
        arrays = {
            tensor.name: _array(
                definition, config, tensor, sample, shapes[tensor.name], f'{path}.inputs["{tensor.name}"]'
            )
            for tensor in config.input
            if tensor.name in sample.inputs
        }
        samples.append(WarmupSample(sample.name or path, max(sample.count, 1), arrays))
    return samples


def _check_names(config: Any, sample: Any, model: str, path: str) -> None:
    if not config.max_batch_size and sample.batch_size > 1:
        raise ConfigError(
            model,
            f"{path}.batch_size",
            f"expected at most 1 where max_batch_size is 0, found {sample.batch_size}",
        )
    known = {tensor.name for tensor in config.input}
    for name in sorted(sample.inputs):
        if name not in known:
            raise ConfigError(
                model, f'{path}.inputs["{name}"]', f"unexpected input '{name}', expected {sorted(known)!r}"
            )
    missing = [tensor.name for tensor in config.input if not tensor.optional and tensor.name not in sample.inputs]
    if missing:
        raise ConfigError(model, f"{path}.inputs", f"missing required input(s) {missing!r}")


def _array(
    definition: ModelDefinition, config: Any, tensor: Any, sample: Any, graph_shape: Sequence[int], path: str
) -> Array:
    given = sample.inputs[tensor.name]
    dims = tuple(given.dims)
    _check_fit(tensor, given, dims, definition.name, path)
    batching = config.max_batch_size > 0
    batch_size = sample.batch_size if batching else 1
    datatype = protocol_datatype(tensor.data_type)
    num_bytes = num_elements(dims) * batch_size * NUMPY_DTYPES[datatype].itemsize
    if num_bytes > _MAX_SAMPLE_BYTES:
        raise ConfigError(
            definition.name, f"{path}.dims", f"expected at most {_MAX_SAMPLE_BYTES} bytes a sample, found {num_bytes}"
        )
    item = _item(definition, given, datatype, dims, path)
    shape = (batch_size, *dims) if batching else dims
    return np.array(np.broadcast_to(item, shape), order="C").reshape(
        to_engine(shape, tensor, graph_shape, batching=batching)
    )


def _check_fit(tensor: Any, given: Any, dims: tuple[int, ...], model: str, path: str) -> None:
    if given.data_type != tensor.data_type:
        raise ConfigError(
            model,
            f"{path}.data_type",
            f"expected {datatype_name(tensor.data_type)}, found {datatype_name(given.data_type)}",
        )
    expected = tuple(tensor.dims)
    if len(dims) != len(expected) or any(
        want not in (VARIABLE, size) for size, want in zip(dims, expected, strict=True)
    ):
        raise ConfigError(model, f"{path}.dims", f"expected dims that fit {show(expected)}, found {show(dims)}")


def _item(definition: ModelDefinition, given: Any, datatype: str, dims: tuple[int, ...], path: str) -> Array:
    """Data of one row of the batch."""
    source = given.WhichOneof("input_data_type")
    if source == "input_data_file":
        return _from_file(definition, given.input_data_file, datatype, dims, f"{path}.input_data_file")
    if datatype == BYTES:
        return np.full(dims, b"", dtype=np.object_)
    dtype = NUMPY_DTYPES[datatype]
    if source == "zero_data":
        return np.zeros(dims, dtype)
    # Seeded: what a version is warmed with does not change from load to load. Integers stay small and not negative,
    # since many are indices.
    generator = np.random.default_rng(0)
    if datatype == "BOOL":
        return generator.integers(0, 2, dims).astype(dtype)
    if datatype.startswith(("INT", "UINT")):
        return generator.integers(0, _MAX_RANDOM_INTEGER, dims).astype(dtype)
    return generator.random(dims).astype(dtype)


def _from_file(definition: ModelDefinition, name: str, datatype: str, dims: tuple[int, ...], field: str) -> Array:
    path: Path = definition.path / WARMUP_FOLDER / relative_path(name)
    try:
        data = read_limited(path, _MAX_SAMPLE_BYTES)
    except OSError as problem:
        raise ConfigError(
            definition.name, field, f"cannot read '{name}' in folder '{WARMUP_FOLDER}': {reason_of(problem)}"
        ) from problem
    if datatype == BYTES:
        return _parse_bytes(name, data, dims, definition.name, field)
    dtype = NUMPY_DTYPES[datatype]
    expected = num_elements(dims) * dtype.itemsize
    if len(data) != expected:
        raise ConfigError(
            definition.name,
            field,
            f"expected {expected} bytes for {datatype} {show(dims)} in '{name}', found {len(data)}",
        )
    return np.frombuffer(data, dtype).reshape(dims)


def _parse_bytes(name: str, data: bytes, dims: tuple[int, ...], model: str, field: str) -> Array:
    try:
        return from_length_prefixed(name, data, num_elements(dims)).reshape(dims)
    except InvalidRequest as problem:
        raise ConfigError(model, field, str(problem)) from problem
