"""tritonclient.grpc.aio: requests, cancellation and streams."""

import asyncio
import sys

import numpy as np
import tritonclient.grpc as tc
from tritonclient.grpc import aio

from tests.protocol.clients.blocking import Blocking
from tests.protocol.clients.steps import COMMON, ROWS, Kit, run


async def connect(port):
    return aio.InferenceServerClient(f"127.0.0.1:{port}")


def many_at_once(kit):
    async def all_of_them():
        client = kit.client.wrapped
        calls = [client.infer("identity_fp32", [kit.input("IN", ROWS * i)], request_id=str(i)) for i in range(60)]
        return await asyncio.gather(*calls)

    for i, result in enumerate(kit.client.wait(all_of_them())):
        assert result.get_response().id == str(i)
        np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS * i)


def client_timeout(kit):
    given = [kit.input("IN", np.array([[1_000_000]], np.float32))]
    assert "DEADLINE_EXCEEDED" in kit.refused(kit.client.infer, "slow", given, client_timeout=0.2).status()


def stream(kit):
    async def requests():
        for i in range(20):
            yield {"model_name": "identity_fp32", "inputs": [kit.input("IN", ROWS * i)], "request_id": str(i)}
        yield {"model_name": "nothing", "inputs": [kit.input("IN", ROWS)]}
        yield {"model_name": "identity_fp32", "inputs": [kit.input("IN", ROWS)], "request_id": "last"}

    async def collect():
        return [answer async for answer in kit.client.wrapped.stream_infer(requests())]

    answers = kit.client.wait(collect())
    assert len(answers) == 22
    for i, (result, error) in enumerate(answers[:20]):
        assert error is None and result.get_response().id == str(i)
        np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS * i)
    assert "unknown model: 'nothing'" in answers[20][1].message()
    assert answers[21][0].get_response().id == "last"


def stream_is_cancelled(kit):
    async def cancelled():
        async def requests():
            yield {"model_name": "slow", "inputs": [kit.input("IN", np.array([[1_000_000]], np.float32))]}
            await asyncio.Event().wait()

        answers = kit.client.wrapped.stream_infer(requests())
        asyncio.get_running_loop().call_later(0.2, answers.cancel)
        try:
            async for _ in answers:
                return False
        except asyncio.CancelledError:
            return True

    assert kit.client.wait(cancelled())
    assert kit.client.is_server_ready()


if __name__ == "__main__":
    with asyncio.Runner() as runner:
        client = Blocking(runner.run(connect(int(sys.argv[1]))), runner)
        kit = Kit(tc, client, http=False, connect=connect)
        code = run(kit, (*COMMON, many_at_once, client_timeout, stream, stream_is_cancelled))
        client.close()
    sys.exit(code)
