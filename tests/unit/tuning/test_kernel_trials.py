"""Who is blamed when a process that measures kernels dies."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hone.kernels import KernelsCache
from hone.tuning.kernel_trials import KernelTrials

SCOPE, KERNEL = "d" * 64, "a" * 64
DYING = """
import os, sys
from pathlib import Path
from hone.kernels import KernelsCache
from hone.tuning.kernel_trials import KernelTrials
trials = KernelTrials(KernelsCache(Path(sys.argv[1])), sys.argv[2])
with trials.trying(sys.argv[3]):
    if sys.argv[4] == "inside":
        os._exit(9)
os._exit(9)
"""


@pytest.fixture
def cache(tmp_path):
    return KernelsCache(tmp_path / "cache")


def die(cache, where, scope=SCOPE):
    command = [sys.executable, "-c", DYING, str(cache.root), scope, KERNEL, where]
    ended = subprocess.run(command, timeout=60, check=False)
    assert ended.returncode == 9


def test_the_second_death_blocks_a_kernel(cache):
    die(cache, "inside")
    assert KernelTrials(cache, SCOPE).blocked(KERNEL) is None
    die(cache, "inside")
    assert "died" in KernelTrials(cache, SCOPE).blocked(KERNEL)


def test_a_death_between_trials_is_nobodys_fault(cache):
    for _ in range(2):
        die(cache, "outside")
    assert KernelTrials(cache, SCOPE).blocked(KERNEL) is None
    assert not cache.quarantine_records(SCOPE)


def test_each_kind_of_device_settles_its_own(cache):
    die(cache, "inside", scope="e" * 64)
    KernelTrials(cache, SCOPE).close()
    assert not cache.quarantine_records(SCOPE)
    KernelTrials(cache, "e" * 64).close()
    (record,) = cache.quarantine_records("e" * 64)
    assert record.strikes == {"crash": 1}


def test_who_lives_is_not_settled(cache):
    living = KernelTrials(cache, SCOPE)
    with living.trying(KERNEL):
        KernelTrials(cache, SCOPE).close()
    assert not cache.quarantine_records(SCOPE)


def test_a_kernel_that_broke_the_device_is_blocked_at_once(cache):
    trials = KernelTrials(cache, SCOPE)
    trials.block(KERNEL, "illegal address")
    assert trials.blocked(KERNEL) == "illegal address"
    assert trials.blocked("b" * 64) is None
    trials.close()
