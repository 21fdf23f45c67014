"""ModelStreamInfer: many requests on one call, run concurrently and answered in the order in which they came.

That order is what Triton's clients see for models that give one response a request, and what they may rely on: a
response carries no number, and ids are optional. An error of one request is a response like any other
(`error_message`) and the stream stays open; a client that sends the metadata `triton_grpc_error: true` has the first
error end the stream as its status instead.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from grpc.aio import EOF  # type: ignore[attr-defined]

from hone.errors import ServerStopping
from hone.frontends.grpc_codec import decode_infer_request, encode_infer_response, parse_infer_request
from hone.frontends.grpc_infer import check_response_size
from hone.frontends.grpc_metadata import CallHeaders
from hone.frontends.grpc_status import Context, abort, status_of
from hone.frontends.grpc_wire import stream_response
from hone.protos import service_pb
from hone.serving.service import InferenceService
from hone.types import ParameterValue

METHOD = "ModelStreamInfer"

#: What one stream may have in flight. Reading stops there, gRPC's flow control makes the client wait, and so no stream
#: can fill the queues of a server that others use too.
MAX_REQUESTS = 128
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Requests read and not yet answered on one stream, and the bytes of these and of answers not yet written.

    One request is let in whatever its size.
    """

    max_requests: int = MAX_REQUESTS
    max_bytes: int = MAX_BYTES


class StreamHandler:
    """All open streams of a server."""

    def __init__(
        self, service: InferenceService, headers: CallHeaders, max_message_size: int, limits: StreamLimits
    ) -> None:
        self._service = service
        self._headers = headers
        self._max_message_size = max_message_size
        self._limits = limits
        self._open: set[_Stream] = set()
        self._closing = False

    async def model_stream_infer(self, _requests: Any, context: Context) -> None:
        if self._closing:
            await abort(context, ServerStopping(), METHOD)
        stream = _Stream(self._service, self._headers, self._max_message_size, self._limits, context)
        self._open.add(stream)
        try:
            await stream.run()
        finally:
            self._open.discard(stream)

    def close(self) -> None:
        """Read no more requests; what was read is answered, and then each stream ends with UNAVAILABLE."""
        self._closing = True
        for stream in self._open:
            stream.close()


class _Stream:
    def __init__(
        self,
        service: InferenceService,
        headers: CallHeaders,
        max_message_size: int,
        limits: StreamLimits,
        context: Context,
    ) -> None:
        self._service = service
        self._max_message_size = max_message_size
        self._context = context
        self._headers = headers
        self._forwarded: dict[str, ParameterValue] | None = None
        self._traceparent: str | None = None
        if headers.wanted:
            self._forwarded, self._traceparent = headers.read(context)
        self._errors_end_stream = any(
            key == "triton_grpc_error" and value == "true" for key, value in context.invocation_metadata() or ()
        )
        self._window = _Window(limits)
        self._answers: asyncio.Queue[tuple[asyncio.Task[bytes | Exception], int] | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[bytes | Exception]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._closed_by_server = False

    async def run(self) -> None:
        reader = self._reader = asyncio.create_task(self._read())
        # Not by the reader itself: cancelled before its first step, it would never say so.
        reader.add_done_callback(lambda _: self._answers.put_nowait(None))
        try:
            problem = await self._write(reader)
        finally:
            await self._cancel_rest(reader)
        if problem is not None:
            await abort(self._context, problem, METHOD)

    def close(self) -> None:
        self._closed_by_server = True
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self) -> None:
        """Take requests while there is room."""
        while True:
            await self._window.wait_for_room()
            message = await self._context.read()
            if message is EOF:
                return
            task = asyncio.create_task(self._answer(message, time.monotonic_ns()))
            self._tasks.add(task)
            self._window.enter(len(message))
            self._answers.put_nowait((task, len(message)))

    async def _write(self, reader: asyncio.Task[None]) -> Exception | None:
        """Write the answers in order until there are no more; what the stream is to end with, None for success."""
        while (entry := await self._answers.get()) is not None:
            task, size = entry
            answer = await task
            self._tasks.discard(task)
            if isinstance(answer, Exception):
                return answer
            await self._context.write(answer)
            self._window.leave(size + len(answer))
        if not reader.cancelled():
            reader.result()
        return ServerStopping() if self._closed_by_server else None

    async def _answer(self, message: bytes, received_ns: int) -> bytes | Exception:
        """The ModelStreamInferResponse to one request, errors included; an exception where errors end the stream."""
        proto = None
        try:
            proto, raw = parse_infer_request(message)
            with self._service.lease(proto.model_name, proto.model_version) as lease:
                request = decode_infer_request(
                    proto,
                    raw,
                    self._service.regions,
                    received_ns=received_ns,
                    forwarded=self._forwarded,
                    traceparent=self._traceparent,
                )
                if request.parameters:
                    self._headers.check(request.parameters, self._context)
                response = await self._service.infer(lease, request)
                encoded = stream_response(encode_infer_response(response, final=True))
            check_response_size(len(encoded), self._max_message_size)
        except Exception as problem:
            if self._errors_end_stream:
                return problem
            _, details = status_of(problem, METHOD)
            failure = service_pb.ModelStreamInferResponse(error_message=details)
            if proto is not None:
                # Whose error it is: clients that multiplex one stream by ids find it here.
                failure.infer_response.id = proto.id
                failure.infer_response.model_name = proto.model_name
            failure.infer_response.parameters["triton_final_response"].bool_param = True
            encoded = failure.SerializeToString()
        self._window.hold(len(encoded))
        return encoded

    async def _cancel_rest(self, reader: asyncio.Task[None]) -> None:
        """End what is still running: nothing after the last answer, all of it when the client is gone."""
        rest: set[asyncio.Task[Any]] = {reader, *self._tasks}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class _Window:
    """What is in flight on one stream. One reader waits, on the event loop; no locks."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self._num_requests = 0
        self._num_bytes = 0
        self._room = asyncio.Event()
        self._room.set()

    async def wait_for_room(self) -> None:
        await self._room.wait()

    def enter(self, size: int) -> None:
        self._num_requests += 1
        self._num_bytes += size
        self._update()

    def hold(self, size: int) -> None:
        """An answer waits for its turn, or for a client that does not read."""
        self._num_bytes += size
        self._update()

    def leave(self, size: int) -> None:
        self._num_requests -= 1
        self._num_bytes -= size
        self._update()

    def _update(self) -> None:
        if self._num_requests < self._limits.max_requests and self._num_bytes < self._limits.max_bytes:
            self._room.set()
        else:
            self._room.clear()
