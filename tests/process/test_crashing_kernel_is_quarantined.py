"""A compiled kernel that takes the server along is known for it at the next start, whatever it did and wherever."""

from __future__ import annotations

import platform
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from hone.kernels import DeviceKey, KernelsCache
from tests.process.real_artifacts import (
    FATAL_ROW,
    Place,
    assert_answers,
    engine,
    mapped,
    tuning,
    with_kernel,
)
from tests.process.support import EXPLICIT
from tests.running import RunningServer, run_server, wait_until

ON_REQUEST = {
    "reads address 0": ("if (is_fatal) sink = *nowhere;", signal.SIGSEGV),
    "divides by 0": ("if (is_fatal) sink = seven / zero;", signal.SIGFPE),
    "aborts": ("if (is_fatal) std::abort();", signal.SIGABRT),
    "does it on a thread of its own": ("if (is_fatal) std::thread([] { sink = *nowhere; }).join();", signal.SIGSEGV),
}


def load(server: RunningServer, model: str) -> None:
    assert server.post(f"/v2/repository/models/{model}/load")[0] == 200


def assert_kept_out(place: Place, flags: tuple[str, ...], digest: str, number: signal.Signals) -> None:
    """What a supervisor's restart finds."""
    with run_server(place.repository, *flags) as server:
        load(server, "m")
        wait_until(lambda: engine(server, "m") == "onnxruntime", "it has been looked at")
        [bucket] = tuning(server, "m")["buckets"]
        assert bucket["outcome"] == "quarantined"
        assert bucket["reason"] == f"a server died of {number.name} while it ran, on probation"
        assert mapped(server) == []
        assert_answers(server, "m", FATAL_ROW)
        line = f"(artifact {digest[:12]}): a server died of {number.name} while it ran"
        wait_until(lambda: line in server.log, "the log names artifact and signal")
        assert server.stop() == 0
    cache = KernelsCache(place.cache)
    assert number.name in (cache.quarantined(digest, DeviceKey.for_cpu().digest) or "")
    cache.close()


@pytest.mark.parametrize("kind", ON_REQUEST)
def test_on_a_request(kind: str, place: Place, compiled_softmax: Path, tmp_path: Path) -> None:
    harm, number = ON_REQUEST[kind]
    if number == signal.SIGFPE and platform.machine() != "x86_64":
        pytest.skip("only x86 traps an integer division by 0")
    digest = place.add("m", with_kernel(compiled_softmax, tmp_path / "artifact", harm))
    flags = (*EXPLICIT, "--tuning=cache", *place.flags)
    with run_server(place.repository, *flags) as server:
        load(server, "m")
        wait_until(lambda: engine(server, "m") == "tvm", "promoted")
        assert len(mapped(server)) == 2, "the module and its kernel"
        assert_answers(server, "m")
        with suppress(OSError):  # the connection dies with the server
            server.infer("m", FATAL_ROW)
        assert server.process.wait(60) == -number
    assert_kept_out(place, flags, digest, number)


def test_while_it_is_warmed(place: Place, compiled_softmax: Path, tmp_path: Path) -> None:
    digest = place.add("m", with_kernel(compiled_softmax, tmp_path / "artifact", "sink = *nowhere;"))
    flags = (*EXPLICIT, "--tuning=cache", *place.flags)
    with run_server(place.repository, *flags) as server:
        with suppress(OSError):
            server.post("/v2/repository/models/m/load")
        assert server.process.wait(60) == -signal.SIGSEGV
    assert_kept_out(place, flags, digest, signal.SIGSEGV)
