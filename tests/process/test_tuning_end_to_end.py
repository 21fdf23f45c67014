"""A model is dropped, served at once, tuned in the background, swapped in, and remembered over a restart."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.running import RunningServer, run_server, wait_until

ROOT = Path(__file__).parents[2]
IMAGES = np.random.default_rng(7).random((2, 1, 8, 8), np.float32)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with `digits` (batches of two at most) and a cache that the tests of this module share."""
    root = tmp_path_factory.mktemp("tuning")
    shutil.copytree(ROOT / "model_repo" / "digits", root / "models" / "digits")
    config = root / "models" / "digits" / "config.pbtxt"
    config.write_text(re.sub(r"max_batch_size: \d+", "max_batch_size: 2", config.read_text("utf-8")), "utf-8")
    return root


def answers(server: RunningServer, images: np.ndarray) -> np.ndarray:
    tensor = {"name": "image", "datatype": "FP32", "shape": list(images.shape), "data": images.reshape(-1).tolist()}
    status, answer = server.post("/v2/models/digits/infer", {"inputs": [tensor]})
    assert status == 200, answer
    return np.array(answer["outputs"][0]["data"], np.float32)


def tuning(server: RunningServer) -> dict[str, Any]:
    status, told = server.get("/v2/models/digits/tuning")
    assert status == 200, told
    return told


def engines(server: RunningServer) -> set[str]:
    return {bucket["engine"] for bucket in tuning(server)["buckets"]}


@pytest.mark.timeout(300)
def test_tuned_swapped_in_and_remembered(place: Path) -> None:
    flags = ("--model-control-mode=poll", "--tuning=on", f"--kernels-cache={place / 'cache'}")
    with run_server(place / "models", *flags) as server:
        baseline = answers(server, IMAGES)
        settled = wait_until(
            lambda: (told := tuning(server))["state"] not in ("queued", "tuning") and told, "tuning ends", seconds=240
        )
        # A net of microseconds on a shared machine: at least one bucket is faster, by the numbers that are told.
        promoted = [bucket for bucket in settled["buckets"] if bucket["engine"] == "tvm"]
        assert promoted, settled
        for bucket in promoted:
            assert bucket["speedup"] >= 1.03
            assert bucket["max_error"] < 1e-4
        for bucket in settled["buckets"]:
            assert bucket["outcome"] in ("passed", "refused"), settled
        np.testing.assert_allclose(answers(server, IMAGES), baseline, atol=1e-5)
        np.testing.assert_allclose(answers(server, IMAGES[:1]), baseline[:10], atol=1e-5)
        metrics = server.metrics()
        assert re.search(r'hone_engine\{engine="tvm",model="digits",signature="[^"]*",version="1"\} 1', metrics)
        assert re.search(r"hone_tuning_candidates_built_total [1-9]", metrics)
        maps = Path(f"/proc/{server.process.pid}/maps").read_text("utf-8")
        assert "libtvm_compiler" not in maps, "the compiler belongs into the child"
        assert server.stop() == 0

    for mode in ("on", "cache"):
        flags = (f"--tuning={mode}", f"--kernels-cache={place / 'cache'}")
        with run_server(place / "models", *flags) as server:
            began = time.monotonic()
            wait_until(lambda: "tvm" in engines(server), "promoted from the cache", seconds=30)
            print(f"promoted {time.monotonic() - began:.2f} s after ready, from the cache ({mode})")
            np.testing.assert_allclose(answers(server, IMAGES), baseline, atol=1e-5)
            assert "hone_tuning_candidates_built_total 0" in server.metrics()
            assert server.stop() == 0


@pytest.mark.timeout(120)
def test_actions_return_to_the_baseline_and_back(place: Path) -> None:
    with run_server(place / "models", "--tuning=cache", f"--kernels-cache={place / 'cache'}") as server:
        wait_until(lambda: "tvm" in engines(server), "promoted from the cache", seconds=60)
        maps = Path(f"/proc/{server.process.pid}/maps")
        assert "/artifacts/" in maps.read_text("utf-8")
        assert server.post("/v2/models/digits/tuning", {"action": "pin_baseline"})[0] == 200
        wait_until(lambda: engines(server) == {"onnxruntime"}, "back on the baseline")
        wait_until(lambda: "/artifacts/" not in maps.read_text("utf-8"), "no file of the artifacts is mapped any more")
        assert tuning(server)["state"] == "baseline"
        assert server.post("/v2/models/digits/tuning", {"action": "start"})[0] == 200
        wait_until(lambda: "tvm" in engines(server), "tuned again")
        assert server.post("/v2/models/digits/tuning", {"action": "explode"})[0] == 400


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
        status, answer = server.post("/v2/models/digits/tuning", {"action": "start"})
        assert (status, "--tuning=on" in answer["error"]) == (503, True)
