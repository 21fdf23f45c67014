"""What `input` and `output` of a config may say by themselves."""

from __future__ import annotations

from typing import Any

from hone.errors import ConfigError
from hone.protos import config_pb
from hone.repository.datatypes import datatype_name
from hone.repository.shapes import VARIABLE, runs, show
from hone.types import MAX_ELEMENTS

_FORMATS_OF_IMAGES = (config_pb.ModelInput.FORMAT_NHWC, config_pb.ModelInput.FORMAT_NCHW)


def validate_tensors(config: config_pb.ModelConfig, model: str) -> None:
    """Raises ConfigError."""
    for kind, tensors in (("input", config.input), ("output", config.output)):
        seen: dict[str, int] = {}
        for i, tensor in enumerate(tensors):
            path = f"{kind}[{i}]"
            _validate_tensor(tensor, config.max_batch_size, model, path)
            first = seen.setdefault(tensor.name, i)
            if first != i:
                raise ConfigError(
                    model, f"{path}.name", f"expected a name used once, found '{tensor.name}' as {kind}[{first}] too"
                )
    for i, tensor in enumerate(config.input):
        if tensor.format not in config_pb.ModelInput.Format.values():
            raise ConfigError(model, f"input[{i}].format", f"unknown format {tensor.format}")
        if tensor.format in _FORMATS_OF_IMAGES and len(tensor.dims) != 3:
            raise ConfigError(
                model, f"input[{i}].dims", f"expected 3 dims with format NHWC or NCHW, found {show(tensor.dims)}"
            )


def _validate_tensor(tensor: Any, max_batch_size: int, model: str, path: str) -> None:
    if not tensor.name:
        raise ConfigError(model, f"{path}.name", "expected a name, found none")
    if tensor.data_type == config_pb.TYPE_INVALID or tensor.data_type not in config_pb.DataType.values():
        found = "none" if tensor.data_type == config_pb.TYPE_INVALID else datatype_name(tensor.data_type)
        raise ConfigError(model, f"{path}.data_type", f"expected a data type for '{tensor.name}', found {found}")
    if not tensor.dims:
        raise ConfigError(model, f"{path}.dims", f"expected one dimension or more for '{tensor.name}', found none")
    _validate_dims(tensor.dims, model, f"{path}.dims")
    if tensor.HasField("reshape"):
        _validate_reshape(tensor, max_batch_size, model, f"{path}.reshape.shape")


def _validate_dims(dims: Any, model: str, field: str) -> None:
    elements = 1
    for i, size in enumerate(dims):
        if size < 1 and size != VARIABLE:
            raise ConfigError(model, f"{field}[{i}]", f"expected 1 or more, or -1 for any size, found {size}")
        elements *= max(size, 1)
    if elements > MAX_ELEMENTS:
        raise ConfigError(model, field, f"expected at most {MAX_ELEMENTS} elements, found {show(dims)}")


def _validate_reshape(tensor: Any, max_batch_size: int, model: str, field: str) -> None:
    dims, shape = tuple(tensor.dims), tuple(tensor.reshape.shape)
    _validate_dims(shape, model, field)
    if not shape and max_batch_size == 0:
        raise ConfigError(model, field, "expected one dimension or more where max_batch_size is 0, found none")
    if dims.count(VARIABLE) != shape.count(VARIABLE):
        raise ConfigError(
            model,
            field,
            f"expected as many variable dimensions as dims {show(dims)} has, found {show(shape)}",
        )
    if runs(dims) != runs(shape):
        raise ConfigError(model, field, f"expected as many elements as dims {show(dims)} has, found {show(shape)}")
