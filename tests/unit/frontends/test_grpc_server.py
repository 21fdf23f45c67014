"""Every method over a real channel, with tritonclient's stub against a service that each test writes."""

import asyncio
import logging
import socket
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hone.config import RESTRICTED_GROUPS, Settings
from hone.errors import ErrorKind, HoneError
from hone.frontends.grpc import GrpcServer
from hone.frontends.grpc_health import HealthHandler
from hone.frontends.grpc_metadata import RESTRICTED_METHODS
from hone.frontends.grpc_status import MAX_DETAILS_BYTES, STATUS_CODES
from hone.protos import service_pb
from hone.types import InferOutput, InferResponse, LoadParameters
from tests.unit.frontends.grpc_fakes import FakeService, connected, echo, infer_request, serving

Code = grpc.StatusCode
METHODS = [method.name for method in service_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods]


async def refused(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@pytest.fixture
async def service():
    return FakeService()


@pytest.fixture
async def server(service):
    async with serving(service) as running:
        yield running


@pytest.fixture
async def stub(server):
    async with connected(server) as stub_:
        yield stub_


# --- tables


def test_every_kind_of_error_has_a_status():
    assert set(STATUS_CODES) == set(ErrorKind)


def test_every_method_belongs_to_one_restricted_group():
    covered = [method for methods in RESTRICTED_METHODS.values() for method in methods]
    assert sorted(covered) == sorted([*METHODS, "Check", "Watch"])
    assert set(RESTRICTED_METHODS) == set(RESTRICTED_GROUPS)


async def test_every_method_of_the_protocol_is_served(server):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert len(METHODS) == 20
        for method in METHODS:
            call = channel.stream_stream(f"/inference.GRPCInferenceService/{method}")(iter([b""]))
            try:
                async for _ in call:
                    break
                call.cancel()
            except grpc.aio.AioRpcError as problem:
                assert problem.details() != "Method not found!", method
        unknown = channel.unary_unary("/inference.GRPCInferenceService/NoSuchMethod")
        assert (await refused(unknown(b"")))[0] == Code.UNIMPLEMENTED


# --- control


async def test_health(stub, service):
    assert (await stub.ServerLive(service_pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(service_pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(service_pb.ModelReadyRequest(name="identity"))).ready
    service.is_ready = False
    assert not (await stub.ServerReady(service_pb.ServerReadyRequest())).ready
    assert not (await stub.ModelReady(service_pb.ModelReadyRequest(name="identity", version="1"))).ready
    assert await refused(stub.ModelReady(service_pb.ModelReadyRequest(name="nothing"))) == (
        Code.NOT_FOUND,
        "Request for unknown model: 'nothing' is not found",
    )


async def test_metadata(stub):
    assert await stub.ServerMetadata(service_pb.ServerMetadataRequest()) == service_pb.ServerMetadataResponse(
        name="triton", version="1.2.3", extensions=["classification", "logging"]
    )
    tensor = service_pb.ModelMetadataResponse.TensorMetadata
    assert await stub.ModelMetadata(service_pb.ModelMetadataRequest(name="identity")) == (
        service_pb.ModelMetadataResponse(
            name="identity",
            versions=["1", "3"],
            platform="onnxruntime_onnx",
            inputs=[tensor(name="INPUT0", datatype="FP32", shape=[-1, 16])],
            outputs=[tensor(name="OUTPUT0", datatype="BYTES", shape=[-1])],
        )
    )
    code, details = await refused(stub.ModelMetadata(service_pb.ModelMetadataRequest(name="identity", version="9")))
    assert (code, details) == (Code.NOT_FOUND, "Request for unknown model: 'identity' version 9 is not found")


async def test_config(stub):
    response = await stub.ModelConfig(service_pb.ModelConfigRequest(name="identity"))
    assert (response.config.name, response.config.max_batch_size) == ("identity", 8)


async def test_statistics(stub, service):
    response = await stub.ModelStatistics(service_pb.ModelStatisticsRequest(name="identity", version="1"))
    assert service.calls == [("statistics", ("identity", "1"))]
    (model,) = response.model_stats
    assert (model.name, model.version, model.last_inference) == ("identity", "1", 1_700_000_000_000)
    assert (model.inference_count, model.execution_count) == (7, 3)
    stats = model.inference_stats
    assert [
        (field.count, field.ns)
        for field in (
            stats.success,
            stats.fail,
            stats.queue,
            stats.compute_input,
            stats.compute_infer,
            stats.compute_output,
            stats.cache_hit,
        )
    ] == [(1, 1000), (2, 2000), (3, 3000), (4, 4000), (5, 5000), (6, 6000), (0, 0)]
    (batch,) = model.batch_stats
    assert (batch.batch_size, batch.compute_input.ns, batch.compute_infer.ns, batch.compute_output.ns) == (
        4,
        10,
        20,
        30,
    )
    (usage,) = model.memory_usage
    assert (usage.type, usage.id, usage.byte_size) == ("CPU", 0, 2**40)
    assert await refused(stub.ModelStatistics(service_pb.ModelStatisticsRequest(name="nothing"))) == (
        Code.INVALID_ARGUMENT,
        "requested model 'nothing' is not available",
    )


async def test_repository_index(stub):
    response = await stub.RepositoryIndex(service_pb.RepositoryIndexRequest())
    assert [(m.name, m.version, m.state, m.reason) for m in response.models] == [
        ("identity", "1", "READY", ""),
        ("broken", "2", "UNAVAILABLE", "no such file"),
    ]
    response = await stub.RepositoryIndex(service_pb.RepositoryIndexRequest(ready=True))
    assert [m.name for m in response.models] == ["identity"]


async def test_load_with_config_and_files(stub, service):
    request = service_pb.RepositoryModelLoadRequest(model_name="identity")
    request.parameters["config"].string_param = '{"max_batch_size": 4}'
    request.parameters["file:1/model.onnx"].bytes_param = b"\x08\x07"
    await stub.RepositoryModelLoad(request)
    parameters = LoadParameters('{"max_batch_size": 4}', {"1/model.onnx": b"\x08\x07"})
    assert service.calls == [("load", ("identity", parameters))]


async def test_load_failures(stub):
    code, details = await refused(stub.RepositoryModelLoad(service_pb.RepositoryModelLoadRequest(model_name="broken")))
    assert (code, details) == (
        Code.INVALID_ARGUMENT,
        "load failed for model 'broken': version 1 is at UNAVAILABLE state: why;",
    )
    request = service_pb.RepositoryModelLoadRequest(model_name="identity")
    request.parameters["config"].bool_param = True
    assert (await refused(stub.RepositoryModelLoad(request)))[0] == Code.INVALID_ARGUMENT
    request = service_pb.RepositoryModelLoadRequest(model_name="identity")
    request.parameters["confg"].string_param = "{}"
    assert "unexpected load parameter 'confg'" in (await refused(stub.RepositoryModelLoad(request)))[1]


async def test_unload(stub, service):
    request = service_pb.RepositoryModelUnloadRequest(model_name="identity")
    await stub.RepositoryModelUnload(request)
    request.parameters["unload_dependents"].bool_param = True
    await stub.RepositoryModelUnload(request)
    assert service.calls == [("unload", ("identity", False)), ("unload", ("identity", True))]
    request.parameters["unload_dependents"].int64_param = 1
    assert (await refused(stub.RepositoryModelUnload(request)))[0] == Code.INVALID_ARGUMENT
    request = service_pb.RepositoryModelUnloadRequest(model_name="identity")
    request.parameters["other"].bool_param = True
    assert "unexpected unload parameter 'other'" in (await refused(stub.RepositoryModelUnload(request)))[1]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("RepositoryIndex", service_pb.RepositoryIndexRequest(repository_name="r")),
        ("RepositoryModelLoad", service_pb.RepositoryModelLoadRequest(repository_name="r", model_name="m")),
        ("RepositoryModelUnload", service_pb.RepositoryModelUnloadRequest(repository_name="r", model_name="m")),
    ],
)
async def test_repository_name_is_not_supported(stub, method, message):
    assert await refused(getattr(stub, method)(message)) == (
        Code.UNIMPLEMENTED,
        "'repository_name' specification is not supported",
    )


async def test_system_shared_memory(stub, service):
    await stub.SystemSharedMemoryRegister(
        service_pb.SystemSharedMemoryRegisterRequest(name="n", key="/k", offset=1, byte_size=2)
    )
    await stub.SystemSharedMemoryUnregister(service_pb.SystemSharedMemoryUnregisterRequest(name="n"))
    assert service.calls == [("register_region", ("n", "/k", 1, 2)), ("unregister_region", "n")]
    response = await stub.SystemSharedMemoryStatus(service_pb.SystemSharedMemoryStatusRequest())
    (status,) = response.regions.values()
    assert list(response.regions) == ["region"]
    assert (status.name, status.key, status.offset, status.byte_size) == ("region", "/key", 8, 2**33)
    taken = service_pb.SystemSharedMemoryRegisterRequest(name="taken")
    assert (await refused(stub.SystemSharedMemoryRegister(taken)))[0] == Code.ALREADY_EXISTS


@pytest.mark.parametrize("action", ["Status", "Register", "Unregister"])
async def test_cuda_shared_memory_is_not_supported(stub, action):
    method = f"CudaSharedMemory{action}"
    message = getattr(service_pb, f"{method}Request")()
    assert (await refused(getattr(stub, method)(message)))[0] == Code.UNIMPLEMENTED


async def test_trace_settings(stub, service):
    response = await stub.TraceSetting(service_pb.TraceSettingRequest(model_name="identity"))
    assert {name: list(value.value) for name, value in response.settings.items()} == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": ["1000"],
    }
    request = service_pb.TraceSettingRequest(model_name="identity")
    request.settings["trace_level"].value.extend(["TIMESTAMPS", "TENSORS"])
    request.settings["trace_rate"].SetInParent()
    response = await stub.TraceSetting(request)
    assert list(response.settings["trace_level"].value) == ["TIMESTAMPS", "TENSORS"]
    assert service.calls == [
        ("trace_settings", "identity"),
        (
            "update_trace_settings",
            ("identity", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": None}),
        ),
    ]


async def test_log_settings(stub, service):
    response = await stub.LogSettings(service_pb.LogSettingsRequest())
    assert response.settings["log_info"].bool_param is True
    assert response.settings["log_verbose_level"].uint32_param == 2
    assert response.settings["log_format"].string_param == "default"
    request = service_pb.LogSettingsRequest()
    request.settings["log_info"].bool_param = False
    request.settings["log_verbose_level"].uint32_param = 5
    request.settings["log_format"].string_param = "ISO8601"
    response = await stub.LogSettings(request)
    assert response.settings["log_verbose_level"].uint32_param == 5
    updates = {"log_info": False, "log_verbose_level": 5, "log_format": "ISO8601"}
    assert service.calls == [("update_log_settings", updates)]
    request = service_pb.LogSettingsRequest()
    request.settings["log_info"].SetInParent()
    assert (await refused(stub.LogSettings(request)))[0] == Code.INVALID_ARGUMENT


# --- grpc.health.v1


async def test_health_check(server, service):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "inference.GRPCInferenceService"):
            request = health_pb2.HealthCheckRequest(service=name)
            service.is_ready = True
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            service.is_ready = False
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        unknown = health_pb2.HealthCheckRequest(service="no.such")
        assert (await refused(health.Check(unknown)))[0] == Code.NOT_FOUND


