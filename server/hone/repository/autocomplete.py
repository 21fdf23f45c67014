"""A whole config from what the user wrote and what the graph says, by Triton's rules, and a check of both together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hone.errors import ConfigError
from hone.protos import config_pb
from hone.repository.accelerators import check_signatures
from hone.repository.datatypes import config_datatype, datatype_name
from hone.repository.shapes import VARIABLE, engine_dims, show
from hone.repository.validation import BACKEND, PLATFORM, validate
from hone.types import TensorSpec

DEFAULT_MODEL_FILE = "model.onnx"


def complete(
    config: config_pb.ModelConfig,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    model: str,
    default_max_batch_size: int = 4,
    initializers: Sequence[TensorSpec] = (),
    num_gpus: int = 0,
) -> config_pb.ModelConfig:
    """A copy of `config` with everything filled in, checked against the graph. Raises ConfigError naming the field.

    `inputs` and `outputs` are the graph's, in its order; `initializers` are the constants that requests may override,
    which a config lists as `optional` inputs. Inputs, outputs and batching are taken from the graph only where the
    config lacks inputs or outputs; a config that has both is taken at its word, and checked.
    """
    whole = config_pb.ModelConfig()
    whole.CopyFrom(config)
    whole.name = whole.name or model
    whole.platform, whole.backend = PLATFORM, BACKEND
    whole.default_model_filename = whole.default_model_filename or DEFAULT_MODEL_FILE
    if not (whole.input and whole.output):
        _complete_batching(whole, inputs, outputs, model, default_max_batch_size)
        _complete_tensors(whole, inputs, outputs)
    _check_inputs(whole, inputs, initializers, model)
    _check_outputs(whole, outputs, model)
    _fill_defaults(whole, num_gpus)
    validate(whole, model, num_gpus)
    check_signatures(whole, inputs, model)
    return whole


# --- filling in ----------------------------------------------------------------------------------------------------


def _complete_batching(
    config: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], model: str, default: int
) -> None:
    fixed = next((spec for spec in (*inputs, *outputs) if spec.shape[:1] != (VARIABLE,)), None)
    if fixed is not None:
        if config.max_batch_size > 0:
            raise _cannot_batch(model, "input" if fixed in inputs else "output", fixed)
        return
    if config.max_batch_size == 0 and not _written_in_full(config, inputs, outputs):
        config.max_batch_size = default
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _written_in_full(config: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
    """Whether the config's tensors include the batch dimension, so that the user means a model without batching."""
    graph = {**_by_name(inputs), **_by_name(outputs)}
    given = [tensor for tensor in (*config.input, *config.output) if tensor.name in graph]
    return bool(given) and all(len(engine_dims(tensor)) == len(graph[tensor.name].shape) for tensor in given)


