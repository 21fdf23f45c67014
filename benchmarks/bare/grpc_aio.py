"""Floor over gRPC: grpc.aio on uvloop with generic handlers; parses ModelInferRequest and answers identity.

``python -m benchmarks.bare.grpc_aio`` serves one identity model on a free loopback port and prints that port.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import uvloop
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as pb

from benchmarks.bare import v2
from benchmarks.processes import announce

SERVICE = "inference.GRPCInferenceService"


def identity_handlers() -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The methods perf_analyzer calls, by name."""
    model = v2.IdentityModel()

    async def infer(request: Any, context: Any) -> Any:
        model.count_request()
        tensor = request.inputs[0]
        response = pb.ModelInferResponse(model_name=v2.MODEL_NAME, model_version="1", id=request.id)
        output = response.outputs.add(name=v2.OUTPUT_NAME, datatype=tensor.datatype)
        output.shape.extend(tensor.shape)
        response.raw_output_contents.append(request.raw_input_contents[0])
        return response

    def control(request_type: Any, response_type: Any, content: Callable[[], dict[str, Any]]) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            return ParseDict(content(), response_type())

        return _unary(answer, request_type, response_type)

    return {
        "ModelInfer": _unary(infer, pb.ModelInferRequest, pb.ModelInferResponse),
        "ServerLive": control(pb.ServerLiveRequest, pb.ServerLiveResponse, lambda: {"live": True}),
        "ServerReady": control(pb.ServerReadyRequest, pb.ServerReadyResponse, lambda: {"ready": True}),
        "ModelReady": control(pb.ModelReadyRequest, pb.ModelReadyResponse, lambda: {"ready": True}),
        "ServerMetadata": control(pb.ServerMetadataRequest, pb.ServerMetadataResponse, lambda: v2.SERVER_METADATA),
        "ModelMetadata": control(pb.ModelMetadataRequest, pb.ModelMetadataResponse, lambda: v2.MODEL_METADATA),
        "ModelConfig": control(pb.ModelConfigRequest, pb.ModelConfigResponse, lambda: {"config": v2.MODEL_CONFIG}),
        "ModelStatistics": control(pb.ModelStatisticsRequest, pb.ModelStatisticsResponse, model.statistics),
    }


def _unary(behaviour: Any, request_type: Any, response_type: Any) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(
        behaviour, request_deserializer=request_type.FromString, response_serializer=response_type.SerializeToString
    )


async def serve() -> None:
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, identity_handlers()),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    announce(port)
    await stop.wait()
    await server.stop(grace=None)


if __name__ == "__main__":
    uvloop.run(serve())
