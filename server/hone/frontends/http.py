"""The HTTP front end as one ASGI application: inference by a path of its own, everything else by FastAPI."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from hone import __version__
from hone.config import Settings
from hone.frontends.http_access import HeaderForwarder, Restrictions, check_same_site, echoed_request_id
from hone.frontends.http_body import BodyCoder
from hone.frontends.http_control import Call, ControlHandlers, NotReady
from hone.frontends.http_errors import Disconnected, answer_of, method_not_allowed, not_found
from hone.frontends.http_exchange import SCOPE_KEY, AsgiExchange, Exchange, Receive, Scope, Send
from hone.frontends.http_infer import InferHandler
from hone.frontends.http_openapi import openapi_document
from hone.frontends.http_routes import ROUTES, Route

if TYPE_CHECKING:
    from hone.serving.service import InferenceService

logger = logging.getLogger(__name__)

_MODELS = "/v2/models/"
_INFER = "/infer"


class HttpApp:
    """ASGI callable. `fastapi` is the inner application, where app.py may mount more; `close` ends its threads."""

    def __init__(self, service: InferenceService, settings: Settings) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hone-zlib")
        self._limit = settings.http_max_input_size
        self._bodies = BodyCoder(self._limit, self._pool)
        self.restrictions = Restrictions(settings.restricted_http)
        pattern = settings.http_header_forward_pattern
        self._infer = InferHandler(
            service, self._bodies, self.restrictions, HeaderForwarder(pattern) if pattern else None
        )
        self._control = ControlHandlers(service)
        self.fastapi = self._build()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"]
            if path.endswith(_INFER) and path.startswith(_MODELS):
                parts = path.split("/")
                if len(parts) == 5 and parts[3]:
                    await self._infer(parts[3], "", self._exchange(scope, receive, send))
                    return
                if len(parts) == 7 and parts[3] and parts[4] == "versions" and is_version(parts[5]):
                    await self._infer(parts[3], parts[5], self._exchange(scope, receive, send))
                    return
        await self.fastapi(scope, receive, send)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _exchange(self, scope: Scope, receive: Receive, send: Send) -> Exchange:
        exchange: Exchange | None = scope.get(SCOPE_KEY)
        return exchange or AsgiExchange(scope, receive, send, self._limit)

    def _build(self) -> FastAPI:
        # The interactive pages would load their scripts from somewhere else: the document alone is served.
        app = FastAPI(title="hone", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
        for route in ROUTES:
            app.add_api_route(
                route.path,
                self._endpoint(route),
                methods=[route.method],
                summary=route.summary,
                response_model=None,
                response_class=Response,
            )
        app.add_exception_handler(HTTPException, self._refuse)
        document = openapi_document(ROUTES)
        app.openapi = lambda: document  # type: ignore[method-assign]
        return app

    def _endpoint(self, route: Route) -> Any:
        handler = route.handler

        async def infer(request: Request) -> Response:
            version = request.path_params.get("version", "")
            if version and not is_version(version):
                return error_response(not_found())
            return _Delegated(self._infer, request.path_params["model"], version, self._limit)

        async def control(request: Request) -> Response:
            exchange: Exchange = self._exchange(request.scope, request.receive, _no_send)
            try:
                self.restrictions.check(route.group, exchange.fields)
                if route.method != "GET":
                    check_same_site(exchange.fields)
                params: dict[str, str] = request.path_params
                if "version" in params and not is_version(params["version"]):
                    raise not_found()
                body = await self._bodies.read(exchange)
                assert handler is not None
                document = await handler(self._control, Call(params, body))
                response = Response(orjson.dumps(document), media_type="application/json")
            except Disconnected:
                return Response(status_code=400)  # nobody reads it
            except Exception as error:
                response = error_response(error)
            for name, value in echoed_request_id(exchange.fields):
                response.headers[name.decode("ascii")] = value.decode("latin-1")
            return response

        return infer if handler is None else control

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Paths and methods that no route takes."""
        if isinstance(error, HTTPException) and error.status_code == 405:
            methods: set[str] = set()
            for route in self.fastapi.routes:
                match, _ = route.matches(request.scope)
                if match is not Match.NONE:
                    methods |= getattr(route, "methods", None) or set()
            return error_response(method_not_allowed(", ".join(sorted(methods))))
        return error_response(not_found())


def build_http_app(service: InferenceService, settings: Settings) -> HttpApp:
    return HttpApp(service, settings)


def is_version(text: str) -> bool:
    return text.isascii() and text.isdigit()


class _Delegated(Response):
    """Inference reached through FastAPI's router (another ASGI application in front): the same handler answers."""

    def __init__(self, handler: InferHandler, model: str, version: str, limit: int) -> None:
        super().__init__()
        self._handler = handler
        self._model = model
        self._version = version
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = scope.get(SCOPE_KEY) or AsgiExchange(scope, receive, send, self._limit)
        await self._handler(self._model, self._version, exchange)


async def _no_send(message: Any) -> None:
    raise RuntimeError("control endpoints answer through FastAPI")


def error_response(error: Exception) -> Response:
    status, headers, body, _ = answer_of(error)
    if isinstance(error, NotReady):
        body = orjson.dumps(error.document)
    response = Response(body, status_code=status)
    for name, value in headers:
        response.headers[name.decode("ascii")] = value.decode("latin-1")
    return response
