"""Two servers tune the same model with one cache: what is made is made once, and the death of one holds up nobody."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from hone.kernels import KernelsCache
from hone.tuning import group
from hone.tuning.child_process import CAUSES
from tests import models
from tests.process.publishing import child_of, load
from tests.process.real_artifacts import mapped
from tests.process.support import EXPLICIT
from tests.process.test_tuning_end_to_end import answers, chain, engines, tuning
from tests.process.tuning_children import wait_gone
from tests.running import RunningServer, run_server, wait_until

COUNTERS = ("candidates_built", "candidates_measured", "compile_seconds", "measure_seconds")


@pytest.fixture
def repository(repository: Path) -> Path:
    """With a model that gains much, by one fused pass, and has a workload to search a kernel for."""
    model = onnx.load_model_from_string(chain())
    model.graph.node[-1].output[0] = "scores"
    model.graph.node.append(helper.make_node("Softmax", ["scores"], ["OUT"], axis=-1))
    models.write_model(repository, "chain", model.SerializeToString())
    return repository


def start(stack: ExitStack, repository: Path, cache: Path) -> RunningServer:
    flags = (*EXPLICIT, "--tuning=on", "--tuning-pause=false", f"--kernels-cache={cache}")
    return stack.enter_context(run_server(repository, *flags))


def made(server: RunningServer) -> bool:
    """Whether the server's child compiled and measured; it did both or neither."""
    told = {name: server.metric(f"hone_tuning_{name}_total") or 0.0 for name in COUNTERS}
    assert len({value > 0 for value in told.values()}) == 1, told
    return told["compile_seconds"] > 0


def artifacts(cache_folder: Path) -> list[str]:
    cache = KernelsCache(cache_folder)
    assert cache.verify().problems == ()
    found = [listed.name.digest for listed in cache.entries() if listed.name.kind == "artifacts"]
    cache.close()
    return found


@pytest.mark.timeout(300)
def test_each_thing_is_made_once(repository: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ExitStack() as stack:
        servers = [start(stack, repository, cache) for _ in range(2)]
        for server in servers:
            load(server, "chain")
        baseline = answers(servers[0])
        for server in servers:
            wait_until(lambda server=server: "tvm" in engines(server), "promoted", seconds=240)
            np.testing.assert_allclose(answers(server), baseline, atol=1e-5)
            [bucket] = tuning(server)["buckets"]
            assert bucket["outcome"] == "passed"
        assert sorted(map(made, servers)) == [False, True]
        [artifact] = artifacts(cache)
        assert {tuning(server)["buckets"][0]["artifact"] for server in servers} == {artifact}
        assert mapped(servers[0]) == mapped(servers[1]) != [], "both run the very same files"
        for server in servers:
            for cause in CAUSES["failed"]:
                assert server.metric("hone_tuning_jobs_total", outcome="failed", reason=cause) == 0
            assert server.stop() == 0


@pytest.mark.timeout(300)
def test_the_death_of_the_one_that_makes_it_leaves_it_to_the_other(repository: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with ExitStack() as stack:
        first, second = (start(stack, repository, cache) for _ in range(2))
        load(first, "chain")
        wait_until(lambda: tuning(first)["progress"] > 0, "the first server's child is at work")
        leader = child_of(first)
        os.killpg(leader, signal.SIGSTOP)  # in the middle, for as long as the test wants
        pids = group.members(leader)
        load(second, "chain")
        wait_until(lambda: tuning(second)["reason"].startswith("starting for"), "the second server's child waits")
        assert artifacts(cache) == []
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_gone(pids)
        wait_until(lambda: "tvm" in engines(second), "promoted", seconds=240)
        assert made(second)
        assert len(artifacts(cache)) == 1
        assert second.stop() == 0
