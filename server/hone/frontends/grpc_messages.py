"""Control messages: protobuf requests to the service's plain values, and its values to protobuf responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hone.errors import InvalidRequest, Unsupported
from hone.protos import config_pb, service_pb
from hone.types import IndexEntry, LoadParameters, ModelMetadata, RegionStatus, ServerMetadata, TensorMetadata

_FILE_PREFIX = "file:"
_MAX_UINT32 = 2**32 - 1


def server_metadata(metadata: ServerMetadata) -> Any:
    return service_pb.ServerMetadataResponse(
        name=metadata.name, version=metadata.version, extensions=metadata.extensions
    )


def model_metadata(metadata: ModelMetadata) -> Any:
    return service_pb.ModelMetadataResponse(
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=map(_tensor_metadata, metadata.inputs),
        outputs=map(_tensor_metadata, metadata.outputs),
    )


def model_config(config: config_pb.ModelConfig) -> Any:
    return service_pb.ModelConfigResponse(config=config)


def model_statistics(models: Iterable[Mapping[str, Any]]) -> Any:
    """From the entries of `model_stats` in Triton's JSON form."""
    return service_pb.ModelStatisticsResponse(
        model_stats=[
            service_pb.ModelStatistics(
                name=model["name"],
                version=model["version"],
                last_inference=model["last_inference"],
                inference_count=model["inference_count"],
                execution_count=model["execution_count"],
                inference_stats=service_pb.InferStatistics(**_durations(model["inference_stats"])),
                batch_stats=[
                    service_pb.InferBatchStatistics(
                        batch_size=batch["batch_size"],
                        **_durations({name: value for name, value in batch.items() if name != "batch_size"}),
                    )
                    for batch in model["batch_stats"]
                ],
                memory_usage=[service_pb.MemoryUsage(**usage) for usage in model["memory_usage"]],
                response_stats={
                    key: service_pb.InferResponseStatistics(**_durations(value))
                    for key, value in model["response_stats"].items()
                },
            )
            for model in models
        ]
    )


def repository_index(entries: Iterable[IndexEntry]) -> Any:
    return service_pb.RepositoryIndexResponse(
        models=[
            service_pb.RepositoryIndexResponse.ModelIndex(
                name=entry.name, version=entry.version, state=entry.state, reason=entry.reason
            )
            for entry in entries
        ]
    )


def refuse_repository_name(request: Any) -> None:
    """Raises Unsupported where an index, load or unload request names a repository."""
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported")


def load_parameters(request: Any) -> LoadParameters:
    """Raises InvalidRequest (unknown parameter, wrong type)."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, parameter in request.parameters.items():
        if key == "config":
            config = _repository_value(key, parameter, "string_param")
        elif key.startswith(_FILE_PREFIX):
            files[key.removeprefix(_FILE_PREFIX)] = _repository_value(key, parameter, "bytes_param")
        else:
            raise InvalidRequest(f"unexpected load parameter '{key}', expected 'config' or '{_FILE_PREFIX}<path>'")
    return LoadParameters(config=config, files=files)


def unload_dependents(request: Any) -> bool:
    """Raises InvalidRequest (unknown parameter, wrong type)."""
    wanted = False
    for key, parameter in request.parameters.items():
        if key != "unload_dependents":
            raise InvalidRequest(f"unexpected unload parameter '{key}', expected 'unload_dependents'")
        wanted = _repository_value(key, parameter, "bool_param")
    return wanted


def region_statuses(regions: Iterable[RegionStatus]) -> Any:
    response = service_pb.SystemSharedMemoryStatusResponse()
    for region in regions:
        status = response.regions[region.name]
        status.name, status.key = region.name, region.key
        status.offset, status.byte_size = region.offset, region.byte_size
    return response


def trace_updates(request: Any) -> dict[str, list[str] | None]:
    """None, for a setting without values, gives the setting back to the global one."""
    return {name: list(setting.value) or None for name, setting in request.settings.items()}


def trace_settings(settings: Mapping[str, Iterable[str]]) -> Any:
    response = service_pb.TraceSettingResponse()
    for name, values in settings.items():
        response.settings[name].value.extend(values)
    return response


def log_updates(request: Any) -> dict[str, bool | int | str]:
    """Raises InvalidRequest (a setting without a value)."""
    updates: dict[str, bool | int | str] = {}
    for name, setting in request.settings.items():
        form = setting.WhichOneof("parameter_choice")
        if form is None:
            raise InvalidRequest(
                f"log setting '{name}' has no value, expected bool_param, uint32_param or string_param"
            )
        updates[name] = getattr(setting, form)
    return updates


def log_settings(settings: Mapping[str, bool | int | str]) -> Any:
    response = service_pb.LogSettingsResponse()
    for name, value in settings.items():
        setting = response.settings[name]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int):
            setting.uint32_param = min(value, _MAX_UINT32)
        else:
            setting.string_param = value
    return response


def _tensor_metadata(tensor: TensorMetadata) -> Any:
    return service_pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
    )


def _durations(values: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    return {name: service_pb.StatisticDuration(count=value["count"], ns=value["ns"]) for name, value in values.items()}


def _repository_value(key: str, parameter: Any, form: str) -> Any:
    given = parameter.WhichOneof("parameter_choice")
    if given != form:
        raise InvalidRequest(f"invalid value type for '{key}' parameter, expected {form}, got {given}")
    return getattr(parameter, form)
