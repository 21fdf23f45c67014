"""System shared memory is off unless the server allows it."""

import pytest

from tests.protocol.wire import Input, Output, raw_input, refused

SAYS = "--allow-client-shm=true"
PLACE = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


@pytest.mark.row(66)
@pytest.mark.parametrize("name", ["", "r"])
def test_control(client, name):
    refused(client.regions(name), 501, "UNIMPLEMENTED", SAYS)
    refused(client.unregister(name), 501, "UNIMPLEMENTED", SAYS)


@pytest.mark.row(66)
@pytest.mark.parametrize("key", ["/hone", "/../etc/passwd", ""])
def test_register(client, key):
    refused(client.register("r", key, 8), 501, "UNIMPLEMENTED", SAYS)


@pytest.mark.row(66)
def test_inference(client):
    answer = client.infer("identity_fp32", [Input("IN", "FP32", (1, 2), parameters=PLACE)])
    refused(answer, 501, "UNIMPLEMENTED", SAYS)
    answer = client.infer("identity_fp32", [raw_input("IN", "FP32", [[1, 2]])], [Output("OUT", parameters=PLACE)])
    refused(answer, 501, "UNIMPLEMENTED", SAYS)


@pytest.mark.row(66)
@pytest.mark.parametrize("call", ["status", "register", "unregister"])
def test_cuda(client, call):
    refused(client.cuda(call, "r"), 501, "UNIMPLEMENTED", "CUDA shared memory is not supported")
