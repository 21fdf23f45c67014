"""The route table: every endpoint with its restricted group, its handler and its place in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from hone.frontends.http_control import Call, ControlHandlers

Handler: TypeAlias = Callable[[ControlHandlers, Call], Awaitable[Any]]

_MODEL = "/v2/models/{model}"
_VERSION = "/v2/models/{model}/versions/{version}"


@dataclass(frozen=True, slots=True)
class Route:
    """`handler` None is inference. `request` and `response` name schemas of the OpenAPI document; `response` "" means
    that the endpoint never succeeds. `errors` are the statuses beside 400, 403 and 500 that clients may meet."""

    method: str
    path: str
    group: str
    summary: str
    handler: Handler | None
    response: str
    request: str = ""
    errors: tuple[int, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))


def _routes() -> tuple[Route, ...]:
    table = [
        Route("GET", "/v2", "metadata", "Server metadata", ControlHandlers.server_metadata, "ServerMetadata"),
        Route("GET", "/v2/health/live", "health", "Is the server alive?", ControlHandlers.live, "Live", errors=(503,)),
        Route(
            "GET",
            "/v2/health/ready",
            "health",
            "Can the server answer inference requests?",
            ControlHandlers.ready,
            "Ready",
            errors=(503,),
        ),
        Route(
            "GET",
            "/v2/models/stats",
            "statistics",
            "Statistics of all models",
            ControlHandlers.statistics,
            "Statistics",
        ),
    ]
    for base in (_MODEL, _VERSION):
        table += [
            Route(
                "GET",
                base,
                "metadata",
                "Model metadata",
                ControlHandlers.model_metadata,
                "ModelMetadata",
                errors=(404, 503),
            ),
            Route(
                "GET",
                f"{base}/ready",
                "health",
                "Can the model answer?",
                ControlHandlers.model_ready,
                "ModelReady",
                errors=(404, 503),
            ),
            Route(
                "GET",
                f"{base}/config",
                "model-config",
                "Model configuration, completed",
                ControlHandlers.model_config,
                "ModelConfig",
                errors=(404, 503),
            ),
            Route(
                "GET",
                f"{base}/stats",
                "statistics",
                "Statistics of a model",
                ControlHandlers.statistics,
                "Statistics",
                errors=(404, 503),
            ),
            Route(
                "GET",
                f"{base}/tuning",
                "tuning",
                "How the tuning of a model stands",
                ControlHandlers.tuning_status,
                "TuningStatus",
                errors=(404, 503),
            ),
            Route(
                "POST",
                f"{base}/tuning",
                "tuning",
                "Start, tune anew, pause, cancel, roll back or pin the baseline",
                ControlHandlers.tuning_action,
                "TuningStatus",
                "TuningAction",
                errors=(404, 503),
            ),
            Route(
                "POST",
                f"{base}/infer",
                "inference",
                "Run a model",
                None,
                "InferResponse",
                "InferRequest",
                errors=(404, 501, 503),
            ),
            Route(
                "POST",
                f"{base}/generate",
                "inference",
                "Generate (not offered)",
                ControlHandlers.generate,
                "",
                "AnyObject",
                errors=(404, 501),
            ),
            Route(
                "POST",
                f"{base}/generate_stream",
                "inference",
                "Generate in a stream (not offered)",
                ControlHandlers.generate,
                "",
                "AnyObject",
                errors=(404, 501),
            ),
        ]
    table += [
        Route(
            "POST",
            "/v2/repository/index",
            "model-repository",
            "Models of the repository and their states",
            ControlHandlers.index,
            "Index",
            "IndexRequest",
        ),
        Route(
            "POST",
            "/v2/repository/models/{model}/load",
            "model-repository",
            "Load or reload a model",
            ControlHandlers.load,
            "Empty",
            "LoadRequest",
            errors=(404, 501, 503),
        ),
        Route(
            "POST",
            "/v2/repository/models/{model}/unload",
            "model-repository",
            "Unload a model",
            ControlHandlers.unload,
            "Empty",
            "UnloadRequest",
            errors=(404, 501, 503),
        ),
    ]
    for path in ("index", "models/{model}/load", "models/{model}/unload"):
        table.append(
            Route(
                "POST",
                f"/v2/repository/{{repository}}/{path}",
                "model-repository",
                "Repositories by name (not offered)",
                ControlHandlers.named_repository,
                "",
                "AnyObject",
                errors=(501,),
            )
        )
    for path in ("/v2/trace/setting", f"{_MODEL}/trace/setting"):
        table += [
            Route("GET", path, "trace", "Trace settings", ControlHandlers.trace_settings, "TraceSettings"),
            Route(
                "POST",
                path,
                "trace",
                "Change trace settings; null clears one",
                ControlHandlers.update_trace_settings,
                "TraceSettings",
                "TraceUpdate",
                errors=(501,),
            ),
        ]
    table += [
        Route("GET", "/v2/logging", "logging", "Log settings", ControlHandlers.log_settings, "LogSettings"),
        Route(
            "POST",
            "/v2/logging",
            "logging",
            "Change log settings",
            ControlHandlers.update_log_settings,
            "LogSettings",
            "LogUpdate",
            errors=(501,),
        ),
    ]
    table += _shared_memory("system", named_register=ControlHandlers.register_region)
    table += _shared_memory("cuda", named_register=None)
    return tuple(table)


def _shared_memory(kind: str, *, named_register: Handler | None) -> list[Route]:
    """`named_register` None: the whole kind is not offered."""
    offered = named_register is not None
    base = f"/v2/{kind}sharedmemory"
    note = "" if offered else " (not offered)"
    empty, statuses, request = ("Empty", "RegionStatuses", "RegionRequest") if offered else ("", "", "AnyObject")
    status = ControlHandlers.region_status if offered else ControlHandlers.cuda_region
    unregister = ControlHandlers.unregister_region if offered else ControlHandlers.cuda_region
    unnamed = ControlHandlers.register_unnamed_region if offered else ControlHandlers.cuda_region
    named = named_register or ControlHandlers.cuda_region
    group, errors = "shared-memory", (404, 501)
    title = {"system": "System", "cuda": "CUDA"}[kind]
    return [
        Route("GET", f"{base}/status", group, f"{title} regions{note}", status, statuses, errors=errors),
        Route(
            "GET", f"{base}/region/{{region}}/status", group, f"{title} region{note}", status, statuses, errors=errors
        ),
        Route(
            "POST", f"{base}/register", group, f"Register without a name: refused{note}", unnamed, "", request, errors
        ),
        Route(
            "POST",
            f"{base}/region/{{region}}/register",
            group,
            f"Register a {title} region{note}",
            named,
            empty,
            request,
            errors,
        ),
        Route(
            "POST", f"{base}/unregister", group, f"Unregister all {title} regions{note}", unregister, empty, "", errors
        ),
        Route(
            "POST",
            f"{base}/region/{{region}}/unregister",
            group,
            f"Unregister a {title} region{note}",
            unregister,
            empty,
            "",
            errors,
        ),
    ]


ROUTES = _routes()