async def test_health_watch_tells_changes_and_the_end(service):
    status = health_pb2.HealthCheckResponse
    async with serving(service) as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        # Iterated, not read(): that gives up on messages still to come once the status is there.
        told = aiter(watch)
        assert (await anext(told)).status == status.SERVING
        service.is_ready = False
        assert (await anext(told)).status == status.NOT_SERVING
        service.is_ready = True
        assert (await anext(told)).status == status.SERVING
        stopping = asyncio.create_task(server.stop(20))
        # On a busy machine grpc.aio's client may see the status before it has read the last message, and drop that.
        assert [response.status async for response in told] in ([status.NOT_SERVING], [])
        assert await watch.code() == Code.OK
        await stopping


async def test_health_watch_of_an_unknown_service_stays_on_the_line(server):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="no.such"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert not watch.done()
        watch.cancel()


# --- inference


@pytest.mark.parametrize("num_items", [16, 150_000])
async def test_infer_small_and_large(stub, service, num_items):
    data = np.random.default_rng(1).random((1, num_items), np.float32)
    response = await stub.ModelInfer(infer_request(data, id="42"))
    assert (response.model_name, response.model_version, response.id) == ("identity", "1", "42")
    assert list(response.raw_output_contents) == [data.tobytes()]
    (request,) = service.requests
    assert request.protocol == "grpc"
    assert request.received_ns > 0
    assert service.num_leases == 0


