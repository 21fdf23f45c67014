"""ModelStreamInfer: order, errors, bounds, and ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
import pytest

from hone.config import Settings
from hone.errors import InvalidRequest
from hone.frontends.grpc_metadata import CallHeaders
from hone.frontends.grpc_stream import StreamHandler, StreamLimits
from hone.protos import service_pb
from hone.types import InferOutput, InferRequest, InferResponse
from tests.unit.frontends.grpc_fakes import FakeService, connected, echo, infer_request, serving

Code = grpc.StatusCode


class Held(FakeService):
    """Answers a request when the test releases its id."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self._releases: dict[str, asyncio.Event] = {}

    async def _wait(self, request: InferRequest) -> InferResponse:
        await self._release(request.id).wait()
        if request.id.startswith("bad"):
            raise InvalidRequest(f"refused {request.id}")
        return await echo(request)

    def release(self, *ids: str) -> None:
        for id_ in ids:
            self._release(id_).set()

    def ids(self) -> list[str]:
        return [request.id for request in self.requests]

    def _release(self, id_: str) -> asyncio.Event:
        return self._releases.setdefault(id_, asyncio.Event())


@asynccontextmanager
async def streaming(service: FakeService, metadata: Any = None, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A server and an open stream to it."""
    async with serving(service, **options) as server, connected(server) as stub:
        stream = stub.ModelStreamInfer(metadata=metadata)
        yield server, stream
        stream.cancel()


async def test_requests_run_together_and_are_answered_in_their_order():
    service = Held()
    async with streaming(service) as (_, stream):
        for id_ in "abc":
            await stream.write(infer_request(id=id_))
        await service.until(lambda: service.ids() == ["a", "b", "c"])
        service.release("c", "b", "a")
        assert [(await stream.read()).infer_response.id for _ in range(3)] == ["a", "b", "c"]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() == Code.OK
    assert service.num_leases == 0


async def test_each_response_is_marked_final():
    async with streaming(FakeService()) as (_, stream):
        request = infer_request(id="1")
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        await stream.write(request)
        response = await stream.read()
        assert response.infer_response.parameters["triton_final_response"].bool_param is True
        assert len(response.infer_response.raw_output_contents[0]) == 64
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_large_tensors():
    data = np.random.default_rng(0).random((1, 200_000), np.float32)
    async with streaming(FakeService()) as (_, stream):
        await stream.write(infer_request(data))
        response = await stream.read()
        assert response.infer_response.raw_output_contents[0] == data.tobytes()


async def test_an_error_of_one_request_leaves_the_stream_open():
    service = Held()
    async with streaming(service) as (_, stream):
        service.release("a", "bad1", "c")
        await stream.write(infer_request(id="a"))
        await stream.write(infer_request(id="bad1"))
        await stream.write(infer_request(id="x", model_name="nothing"))
        await stream.write(infer_request(id="c"))
        responses = [await stream.read() for _ in range(4)]
        assert [response.error_message for response in responses] == [
            "",
            "refused bad1",
            "Request for unknown model: 'nothing' is not found",
            "",
        ]
        assert [response.infer_response.id for response in responses] == ["a", "bad1", "x", "c"]


async def test_a_fault_of_the_server_is_not_told():
    async def fail(_: Any) -> Any:
        raise KeyError("/secret")

    async with streaming(FakeService(fail)) as (_, stream):
        await stream.write(infer_request())
        assert (await stream.read()).error_message == "internal error"


async def test_a_malformed_message_leaves_the_stream_open():
    async with serving(FakeService()) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=service_pb.ModelStreamInferResponse.FromString,
        )()
        await stream.write(b"\xff\xff")
        assert (await stream.read()).error_message == "malformed ModelInferRequest message"
        await stream.write(infer_request(id="5").SerializeToString())
        assert (await stream.read()).infer_response.id == "5"
        stream.cancel()


async def test_an_error_ends_the_stream_as_its_status_where_the_client_asks():
    service = Held()
    async with streaming(service, metadata=(("triton_grpc_error", "true"),)) as (_, stream):
        for id_ in ("a", "bad1", "c"):
            await stream.write(infer_request(id=id_))
        await service.until(lambda: len(service.requests) == 3)
        service.release("a", "bad1")
        assert (await stream.read()).infer_response.id == "a"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert (caught.value.code(), caught.value.details()) == (Code.INVALID_ARGUMENT, "refused bad1")
        await service.until(lambda: service.num_cancelled == 1)
    assert service.num_leases == 0


async def test_no_more_than_the_limit_is_in_flight():
    service = Held()
    async with streaming(service, stream_limits=StreamLimits(max_requests=2)) as (_, stream):
        for number in range(6):
            await stream.write(infer_request(id=str(number)))
        await service.until(lambda: len(service.requests) == 2)
        for number in range(6):
            assert len(service.requests) <= number + 2
            service.release(str(number))
            assert (await stream.read()).infer_response.id == str(number)
        assert service.ids() == [str(number) for number in range(6)]


async def test_bytes_in_flight_are_limited_but_one_request_always_gets_in():
    service = Held()
    large = np.zeros((1, 30_000), np.float32)
    async with streaming(service, stream_limits=StreamLimits(max_bytes=100_000)) as (_, stream):
        await stream.write(infer_request(large, id="a"))
        await stream.write(infer_request(id="b"))
        await service.until(lambda: service.ids() == ["a"])
        service.release("b", "a")
        assert [(await stream.read()).infer_response.id for _ in range(2)] == ["a", "b"]


async def test_answers_that_wait_count_as_bytes_in_flight():
    service = Held()
    answered = asyncio.Event()

    async def answer(request: InferRequest) -> InferResponse:
        if request.id != "large":
            return await (echo if request.id == "unary" else service._wait)(request)
        answered.set()
        data = np.zeros(30_000, np.float32)
        return InferResponse("identity", "1", request.id, [InferOutput("O", "FP32", data.shape, data)])

    service.answer = answer
    limits = StreamLimits(max_bytes=100_000)
    async with serving(service, stream_limits=limits) as server, connected(server) as stub:
        stream = stub.ModelStreamInfer()
        await stream.write(infer_request(id="first"))
        await stream.write(infer_request(id="large"))
        await asyncio.wait_for(answered.wait(), 20)
        await stream.write(infer_request(id="next"))  # the one that the server was waiting for already
        await stream.write(infer_request(id="last"))
        for _ in range(3):  # on the same connection: once it is answered, the server has seen "last"
            await stub.ModelInfer(infer_request(id="unary"))
        assert "last" not in service.ids()
        service.release("first", "next", "last")
        responses = [await stream.read() for _ in range(4)]
        assert [response.infer_response.id for response in responses] == ["first", "large", "next", "last"]
        stream.cancel()


async def test_a_full_stream_does_not_keep_others_waiting():
    service = Held()
    limits = StreamLimits(max_requests=1)
    async with serving(service, stream_limits=limits) as server, connected(server) as stub:
        full, other = stub.ModelStreamInfer(), stub.ModelStreamInfer()
        await full.write(infer_request(id="stuck"))
        await full.write(infer_request(id="behind"))
        await service.until(lambda: service.ids() == ["stuck"])
        service.release("free")
        await other.write(infer_request(id="free"))
        assert (await other.read()).infer_response.id == "free"
        assert "behind" not in service.ids()
        full.cancel()
        other.cancel()


async def test_cancelling_a_stream_cancels_all_its_requests():
    service = Held()
    async with streaming(service) as (_, stream):
        for id_ in "abc":
            await stream.write(infer_request(id=id_))
        await service.until(lambda: len(service.requests) == 3)
        stream.cancel()
        await service.until(lambda: service.num_cancelled == 3)
    assert service.num_leases == 0


async def test_stop_answers_what_was_read_then_ends_streams():
    service = Held()
    async with streaming(service) as (server, stream):
        await stream.write(infer_request(id="a"))
        await service.until(lambda: service.ids() == ["a"])
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0)
        service.release("a")
        assert (await stream.read()).infer_response.id == "a"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() == Code.UNAVAILABLE
        assert caught.value.details().startswith("Server is stopping")
        await stopping


async def test_stop_does_not_wait_for_idle_streams():
    async with streaming(FakeService()) as (server, stream):
        await stream.write(infer_request())
        await stream.read()
        async with asyncio.timeout(10):
            await server.stop(60)
        assert await stream.code() == Code.UNAVAILABLE


async def test_stop_ends_a_stream_that_has_only_just_opened():
    """Its reader is cancelled before its first step."""
    service = FakeService()
    handler = StreamHandler(service, CallHeaders(Settings()), 2**20, StreamLimits())  # type: ignore[arg-type]
    context = UnreadContext()
    stream = asyncio.create_task(handler.model_stream_infer(None, context))
    await asyncio.sleep(0)
    handler.close()
    with pytest.raises(ConnectionAbortedError):
        await asyncio.wait_for(stream, 10)
    assert context.status == Code.UNAVAILABLE
    assert not context.was_read


class UnreadContext:
    """The context of a call whose client sends nothing."""

    def __init__(self) -> None:
        self.status: grpc.StatusCode | None = None
        self.was_read = False

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> Any:
        self.was_read = True
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, _details: str) -> None:
        self.status = code
        raise ConnectionAbortedError