def _complete_tensors(config: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    for tensors, specs in ((config.input, inputs), (config.output, outputs)):
        if tensors:
            continue
        for spec in specs:
            dims = spec.shape[1:] if config.max_batch_size > 0 else spec.shape
            tensor = tensors.add(name=spec.name, data_type=config_datatype(spec.datatype), dims=dims or (1,))
            if not dims and config.max_batch_size > 0:
                tensor.reshape.SetInParent()


def _fill_defaults(config: Any, num_gpus: int) -> None:
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if config.version_policy.HasField("latest"):
        config.version_policy.latest.num_versions = config.version_policy.latest.num_versions or 1
    if config.HasField("dynamic_batching") and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size.extend([config.max_batch_size] if config.max_batch_size else [])
    for memory in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(memory):
            getattr(config.optimization, memory).enable = True
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for i, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{i}"
        group.count = group.count or 1
        if group.kind == config_pb.ModelInstanceGroup.KIND_AUTO:
            on_gpu = num_gpus > 0
            group.kind = config_pb.ModelInstanceGroup.KIND_GPU if on_gpu else config_pb.ModelInstanceGroup.KIND_CPU
        if group.kind == config_pb.ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(range(num_gpus))


# --- the config against the graph ----------------------------------------------------------------------------------


def _check_inputs(config: Any, inputs: Sequence[TensorSpec], initializers: Sequence[TensorSpec], model: str) -> None:
    required, optional = _by_name(inputs), _by_name(initializers)
    given = {tensor.name for tensor in config.input}
    missing = [name for name in required if name not in given]
    for i, tensor in enumerate(config.input):
        path = f"input[{i}]"
        spec = required.get(tensor.name) or optional.get(tensor.name)
        if spec is None:
            raise _unknown_name(model, path, tensor.name, "input", [*required, *optional])
        if tensor.optional and tensor.name in required:
            raise ConfigError(
                model, f"{path}.optional", f"expected false, found true: the model cannot run without '{tensor.name}'"
            )
        if tensor.optional and config.max_batch_size > 0:
            raise ConfigError(
                model,
                f"{path}.optional",
                f"expected false, found true: optional input '{tensor.name}' is not supported for models that support"
                " batching; set max_batch_size to 0",
            )
        if tensor.name in optional and not tensor.optional:
            raise ConfigError(
                model,
                f"{path}.optional",
                f"expected true, found false: '{tensor.name}' has a default in the model, so requests may leave it out",
            )
        _check_tensor(config, tensor, spec, model, path, "input")
    if missing:
        raise ConfigError(
            model,
            "input",
            f"configuration expects {len(given)} inputs, model provides {len(required)}; missing {missing!r}",
        )


def _check_outputs(config: Any, outputs: Sequence[TensorSpec], model: str) -> None:
    """Outputs that the config leaves out are not served; Triton allows that."""
    graph = _by_name(outputs)
    for i, tensor in enumerate(config.output):
        path = f"output[{i}]"
        if tensor.name not in graph:
            raise _unknown_name(model, path, tensor.name, "output", list(graph))
        _check_tensor(config, tensor, graph[tensor.name], model, path, "output")


def _check_tensor(config: Any, tensor: Any, spec: TensorSpec, model: str, path: str, kind: str) -> None:
    expected = config_datatype(spec.datatype)
    if tensor.data_type != expected:
        raise ConfigError(
            model,
            f"{path}.data_type",
            f"{kind} '{spec.name}' has datatype {datatype_name(expected)} in the model,"
            f" found {datatype_name(tensor.data_type)}",
        )
    batching = config.max_batch_size > 0
    if kind == "output" and not spec.shape and not batching:
        return  # a scalar or of unknown rank: the graph does not say which, so the config is taken at its word
    if batching and spec.shape[:1] != (VARIABLE,):
        raise _cannot_batch(model, kind, spec)
    dims = engine_dims(tensor)
    found = (VARIABLE, *dims) if batching else dims
    if not spec.shape and all(size == 1 for size in dims):
        return
    # A request checked against the config must fit the graph. Outputs may be told more, or less, than the graph knows.
    fits = len(found) == len(spec.shape) and all(
        graph in (VARIABLE, size) or (kind == "output" and size == VARIABLE)
        for size, graph in zip(found, spec.shape, strict=True)
    )
    if not fits:
        field = f"{path}.reshape.shape" if tensor.HasField("reshape") else f"{path}.dims"
        raise ConfigError(model, field, _wrong_dims(kind, spec, dims, batching))


def _wrong_dims(kind: str, spec: TensorSpec, dims: Sequence[int], batching: bool) -> str:
    expected = spec.shape[1:] if batching else spec.shape
    message = (
        f"{kind} '{spec.name}' has shape {show(spec.shape)} in the model, so {show(expected)} is expected here,"
        f" found {show(dims)}"
    )
    if batching and len(dims) == len(spec.shape):
        return message + "; max_batch_size is more than 0, so the batch dimension comes by itself: leave it out"
    if not batching and len(dims) == len(spec.shape) - 1 and spec.shape[0] == VARIABLE:
        return (
            message + "; max_batch_size is 0, so the full shape is needed:"
            " write the batch dimension too, or set max_batch_size to 1 or more"
        )
    return message


def _cannot_batch(model: str, kind: str, spec: TensorSpec) -> ConfigError:
    first = f"a first dimension fixed to {spec.shape[0]}" if spec.shape else "no dimension"
    return ConfigError(
        model,
        "max_batch_size",
        "model does not support batching while non-zero max_batch_size is specified:"
        f" {kind} '{spec.name}' has shape {show(spec.shape)} in the model, {first}."
        " Set max_batch_size to 0 and write full shapes in dims, or export the model with a variable first dimension",
    )


def _unknown_name(model: str, path: str, name: str, kind: str, known: Sequence[str]) -> ConfigError:
    allowed = ", ".join(sorted(known)) or "none"
    return ConfigError(model, f"{path}.name", f"unexpected inference {kind} '{name}', allowed {kind}s are: {allowed}")


def _by_name(specs: Sequence[TensorSpec]) -> Mapping[str, TensorSpec]:
    return {spec.name: spec for spec in specs}
