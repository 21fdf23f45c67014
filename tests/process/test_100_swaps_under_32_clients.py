"""A hundred swaps of a real server under 32 clients: nobody fails, and each answer is one generation's, bit by bit."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.process.real_artifacts import ROW, Place, engine, mapped, with_kernel
from tests.running import RunningServer, run_server, wait_until

NUM_CLIENTS, NUM_SWAPS = 32, 100
#: Within every tolerance, so that it serves; and seen in the answers, so that they tell who gave them.
MARK = "out[0] *= 1.0002f;"


def answer(server: RunningServer, **parameters: str) -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": ROW[0]}
    status, told = server.post("/v2/models/m/infer", {"inputs": [tensor], "parameters": parameters})
    assert status == 200, told
    return np.array(told["outputs"][0]["data"], np.float32).tobytes()


def act(server: RunningServer, action: str) -> None:
    status, told = server.post("/v2/models/m/tuning", {"action": action})
    assert status == 200, told


@pytest.mark.timeout(300)
def test_none_fails_and_none_is_mixed(place: Place, compiled_softmax: Path, tmp_path: Path) -> None:
    place.add("m", with_kernel(compiled_softmax, tmp_path / "marked", MARK))
    with run_server(place.repository, "--tuning=cache", *place.flags) as server:
        wait_until(lambda: engine(server, "m") == "tvm", "promoted from the cache")
        own = {name: answer(server, hone_engine=name) for name in ("baseline", "tuned")}
        assert own["baseline"] != own["tuned"]
        seen: dict[bytes, int] = {}
        done, lock = threading.Event(), threading.Lock()
        slowest = [0.0] * NUM_CLIENTS

        def client(number: int) -> int:
            count = 0
            while not done.is_set():
                began = time.monotonic()
                got = answer(server)
                slowest[number] = max(slowest[number], time.monotonic() - began)
                count += 1
                with lock:
                    seen[got] = seen.get(got, 0) + 1
            return count

        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            running = [clients.submit(client, number) for number in range(NUM_CLIENTS)]
            try:
                for number in range(NUM_SWAPS):
                    act(server, "start" if number % 2 else "roll_back")
            finally:
                done.set()
            counts = [one.result() for one in running]  # raises what a client saw
        print(f"{sum(counts)} requests, the slowest {max(slowest) * 1e3:.0f} ms")
        assert all(counts), "every client had answers"
        assert set(seen) == set(own.values()), "both generations served, and nothing else did"
        assert engine(server, "m") == "tvm"
        promotions = server.metric("hone_tuning_promotions_total")
        assert promotions == 1 + NUM_SWAPS / 2
        wait_until(lambda: len(mapped(server)) == 2, "one module and its kernel are mapped")
        act(server, "roll_back")
        wait_until(lambda: mapped(server) == [], "and none after the last swap back")
        assert server.stop() == 0
