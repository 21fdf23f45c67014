"""What a config may say, before any graph is looked at. Every refusal names the field, what was expected and found."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise

from hone.errors import ConfigError
from hone.protos import config_pb
from hone.repository.accelerators import validate_accelerators
from hone.repository.files import relative_path
from hone.repository.validation_scheduling import validate_scheduling
from hone.repository.validation_tensors import validate_tensors

PLATFORM = "onnxruntime_onnx"
BACKEND = "onnxruntime"
_RUNTIMES = ("", "libtriton_onnxruntime.so")

_MAX_INSTANCES = 1024
_LABEL_NAME = re.compile(r"[A-Za-z0-9_]+")
_Group = config_pb.ModelInstanceGroup


def validate(config: config_pb.ModelConfig, model: str, num_gpus: int = 0, machine: str = "this server") -> None:
    """Check everything that needs no file and no graph. `num_gpus` are those of the machine that runs the model, which
    refusals call `machine`. Raises ConfigError."""
    for field, what in _missing_features(config):
        raise ConfigError(model, field, f"{what} not available in this version of the server; remove the field")
    _validate_platform(config, model)
    if config.max_batch_size < 0:
        raise ConfigError(model, "max_batch_size", f"expected 0 or more, found {config.max_batch_size}")
    validate_tensors(config, model)
    _validate_version_policy(config, model)
    validate_scheduling(config, model)
    _validate_instance_groups(config, model, num_gpus, machine)
    validate_accelerators(config, model)
    _validate_metrics(config, model)
    _validate_warmup(config, model)
    _validate_file_names(config, model)


def _missing_features(config: config_pb.ModelConfig) -> Iterator[tuple[str, str]]:
    """Fields that ask for something this version does not have, with the words for it."""
    if config.HasField("sequence_batching"):
        yield "sequence_batching", "sequence batching is"
    if config.HasField("ensemble_scheduling") or config.platform == "ensemble":
        yield "ensemble_scheduling" if config.HasField("ensemble_scheduling") else "platform", "ensembles are"
    if config.response_cache.enable:
        yield "response_cache.enable", "the response cache is"
    if config.model_transaction_policy.decoupled:
        yield "model_transaction_policy.decoupled", "decoupled responses are"
    if config.batch_input:
        yield "batch_input", "inputs made from the batch are"
    if config.batch_output:
        yield "batch_output", "outputs scattered by the batch are"
    if config.model_operations.op_library_filename:
        yield "model_operations.op_library_filename", "custom operator libraries are"
    if config.model_repository_agents.agents:
        yield "model_repository_agents.agents", "repository agents are"
    for i, tensor in enumerate(config.input):
        if tensor.allow_ragged_batch:
            yield f"input[{i}].allow_ragged_batch", "ragged batches are"
    for kind, tensors in (("input", config.input), ("output", config.output)):
        for i, tensor in enumerate(tensors):
            if tensor.is_shape_tensor:
                yield f"{kind}[{i}].is_shape_tensor", "shape tensors are"
            if tensor.is_non_linear_format_io:
                yield f"{kind}[{i}].is_non_linear_format_io", "non-linear tensor formats are"
    for i, group in enumerate(config.instance_group):
        if group.HasField("rate_limiter"):
            yield f"instance_group[{i}].rate_limiter", "the rate limiter is"
        if group.secondary_devices:
            yield f"instance_group[{i}].secondary_devices", "secondary devices are"
        if group.profile:
            yield f"instance_group[{i}].profile", "optimization profiles are"
        if group.passive:
            yield f"instance_group[{i}].passive", "passive instances are"


def _validate_platform(config: config_pb.ModelConfig, model: str) -> None:
    if config.platform not in ("", PLATFORM):
        raise ConfigError(model, "platform", f"expected '{PLATFORM}', found '{config.platform}'")
    if config.backend not in ("", BACKEND):
        raise ConfigError(model, "backend", f"expected '{BACKEND}', found '{config.backend}'")
    if config.runtime not in _RUNTIMES:
        raise ConfigError(model, "runtime", f"expected it empty, found '{config.runtime}'")


def _validate_version_policy(config: config_pb.ModelConfig, model: str) -> None:
    if config.version_policy.WhichOneof("policy_choice") != "specific":
        return
    versions = config.version_policy.specific.versions
    if not versions:
        raise ConfigError(model, "version_policy.specific.versions", "expected one version or more, found none")
    for i, version in enumerate(versions):
        if version < 1:
            raise ConfigError(
                model, f"version_policy.specific.versions[{i}]", f"expected a version of 1 or more, found {version}"
            )


def _validate_instance_groups(config: config_pb.ModelConfig, model: str, num_gpus: int, machine: str) -> None:
    known = (_Group.KIND_AUTO, _Group.KIND_CPU, _Group.KIND_MODEL, *((_Group.KIND_GPU,) if num_gpus else ()))
    for i, group in enumerate(config.instance_group):
        path = f"instance_group[{i}]"
        if group.kind not in known:
            name = "KIND_GPU" if group.kind == _Group.KIND_GPU else str(group.kind)
            names = ", ".join(_Group.Kind.Name(kind) for kind in known)
            raise ConfigError(
                model, f"{path}.kind", f"expected one of {names}, found {name}: {machine} {_whereabouts(num_gpus)}"
            )
        on_gpus = num_gpus and group.kind in (_Group.KIND_GPU, _Group.KIND_AUTO)
        if group.gpus and not (on_gpus and all(0 <= gpu < num_gpus for gpu in group.gpus)):
            expected = f"numbers of 0 to {num_gpus - 1}" if on_gpus else "none"
            raise ConfigError(
                model,
                f"{path}.gpus",
                f"expected {expected}, found {list(group.gpus)}: {machine} {_whereabouts(num_gpus)}",
            )
        if not 0 <= group.count <= _MAX_INSTANCES:
            raise ConfigError(
                model, f"{path}.count", f"expected 1 to {_MAX_INSTANCES} (0 for the default), found {group.count}"
            )


def _validate_metrics(config: config_pb.ModelConfig, model: str) -> None:
    for tag in sorted(config.metric_tags):
        if not _LABEL_NAME.fullmatch(tag):
            raise ConfigError(
                model, f'metric_tags["{tag}"]', f"expected a name of letters, digits and '_', found '{tag}'"
            )
    for i, control in enumerate(config.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{i}]"
        if not control.metric_identifier.family:
            raise ConfigError(model, f"{path}.metric_identifier.family", "expected a metric's name, found none")
        buckets = list(control.histogram_options.buckets)
        where = f"{path}.histogram_options.buckets"
        if not buckets:
            raise ConfigError(model, where, "expected one bucket or more, found none")
        if not all(map(math.isfinite, buckets)) or any(a >= b for a, b in pairwise(buckets)):
            raise ConfigError(model, where, f"expected finite and increasing bounds, found {buckets}")


def _validate_warmup(config: config_pb.ModelConfig, model: str) -> None:
    for i, sample in enumerate(config.model_warmup):
        path = f"model_warmup[{i}]"
        limit = config.max_batch_size
        if limit and sample.batch_size > limit:
            raise ConfigError(
                model, f"{path}.batch_size", f"expected at most max_batch_size {limit}, found {sample.batch_size}"
            )
        for name, tensor in sorted(sample.inputs.items()):
            where = f'{path}.inputs["{name}"]'
            if tensor.data_type not in config_pb.DataType.values() or tensor.data_type == config_pb.TYPE_INVALID:
                raise ConfigError(model, f"{where}.data_type", "expected a data type, found none")
            for j, size in enumerate(tensor.dims):
                if size < 1:
                    raise ConfigError(
                        model, f"{where}.dims[{j}]", f"expected a size of 1 or more, all sizes given, found {size}"
                    )
            source = tensor.WhichOneof("input_data_type")
            if source is None or (source != "input_data_file" and not getattr(tensor, source)):
                raise ConfigError(
                    model, where, "expected one of zero_data: true, random_data: true or input_data_file, found none"
                )
            if source == "input_data_file":
                validate_file_name(tensor.input_data_file, model, f"{where}.input_data_file")


def _validate_file_names(config: config_pb.ModelConfig, model: str) -> None:
    if config.default_model_filename:
        validate_file_name(config.default_model_filename, model, "default_model_filename")
    for capability, name in sorted(config.cc_model_filenames.items()):
        validate_file_name(name, model, f'cc_model_filenames["{capability}"]')
    for i, output in enumerate(config.output):
        if output.label_filename:
            validate_file_name(output.label_filename, model, f"output[{i}].label_filename")


def validate_file_name(name: str, model: str, field: str) -> None:
    """A file inside the model's folder, by its path there. Raises ConfigError."""
    try:
        relative_path(name)
    except ValueError as problem:
        raise ConfigError(model, field, f"{problem}, found '{name}'") from problem


def _whereabouts(num_gpus: int) -> str:
    return f"has {num_gpus} NVIDIA GPU{'s' if num_gpus > 1 else ''}" if num_gpus else "runs models on the CPU"
