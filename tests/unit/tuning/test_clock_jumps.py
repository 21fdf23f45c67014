"""The machine's clock may jump, by hours and either way, while models are tuned: durations are of monotonic clocks."""

from __future__ import annotations

import ast
import random
import threading
import time
from pathlib import Path

import pytest

import hone
from hone.kernels import KernelsCache
from hone.kernels.staging import sweep
from tests.running import wait_until
from tests.unit.tuning.fakes import PASS, Rig

PACKAGE = Path(hone.__file__).parent
ONE = "IN:FP32[1,4]"
DAY = 86_400

WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
#: Where a date is told to people or clients, or put on and compared with files; none decides how long anything takes.
#: Folders that are swept by age are locked while they are in use.
DATES = {
    "app.py",
    "cli/top.py",
    "dashboard/monitor.py",
    "dashboard/picture.py",
    "frontends/http_server.py",
    "kernels/cache.py",
    "kernels/locks.py",
    "kernels/manifest.py",
    "kernels/quarantine.py",
    "kernels/staging.py",
    "kernels/usage.py",
    "logs.py",
    "metrics/statistics.py",
    "repository/fingerprint.py",
    "tracing.py",
    "tuning/tuner.py",
}


def test_wall_clocks_are_read_for_dates_only():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in WALL_CLOCKS
    }
    assert found <= DATES, f"use time.monotonic or time.perf_counter_ns in {sorted(found - DATES)}"


@pytest.fixture
def jumping(monkeypatch):
    """Every look at the wall clock is days away from the last."""
    generator = random.Random(5)
    real, real_ns = time.time, time.time_ns

    def jump() -> int:
        return generator.randint(-400, 400) * DAY

    monkeypatch.setattr(time, "time", lambda: real() + jump())
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + jump() * 10**9)
    return lambda: time.strftime("%Y-%m-%d", time.gmtime(time.time()))


def test_tuning_goes_its_way_while_the_clock_jumps(tmp_path, jumping):
    rig = Rig(tmp_path, clock=time.monotonic, utc=jumping, remeasure_seconds=0.01, idle_seconds=0.0)
    ref = rig.model({"*": PASS, ONE: {"outcome": "passed", "provisional": True}})
    rig.tuner.start()
    wait_until(lambda: len(rig.serving.running()) == 3, "all is tuned")
    wait_until(lambda: len(rig.children()) > 1, "what is provisional is measured again")
    assert {mode for _, mode in rig.children()[1]} == {"gate"}
    rig.tuner.act("m", "", "pin_baseline").result(30)
    assert rig.serving.running() == {}
    rig.tuner.act("m", "", "start").result(30)
    wait_until(lambda: len(rig.serving.running()) == 3, "tuned again")
    assert rig.tuner.stop(30)
    assert rig.cache.out == {}
    assert rig.tuner.counters.num_quarantines == 0
    assert ref in rig.serving.versions


def test_a_jump_takes_no_childs_temporary_folder_away(tmp_path):
    cache = KernelsCache(tmp_path / "cache")
    staging = cache.path / ".staging"
    staging.mkdir(exist_ok=True)
    rig = Rig(tmp_path, temporary_root=staging)
    rig.model({"*": "slow"}, max_batch_size=1)
    thread = threading.Thread(target=rig.run)
    thread.start()
    wait_until(rig.children, "the child works")
    [folder] = staging.glob("tuning-*")
    for days in (-400, 400):
        sweep(cache._folder, now=time.time() + days * DAY)
    assert folder.is_dir()
    (tmp_path / "m.onnx.go").touch()
    thread.join(60)
    assert rig.buckets()[ONE]["engine"] == "tvm"
    assert not folder.exists()
    assert rig.tuner.stop()
    cache.close()
