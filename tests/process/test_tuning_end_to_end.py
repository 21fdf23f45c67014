"""A model is dropped, served at once, tuned in the background, swapped in, and remembered over a restart."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests import models
from tests.running import RunningServer, run_server, wait_until

DIMS = (1, 3, 64, 96)
IMAGE = np.random.default_rng(7).standard_normal(DIMS).astype(np.float32)


def chain() -> bytes:
    """Sixteen element-wise operators, which one fused pass does in a fraction of ONNX Runtime's time: a gain that no
    neighbour on the machine can hide."""
    nodes, value = [], "IN"
    for number in range(16):
        out = "OUT" if number == 15 else f"v{number}"
        operator = ("Mul", "Add", "Relu", "Sub", "Abs")[number % 5]
        nodes.append(helper.make_node(operator, [value] if operator in ("Relu", "Abs") else [value, "c"], [out]))
        value = out
    constant = helper.make_tensor("c", TensorProto.FLOAT, [], [1.25])
    return models.model(nodes, {"IN": ("FP32", DIMS)}, {"OUT": ("FP32", DIMS)}, [constant])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one model, and a cache that the tests of this module share."""
    root = tmp_path_factory.mktemp("tuning")
    models.write_model(root / "models", "chain", chain())
    return root


def answers(server: RunningServer) -> np.ndarray:
    tensor = {"name": "IN", "datatype": "FP32", "shape": list(DIMS), "data": IMAGE.reshape(-1).tolist()}
    status, answer = server.post("/v2/models/chain/infer", {"inputs": [tensor]})
    assert status == 200, answer
    return np.array(answer["outputs"][0]["data"], np.float32)


def tuning(server: RunningServer) -> dict[str, Any]:
    status, told = server.get("/v2/models/chain/tuning")
    assert status == 200, told
    return told


def engines(server: RunningServer) -> set[str]:
    return {bucket["engine"] for bucket in tuning(server)["buckets"]}


@pytest.mark.timeout(300)
def test_tuned_swapped_in_and_remembered(place: Path) -> None:
    flags = ("--model-control-mode=poll", "--tuning=on", f"--kernels-cache={place / 'cache'}")
    with run_server(place / "models", *flags) as server:
        baseline = answers(server)
        settled = wait_until(
            lambda: (told := tuning(server))["state"] not in ("queued", "tuning") and told, "tuning ends", seconds=240
        )
        promoted = [bucket for bucket in settled["buckets"] if bucket["engine"] == "tvm"]
        assert promoted, settled
        for bucket in promoted:
            assert bucket["speedup"] >= 1.03
            assert bucket["max_error"] < 1e-4
        for bucket in settled["buckets"]:
            assert bucket["outcome"] in ("passed", "refused"), settled
        np.testing.assert_allclose(answers(server), baseline, atol=1e-5)
        metrics = server.metrics()
        labels = 'device="cpu",engine="tvm",model="chain",signature="[^"]*",version="1"'
        assert re.search(rf"hone_engine\{{{labels}\}} 1", metrics)
        assert "hone_tuning_promotions_total 1" in metrics
        # What the child did with the cache is counted, too: it alone publishes artifacts and asks for decisions.
        published = server.metric("hone_cache_publishes_total", kind="artifacts", outcome="published")
        assert published is not None and published >= len(promoted)
        for engine in ("onnxruntime", "tvm"):
            for what in ("request", "execution"):
                count = server.metric(f"hone_{what}_duration_histogram_us_count", engine=engine, model="chain")
                assert count is not None, (engine, what)
                assert count >= 1
        maps = Path(f"/proc/{server.process.pid}/maps").read_text("utf-8")
        assert "libtvm_compiler" not in maps, "the compiler belongs into the child"
        assert server.stop() == 0

    for mode in ("on", "cache"):
        flags = (f"--tuning={mode}", f"--kernels-cache={place / 'cache'}")
        with run_server(place / "models", *flags) as server:
            began = time.monotonic()
            wait_until(lambda: "tvm" in engines(server), "promoted from the cache", seconds=30)
            print(f"promoted {time.monotonic() - began:.2f} s after ready, from the cache ({mode})")
            np.testing.assert_allclose(answers(server), baseline, atol=1e-5)
            metrics = server.metrics()
            assert "hone_tuning_child_seconds_total 0" in metrics, "nothing is compiled or measured a second time"
            assert "hone_tuning_promotions_total 1" in metrics
            assert server.stop() == 0


@pytest.mark.timeout(120)
def test_actions_have_taken_effect_when_they_are_answered_and_last_over_a_restart(place: Path) -> None:
    flags = ("--tuning=cache", f"--kernels-cache={place / 'cache'}")
    with run_server(place / "models", *flags) as server:
        wait_until(lambda: "tvm" in engines(server), "promoted from the cache", seconds=60)
        maps = Path(f"/proc/{server.process.pid}/maps")
        assert "/artifacts/" in maps.read_text("utf-8")
        status, told = server.post("/v2/models/chain/tuning", {"action": "pin_baseline"})
        assert (status, told["state"], told["reason"]) == (200, "baseline", "pinned to the baseline")
        assert {bucket["engine"] for bucket in told["buckets"]} == {"onnxruntime"}
        wait_until(lambda: "/artifacts/" not in maps.read_text("utf-8"), "no file of the artifacts is mapped any more")
        assert server.post("/v2/models/chain/tuning", {"action": "explode"})[0] == 400
        assert server.stop() == 0
    with run_server(place / "models", *flags) as server:
        wait_until(lambda: tuning(server)["state"] == "baseline", "the pin holds")
        assert tuning(server)["reason"] == "pinned to the baseline"
        status, told = server.post("/v2/models/chain/tuning", {"action": "start"})
        assert status == 200
        assert "tvm" in {bucket["engine"] for bucket in told["buckets"]}, told


def test_an_unsafe_cache_is_refused_by_name(place: Path, tmp_path: Path) -> None:
    from hone.kernels import SCHEMA

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / f"v{SCHEMA}").symlink_to(tmp_path / "elsewhere")
    flags = ("--tuning=on", f"--kernels-cache={tmp_path / 'cache'}")
    with pytest.raises(AssertionError, match=f"v{SCHEMA}"), run_server(place / "models", *flags):
        raise RuntimeError("the server started on a cache that anybody may have filled")


def test_off_is_told(place: Path) -> None:
    with run_server(place / "models", "--tuning=off") as server:
        assert tuning(server)["state"] == "off"
        status, answer = server.post("/v2/models/chain/tuning", {"action": "start"})
        assert (status, "--tuning=on" in answer["error"]) == (503, True)