async def test_shared_memory_in_and_out(stub, service):
    data = np.arange(4, dtype=np.float32)
    service.regions.memory["r"] = bytearray(data.tobytes() + bytes(16))

    async def answer(request) -> InferResponse:
        response = await echo(request)
        (output,) = response.outputs
        service.regions.view(output.region)[:] = output.data.tobytes()
        return response

    service.answer = answer
    request = service_pb.ModelInferRequest(model_name="identity")
    tensors = [request.inputs.add(name="X", datatype="FP32", shape=(4,)), request.outputs.add(name="X")]
    for tensor, offset in zip(tensors, (0, 16), strict=True):
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_byte_size"].int64_param = 16
        tensor.parameters["shared_memory_offset"].int64_param = offset
    response = await stub.ModelInfer(request)
    assert list(response.raw_output_contents) == [b""]
    assert response.outputs[0].parameters["shared_memory_region"].string_param == "r"
    assert service.regions.memory["r"][16:] == data.tobytes()


@pytest.mark.parametrize("kind", list(ErrorKind))
async def test_errors_of_every_kind_reach_the_client_as_their_status(stub, service, kind):
    async def fail(_) -> Any:
        problem = HoneError("what went wrong")
        problem.kind = kind
        raise problem

    service.answer = fail
    assert await refused(stub.ModelInfer(infer_request())) == (STATUS_CODES[kind], "what went wrong")
    assert service.num_leases == 0


