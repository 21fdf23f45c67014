"""ModelInfer: one request, one response, both as bytes. The hot path of gRPC."""

from __future__ import annotations

import time

from hone.errors import InvalidRequest
from hone.frontends.grpc_codec import decode_infer_request, encode_infer_response, parse_infer_request
from hone.frontends.grpc_metadata import CallHeaders
from hone.frontends.grpc_status import Context, abort
from hone.serving.service import InferenceService


class InferHandler:
    """Takes the raw message and gives the raw message, so that tensors are not copied by the generated code.

    grpc.aio cancels the handler's task when the client cancels, hangs up or runs out of time; that reaches
    `service.infer` as the cancellation of its awaiting task, which is the service's contract for cancelling.
    """

    def __init__(self, service: InferenceService, headers: CallHeaders, max_message_size: int) -> None:
        self._service = service
        self._headers = headers
        self._max_message_size = max_message_size

    async def model_infer(self, message: bytes, context: Context) -> bytes:
        received_ns = time.monotonic_ns()
        try:
            forwarded, traceparent = self._headers.read(context) if self._headers.wanted else (None, None)
            proto, raw = parse_infer_request(message)
            with self._service.lease(proto.model_name, proto.model_version) as lease:
                request = decode_infer_request(
                    proto,
                    raw,
                    self._service.regions,
                    received_ns=received_ns,
                    forwarded=forwarded,
                    traceparent=traceparent,
                )
                if request.parameters:
                    self._headers.check(request.parameters, context)
                response = await self._service.infer(lease, request)
                encoded = b"".join(encode_infer_response(response))
            check_response_size(len(encoded), self._max_message_size)
            return encoded
        except Exception as problem:
            await abort(context, problem, "ModelInfer")


def check_response_size(size: int, limit: int) -> None:
    """Raises InvalidRequest: gRPC itself would end the call with a message that names neither size nor setting."""
    if size > limit:
        raise InvalidRequest(
            f"response of {size} bytes exceeds the maximum message size of {limit} bytes."
            " Use --grpc-max-message-size to increase the limit, ask for fewer outputs or use shared memory."
        )
