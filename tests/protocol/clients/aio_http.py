"""tritonclient.http.aio."""

import asyncio
import sys

import numpy as np
import tritonclient.http as tc
from tritonclient.http import aio

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
        assert result.get_response()["id"] == str(i)
        np.testing.assert_array_equal(result.as_numpy("OUT"), ROWS * i)


def cancellation(kit):
    async def cancelled():
        given = [kit.input("IN", np.array([[1_000_000]], np.float32))]
        try:
            await asyncio.wait_for(kit.client.wrapped.infer("slow", given), 0.2)
        except TimeoutError:
            return True
        return False

    assert kit.client.wait(cancelled())
    assert kit.client.is_server_ready()


if __name__ == "__main__":
    with asyncio.Runner() as runner:
        client = Blocking(runner.run(connect(int(sys.argv[1]))), runner)
        kit = Kit(tc, client, http=True, connect=connect)
        code = run(kit, (*COMMON, many_at_once, cancellation))
        client.close()
    sys.exit(code)