async def test_a_fault_of_the_server_is_logged_and_not_told(stub, service, caplog):
    async def fail(_) -> Any:
        raise KeyError("/secret/path")

    service.answer = fail
    with caplog.at_level(logging.ERROR):
        assert await refused(stub.ModelInfer(infer_request())) == (Code.INTERNAL, "internal error")
    (record,) = [record for record in caplog.records if record.name.startswith("hone.")]
    assert record.exc_info is not None
    assert "/secret/path" in str(record.exc_info[1])


async def test_a_fault_of_a_control_call_is_logged_and_not_told(stub, service, caplog):
    def fail(_: bool = False) -> Any:
        raise ZeroDivisionError("secret")

    service.index = fail
    with caplog.at_level(logging.ERROR):
        call = stub.RepositoryIndex(service_pb.RepositoryIndexRequest())
        assert await refused(call) == (Code.INTERNAL, "internal error")
    assert any(record.exc_info for record in caplog.records if record.name.startswith("hone."))


@pytest.mark.parametrize("method", [method for method in METHODS if method != "ModelStreamInfer"])
async def test_malformed_messages_are_the_clients_fault(server, method, caplog):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        code, details = await refused(call(b"\xff\xff\xff"))
    assert code == Code.INVALID_ARGUMENT
    assert details == f"malformed {method}Request message"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_unknown_model_and_version(stub):
    assert await refused(stub.ModelInfer(infer_request(model_name="X"))) == (
        Code.NOT_FOUND,
        "Request for unknown model: 'X' is not found",
    )
    code, _ = await refused(stub.ModelInfer(infer_request(model_version="99")))
    assert code == Code.NOT_FOUND


async def test_details_too_long_for_a_trailer_are_cut_not_replaced(stub, service):
    async def fail(_) -> Any:
        raise HoneError("ß" * 100_000)

    service.answer = fail
    code, details = await refused(stub.ModelInfer(infer_request()))
    assert code == Code.INTERNAL
    assert details.endswith("ß...")
    assert len(details.encode()) <= MAX_DETAILS_BYTES


async def test_cancelling_a_call_cancels_the_request(stub, service):
    async def forever(_) -> Any:
        await asyncio.Event().wait()

    service.answer = forever
    call = stub.ModelInfer(infer_request())
    await service.until(lambda: len(service.requests) == 1)
    call.cancel()
    await service.until(lambda: service.num_cancelled == 1)
    assert service.num_leases == 0


async def test_a_call_out_of_time_cancels_the_request(stub, service):
    async def forever(_) -> Any:
        await asyncio.Event().wait()

    service.answer = forever
    code, _ = await refused(stub.ModelInfer(infer_request(), timeout=0.2))
    assert code == Code.DEADLINE_EXCEEDED
    await service.until(lambda: service.num_cancelled == len(service.requests))


# --- limits


