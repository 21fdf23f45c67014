"""The dashboard's addresses: the page at `/`, its files and its data under `/dashboard/`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from hone.config import RESTRICTED_GROUPS, Settings
from hone.dashboard.cache_summary import summarize
from hone.dashboard.commands import Commands
from hone.dashboard.kernel_map import read_map
from hone.dashboard.monitor import Monitor, TooManyWatchers
from hone.dashboard.page import HEADERS, INDEX, read_assets
from hone.dashboard.picture import Painter
from hone.dashboard.readings import Readings
from hone.dashboard.sources import Keys, Service, Tuning
from hone.errors import HoneError, InvalidRequest, Restricted, Unavailable
from hone.serving.registry import ModelRegistry

_MAX_BATCH = 1 << 20

Answer = Callable[[HoneError], Response]


class Dashboard:
    """`mount` it on the HTTP front end's application; `close` it before the HTTP server stops, which waits for open
    streams. Belongs to the event loop."""

    def __init__(
        self,
        settings: Settings,
        service: Service,
        registry: ModelRegistry,
        tuning: Tuning | None,
        *,
        known_names: Callable[[], list[str]],
        keys: Keys,
        answer_error: Answer,
    ) -> None:
        """`answer_error` makes the answer that the front end gives to a refusal."""
        self._settings = settings
        self._registry = registry
        self._keys = keys
        self._answer_error = answer_error
        self._assets = read_assets()
        readings = Readings()
        self._monitor = Monitor(Painter(settings, service, registry, tuning, readings, known_names).look, readings)
        self._commands = Commands()
        self._cache_turn = asyncio.Lock()

    def mount(self, app: FastAPI) -> None:
        for path, endpoint, method in (
            ("/", self._page, "GET"),
            ("/dashboard/snapshot", self._snapshot, "GET"),
            ("/dashboard/events", self._events, "GET"),
            ("/dashboard/points/{model}", self._points, "GET"),
            ("/dashboard/cache", self._cache, "GET"),
            ("/dashboard/device", self._device, "GET"),
            ("/dashboard/kernels/{model}", self._kernels, "GET"),
            ("/dashboard/explain/{model}", self._explained, "GET"),
            ("/dashboard/explain/{model}", self._explain, "POST"),
            ("/dashboard/{name}", self._page, "GET"),
        ):
            app.add_route(path, self._guarded(endpoint), methods=[method], include_in_schema=False)

    def close(self) -> None:
        self._monitor.close()
        self._commands.close()

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                return await endpoint(request)
            except HoneError as problem:
                return self._answer_error(problem)

        return guarded

    # --- the page

    async def _page(self, request: Request) -> Response:
        name = request.path_params.get("name", INDEX)
        asset = self._assets.get(name)
        if asset is None:
            return Response(b'{"error":"Not Found"}', status_code=404, media_type="application/json")
        headers = {**HEADERS, "ETag": asset.etag}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.content, headers=headers, media_type=asset.media_type)

    # --- data

    async def _snapshot(self, request: Request) -> Response:
        locked = self._locked(request)
        return _json({**await self._monitor.fresh(frozenset(locked)), "locked": locked})

    async def _events(self, request: Request) -> Response:
        """Server-sent events. What the request's keys do not open is left out, and `locked` says which headers would
        open it."""
        locked = self._locked(request)
        stream = self._monitor.watch(frozenset(locked))
        try:
            first = await anext(stream)
        except TooManyWatchers:
            raise Unavailable("too many dashboards are open on this server") from None

        async def told() -> AsyncIterator[bytes]:
            try:
                yield b"retry: 1000\nevent: locked\ndata: %s\n\n" % orjson.dumps(locked)
                yield first
                async for event in stream:
                    yield event
            finally:
                await stream.aclose()  # type: ignore[attr-defined]

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(told(), media_type="text/event-stream", headers=headers)

    async def _points(self, request: Request) -> Response:
        self._check(request, "statistics")
        return _json(self._monitor.readings.points(request.path_params["model"]))

    async def _cache(self, request: Request) -> Response:
        self._check(request, "tuning")
        names = {model.ref.graph: model.name for model in self._registry.served()}
        async with self._cache_turn:  # it reads the whole folder: not several times at once
            return _json(await asyncio.to_thread(summarize, self._settings.kernels_cache, names))

    async def _device(self, request: Request) -> Response:
        self._check(request, "metadata")
        return _json(await self._commands.doctor(str(self._settings.kernels_cache)))

    async def _kernels(self, request: Request) -> Response:
        """What tuning knows of the kernels that serve a batch size now; null where nothing tuned does."""
        self._check(request, "tuning")
        model, batch = self._registry.find(request.path_params["model"], ""), _batch(request)
        serving = (generation for generation in model.slot.current() if generation.artifact)
        artifact = next((one.artifact for one in serving if one.rows == batch), "")
        if not artifact:
            return _json(None)
        async with self._cache_turn:
            return _json(await asyncio.to_thread(read_map, self._settings.kernels_cache, artifact))

    async def _explained(self, request: Request) -> Response:
        """An explanation that was made before; null where there is none for what is served now."""
        return _json(self._commands.kept(*self._subject(request)))

    async def _explain(self, request: Request) -> Response:
        # Browsers say so when the page of another site asks: none may set this machine to work.
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Restricted("This endpoint is for the dashboard's own page and for programs, not for other sites")
        return _json(await self._commands.explain(*self._subject(request)))

    def _subject(self, request: Request) -> tuple[str, str, str, int, str]:
        """What is to be explained: the newest version of a model for a batch size, as it is served now."""
        self._check(request, "tuning")
        batch = _batch(request)
        model = self._registry.find(request.path_params["model"], "")
        state = hashlib.sha256(
            repr((model.ref, [generation.artifact for generation in model.slot.current()])).encode()
        ).hexdigest()
        folder, cache = str(model.definition.path.parent), str(self._settings.kernels_cache)
        return model.name, folder, cache, batch, state

    # --- keys

    def _locked(self, request: Request) -> dict[str, str]:
        """Groups whose key the request lacks -> the header that it is awaited in."""
        fields = dict(request.scope["headers"])
        wanted = {group: self._keys.wanted(group, fields) for group in RESTRICTED_GROUPS}
        return {group: header for group, header in wanted.items() if header}

    def _check(self, request: Request, group: str) -> None:
        """Raises Restricted."""
        header = self._keys.wanted(group, dict(request.scope["headers"]))
        if header:
            raise Restricted(f"This API is restricted, expecting header '{header}'")


def _batch(request: Request) -> int:
    """Raises InvalidRequest."""
    text = request.query_params.get("batch", "1")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) <= _MAX_BATCH):
        raise InvalidRequest(f"batch: expected a number from 1 to {_MAX_BATCH}, found '{text}'")
    return int(text)


def _json(document: Any) -> Response:
    return Response(orjson.dumps(document), headers={"Cache-Control": "no-store"}, media_type="application/json")
