"""The hot path: one inference over HTTP, from the whole request to the whole response."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import TYPE_CHECKING

from hone.frontends.http_access import HeaderForwarder, Restrictions, echoed_request_id
from hone.frontends.http_body import BodyCoder
from hone.frontends.http_codec import decode_request, encode_response, parse_header_length, refuse_json_outputs
from hone.frontends.http_errors import Disconnected, Headers, answer_of
from hone.frontends.http_exchange import Exchange
from hone.frontends.http_tensors import Buffer
from hone.types import ENGINE_PARAMETER

if TYPE_CHECKING:
    from hone.serving.service import InferenceService

logger = logging.getLogger(__name__)


class InferHandler:
    """Answers POST /v2/models/NAME[/versions/N]/infer."""

    def __init__(
        self,
        service: InferenceService,
        bodies: BodyCoder,
        restrictions: Restrictions,
        forwarder: HeaderForwarder | None,
    ) -> None:
        self._service = service
        self._bodies = bodies
        self._restrictions = restrictions
        self._forwarder = forwarder

    async def __call__(self, name: str, version: str, exchange: Exchange) -> None:
        """Answer one request, whatever happens. Only the cancellation of the server itself passes through."""
        status = 200
        try:
            headers, body = await self._infer(name, version, exchange)
        except Disconnected:
            return
        except asyncio.CancelledError:
            if exchange.gone:
                return
            raise
        except Exception as error:
            request_id = _request_id(exchange)
            status, headers, content, _ = answer_of(error, request_id)
            body = [content]
        await exchange.answer(status, headers + echoed_request_id(exchange.fields), body)
        if status != 200 and logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "POST infer was answered %d: %s",
                status,
                content.decode("utf-8", "replace"),
                extra={"model": name, "version": version, "http_request_id": request_id},
            )

    async def _infer(self, name: str, version: str, exchange: Exchange) -> tuple[Headers, list[Buffer]]:
        fields = exchange.fields
        self._restrictions.check("inference", fields)
        body = exchange.whole_body() if b"content-encoding" not in fields else None
        if body is None:
            body = await self._bodies.read(exchange)
        received_ns = time.monotonic_ns()
        given_length = fields.get(b"inference-header-content-length")
        with self._service.lease(name, version) as lease:
            header_length = None if given_length is None else parse_header_length(given_length, len(body))
            decoded = decode_request(
                body,
                header_length,
                metadata=lease.metadata,
                version=version,
                batching=header_length == 0 and lease.config.max_batch_size > 0,
                regions=self._service.regions,
                limit=self._bodies.limit,
                received_ns=received_ns,
                forwarded=None if self._forwarder is None else self._forwarder.parameters(fields),
                traceparent=_traceparent(fields.get(b"traceparent")),
            )
            request = decoded.request
            if ENGINE_PARAMETER in request.parameters:
                self._restrictions.check("tuning", fields)
            if not decoded.binary or request.outputs:
                refuse_json_outputs(lease.metadata, decoded)
            task = exchange.task or asyncio.current_task()
            if task is not None:
                exchange.call_when_gone(task.cancel)
            try:
                response = await self._service.infer(lease, request)
            finally:
                exchange.call_when_gone(None)
            headers, parts = encode_response(response, explicit=bool(request.outputs), binary=decoded.binary)
        if b"accept-encoding" in fields:
            return await self._bodies.compress(exchange, headers, parts)
        return headers, parts


def _traceparent(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _request_id(exchange: Exchange) -> str:
    """The client's X-Request-ID, or a new one to find the request by in the logs."""
    given = echoed_request_id(exchange.fields)
    return given[0][1].decode("ascii") if given else uuid.uuid4().hex