async def test_messages_beyond_the_limit_are_refused_both_ways(service):
    async with serving(service, grpc_max_message_size=100_000) as server, connected(server) as stub:
        fits = np.zeros((1, 20_000), np.float32)
        await stub.ModelInfer(infer_request(fits))
        code, _ = await refused(stub.ModelInfer(infer_request(np.zeros((1, 30_000), np.float32))))
        assert code == Code.RESOURCE_EXHAUSTED

        async def large(_) -> InferResponse:
            data = np.zeros(30_000, np.float32)
            return InferResponse("identity", "1", "", [InferOutput("O", "FP32", data.shape, data)])

        service.answer = large
        code, details = await refused(stub.ModelInfer(infer_request()))
        assert code == Code.INVALID_ARGUMENT
        assert "--grpc-max-message-size" in details
        service.answer = echo
        await stub.ModelInfer(infer_request(fits))


async def test_a_compressed_message_counts_as_large_as_it_inflates(service):
    async with serving(service, grpc_max_message_size=100_000) as server, connected(server) as stub:
        bomb = infer_request(np.zeros((1, 2_000_000), np.float32))
        code, _ = await refused(stub.ModelInfer(bomb, compression=grpc.Compression.Gzip))
        assert code == Code.RESOURCE_EXHAUSTED
        assert not service.requests


async def test_messages_beyond_four_mebibytes_pass_by_default(stub):
    data = np.ones((1, 6 * 2**20), np.uint8).view(np.float32)
    response = await stub.ModelInfer(infer_request(data))
    assert len(response.raw_output_contents[0]) == data.nbytes


# --- restricted groups, headers


async def test_restricted_groups_want_their_key(service):
    restricted = ("inference,model-repository:infer-key=secret", "health:health-key=well")
    async with serving(service, grpc_restricted_protocol=restricted) as server, connected(server) as stub:
        expected = (Code.UNAVAILABLE, "This protocol is restricted, expecting header 'triton-grpc-protocol-infer-key'")
        assert await refused(stub.ModelInfer(infer_request())) == expected
        assert await refused(stub.RepositoryIndex(service_pb.RepositoryIndexRequest())) == expected
        for wrong in ("", "Secret", "secret ", "secretsecret"):
            metadata = (("triton-grpc-protocol-infer-key", wrong),)
            assert await refused(stub.ModelInfer(infer_request(), metadata=metadata)) == expected
        assert await refused(stub.ModelInfer(infer_request(), metadata=(("infer-key", "secret"),))) == expected
        key = (("triton-grpc-protocol-infer-key", "secret"),)
        await stub.ModelInfer(infer_request(), metadata=key)
        await stub.RepositoryIndex(service_pb.RepositoryIndexRequest(), metadata=key)

        stream = stub.ModelStreamInfer(iter([infer_request()]))
        assert await refused(stream.read()) == expected
        stream = stub.ModelStreamInfer(iter([infer_request()]), metadata=key)
        assert not (await stream.read()).error_message

        await stub.ServerMetadata(service_pb.ServerMetadataRequest())
        assert (await refused(stub.ServerLive(service_pb.ServerLiveRequest())))[0] == Code.UNAVAILABLE
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await refused(health.Check(health_pb2.HealthCheckRequest())))[0] == Code.UNAVAILABLE
            assert (await refused(health.Watch(health_pb2.HealthCheckRequest()).read()))[0] == Code.UNAVAILABLE
            await health.Check(health_pb2.HealthCheckRequest(), metadata=(("triton-grpc-protocol-health-key", "well"),))


async def test_headers_are_forwarded_as_parameters(service):
    metadata = (
        ("x-user", "ann"),
        ("other", "no"),
        ("not-x-user", "no"),
        ("x-bin", b"\0"),
        ("traceparent", "00-aa-bb-01"),
    )
    async with serving(service, grpc_header_forward_pattern="X-.*") as server, connected(server) as stub:
        await stub.ModelInfer(infer_request(), metadata=metadata)
        (request,) = service.requests
        assert request.parameters == {"x-user": "ann"}
        assert request.traceparent is None
        stream = stub.ModelStreamInfer(iter([infer_request()]), metadata=metadata)
        await stream.read()
        assert service.requests[1].parameters == {"x-user": "ann"}


