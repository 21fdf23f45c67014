"""A cache folder that is full: the tuned module serves all the same, it is told why it will be forgotten, and it is
remembered as soon as there is room."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hone.kernels import KernelsCache
from tests import models
from tests.process.test_tuning_end_to_end import answers, chain, engines, tuning
from tests.running import RunningServer, run_server, wait_until
from tests.unit.kernels.support import mounted


def unkept(server: RunningServer) -> int:
    found = re.search(r"^hone_cache_unkept_entries (\d+)", server.metrics(), re.MULTILINE)
    assert found, server.metrics()
    return int(found[1])


@pytest.mark.timeout(300)
def test_what_cannot_be_kept_serves_and_is_kept_when_there_is_room(tmp_path: Path) -> None:
    models.write_model(tmp_path / "models", "chain", chain())
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with mounted(tmp_path / "volume", "size=256k,mode=0700") as can_mount:
        if not can_mount:
            pytest.skip("mounting a small tmpfs takes root; tests/unit/kernels/test_spare.py stands in for it")
        with (tmp_path / "volume" / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
            while True:
                filler.write(b"x" * 4096)
        cache = tmp_path / "volume" / "cache"
        flags = ("--tuning=on", f"--kernels-cache={cache}")
        with run_server(tmp_path / "models", *flags, environment={"TMPDIR": str(temporary)}) as server:
            baseline = answers(server)
            wait_until(lambda: tuning(server)["state"] not in ("queued", "tuning"), "tuning ends", seconds=240)
            assert "tvm" in engines(server), (tuning(server), server.log)
            np.testing.assert_allclose(answers(server), baseline, atol=1e-5)
            assert unkept(server) > 0
            told = [line for line in server.log.splitlines() if "cannot keep what is learned" in line]
            assert told
            assert all(str(cache) in line and "make room" in line for line in told)
            assert len([line for line in told if "while tuning" in line]) <= 1

            subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path / "volume")], check=True)
            wait_until(lambda: unkept(server) == 0, "it is remembered", seconds=60)
            np.testing.assert_allclose(answers(server), baseline, atol=1e-5)
            assert server.stop() == 0
        assert list(temporary.glob("hone-kernels-*")) == []
        assert "artifacts" in {entry.name.kind for entry in KernelsCache(cache).entries()}
        with run_server(tmp_path / "models", "--tuning=cache", f"--kernels-cache={cache}") as server:
            wait_until(lambda: "tvm" in engines(server), "promoted from the cache", seconds=60)
            np.testing.assert_allclose(answers(server), baseline, atol=1e-5)
