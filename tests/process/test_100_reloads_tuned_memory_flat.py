"""Reloads of a model that runs tuned: each swaps engines twice, and leaves no memory, mapping, thread or file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests import models
from tests.process.publishing import load
from tests.process.real_artifacts import CONFIG, Place, assert_answers, mapped, softmax, tuning
from tests.process.support import EXPLICIT
from tests.running import RunningServer, run_server, wait_until

#: Reloads before the first look: allocators and caches have their size by then.
NUM_WARM = 20
NUM_RELOADS = 100
ALLOWED_BYTES = 6 << 20  # finds 60 KiB a reload: a module's mappings, an engine, a virtual machine


def counts(server: RunningServer) -> np.ndarray:
    """Threads, descriptors, mappings, lines of metrics."""
    lines = len(server.metrics().splitlines())
    return np.array([server.num_threads(), server.num_descriptors(), server.num_mappings(), lines])


def reload(server: RunningServer, place: Place, digests: list[str], number: int) -> None:
    """To the other of two files, whose artifact is another one; it is promoted and answers."""
    models.write_model(place.repository, "m", softmax(f"m{number % 2}"), config=CONFIG)
    load(server, "m")

    def promoted() -> bool:
        return any(
            (bucket["artifact"], bucket["engine"]) == (digests[number % 2], "tvm")
            for bucket in tuning(server, "m")["buckets"]
        )

    wait_until(promoted, "the new file's artifact is promoted")
    assert_answers(server, "m")


def test_level(place: Place, compiled_softmax: Path) -> None:
    digests = [place.add(name, compiled_softmax) for name in ("m0", "m1")]
    with run_server(place.repository, *EXPLICIT, "--tuning=cache", *place.flags) as server:
        for number in range(NUM_WARM):
            reload(server, place, digests, number)
        before, memory_before = counts(server), server.memory_bytes()
        assert len(mapped(server)) == 2, "one module and its kernel"
        for number in range(NUM_RELOADS):
            reload(server, place, digests, number)
        # A generation that has just been replaced may be on its way out.
        wait_until(lambda: len(mapped(server)) == 2, "only what serves is mapped")
        wait_until(lambda: np.all(counts(server) - before < NUM_RELOADS / 8), f"counts as before: {before}")
        growth = server.memory_bytes() - memory_before
        print(f"{growth / 2**20:+.1f} MiB in {NUM_RELOADS} reloads, after {memory_before / 2**20:.0f} MiB")
        assert growth < ALLOWED_BYTES, f"{growth / NUM_RELOADS / 1024:.0f} KiB more with each reload"
        assert server.post("/v2/repository/models/m/unload")[0] == 200
        wait_until(lambda: mapped(server) == [], "nothing is left of it")
        assert server.stop() == 0