async def test_the_parent_of_a_trace_is_read_when_tracing(service):
    metadata = (("traceparent", "00-aa-bb-01"),)
    async with serving(service, trace_otlp_endpoint="http://127.0.0.1:9/") as server, connected(server) as stub:
        await stub.ModelInfer(infer_request(), metadata=metadata)
        await stub.ModelInfer(infer_request())
        assert [request.traceparent for request in service.requests] == ["00-aa-bb-01", None]
        assert service.requests[0].parameters == {}


# --- compression


@pytest.mark.parametrize("level", ["none", "low", "medium", "high"])
async def test_responses_are_compressed_when_asked(service, level):
    """Seen on the wire: a megabyte of zeros passes a relay as a few kilobytes, or whole."""
    data = np.zeros((1, 2**18), np.float32)
    async with serving(service, grpc_infer_response_compression_level=level) as server:
        async with (
            counting_relay(server.port) as (port, received),
            grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", options=(("grpc.max_receive_message_length", -1),)
            ) as channel,
        ):
            call = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                response_deserializer=service_pb.ModelInferResponse.FromString,
            )
            response = await call(infer_request(data).SerializeToString())
        assert response.raw_output_contents[0] == data.tobytes()
        assert (sum(received) < data.nbytes // 10) == (level != "none")


class counting_relay:
    """A TCP relay to `port` that notes the sizes of what the server sends."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.received: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> tuple[int, list[int]]:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1], self.received

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._tasks += [
            asyncio.create_task(self._pump(reader, up_writer, [])),
            asyncio.create_task(self._pump(up_reader, writer, self.received)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sizes: list[int]) -> None:
        try:
            while data := await reader.read(2**16):
                sizes.append(len(data))
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


# --- life


async def test_a_second_server_on_the_port_is_told_address_and_port(service, server):
    second = GrpcServer(service, Settings(grpc_port=server.port))
    with pytest.raises(OSError, match=rf"gRPC cannot listen on 127\.0\.0\.1:{server.port}: Address already in use"):
        await second.start()


async def test_an_address_of_another_machine_is_refused(service):
    second = GrpcServer(service, Settings(grpc_address="192.0.2.1", grpc_port=0))
    with pytest.raises(OSError, match=r"gRPC cannot listen on 192\.0\.2\.1:0"):
        await second.start()


async def test_stop_lets_calls_in_flight_finish(service):
    release = asyncio.Event()

    async def wait(request) -> InferResponse:
        await release.wait()
        return await echo(request)

    service.answer = wait
    async with serving(service) as server, connected(server) as stub:
        call = asyncio.ensure_future(stub.ModelInfer(infer_request()))
        await service.until(lambda: len(service.requests) == 1)
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0)
        assert not stopping.done()
        release.set()
        assert (await call).model_name == "identity"
        await stopping
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port), 5):
            pass


async def test_stop_cancels_what_outlasts_its_grace(service):
    async def forever(_) -> Any:
        await asyncio.Event().wait()

    service.answer = forever
    async with serving(service) as server, connected(server) as stub:
        call = asyncio.ensure_future(stub.ModelInfer(infer_request()))
        await service.until(lambda: len(service.requests) == 1)
        await server.stop(0.1)
        code, _ = await refused(call)
        assert code in (Code.UNAVAILABLE, Code.CANCELLED)
        await service.until(lambda: service.num_cancelled == 1)


async def test_stop_before_start_and_twice(service):
    server = GrpcServer(service, Settings(grpc_port=0))
    await server.stop(0)
    await server.start()
    await server.stop(0)
    await server.stop(0)


async def test_health_watch_writes_every_change_and_not_serving_before_it_ends(service):
    """What the handler itself writes: the test over a channel above cannot tell a message that the client dropped."""
    status = health_pb2.HealthCheckResponse
    written: list[int] = []
    wrote = asyncio.Event()

    class Context:
        async def write(self, message: bytes) -> None:
            written.append(status.FromString(message).status)
            wrote.set()

    async def next_written() -> int:
        await asyncio.wait_for(wrote.wait(), 30)
        wrote.clear()
        return written[-1]

    handler = HealthHandler(service, watch_period_seconds=0.01)
    watching = asyncio.create_task(handler.watch(b"", Context()))
    assert await next_written() == status.SERVING
    service.is_ready = False
    assert await next_written() == status.NOT_SERVING
    service.is_ready = True
    assert await next_written() == status.SERVING
    handler.close()
    await asyncio.wait_for(watching, 30)
    assert written == [status.SERVING, status.NOT_SERVING, status.SERVING, status.NOT_SERVING]
