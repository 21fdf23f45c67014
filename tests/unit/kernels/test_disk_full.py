"""A disk that is full, or turns full, costs what would have been kept, and nothing else."""

from __future__ import annotations

import errno
import os

import pytest

from hone.kernels import Entry, Failure, FailureReason, KernelsCache
from hone.kernels.staging import STEPS
from tests.unit.kernels.support import DEVICE, child, key, mounted, staged, warnings_of


def test_a_full_file_system(tmp_path, caplog):
    with mounted(tmp_path / "small", "size=256k,mode=0700") as can_mount:
        if not can_mount:
            pytest.skip("mounting a small tmpfs takes root; the file-size limit below stands in for it")
        cache = KernelsCache(tmp_path / "small" / "cache")
        small = cache.publish("artifacts", key(1), DEVICE, {"a": b"small"}, {})
        for number in range(2, 5):
            failure = cache.publish("artifacts", key(number), DEVICE, {"a": b"x" * 300_000}, {})
            assert isinstance(failure, Failure)
            assert failure.reason is FailureReason.FULL
            assert "No space left" in failure.detail
            assert staged(cache.root) == []
        assert cache.get("artifacts", key(1), DEVICE) == small
        assert not cache.get("artifacts", key(2), DEVICE)
        (told,) = warnings_of(caplog)
        assert "serving goes on" in told
        assert cache.statistics.snapshot().publishes[("artifacts", "full")] == 3

        # full to the last byte: even then nothing raises, and what is there is served
        with (tmp_path / "small" / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="space"):
            while True:
                filler.write(b"x" * 4096)
        assert cache.publish("decisions", key(5), DEVICE, {"a": b"tiny"}, {}).reason is FailureReason.FULL
        with cache.lock("artifacts", key(9), DEVICE):
            pass
        cache.quarantine(key(1), DEVICE, "NaN")
        assert cache.quarantined(key(1), DEVICE) == "NaN"
        assert cache.get("artifacts", key(1), DEVICE) == small
        assert staged(cache.root) == []

        (tmp_path / "small" / "filler").unlink()
        assert isinstance(cache.publish("decisions", key(5), DEVICE, {"a": b"tiny"}, {}), Entry), "room again"
        cache.quarantine(key(1), DEVICE, "again")
        assert KernelsCache(cache.root).quarantined(key(1), DEVICE) == "NaN"


def test_a_cache_opened_on_a_full_file_system(tmp_path, caplog):
    with mounted(tmp_path / "tiny", "size=16k,nr_inodes=4,mode=0700") as can_mount:
        if not can_mount:
            pytest.skip("mounting a small tmpfs takes root")
        for number in range(3):
            (tmp_path / "tiny" / str(number)).write_bytes(b"")
        cache = KernelsCache(tmp_path / "tiny" / "cache")
        assert not cache.get("artifacts", key(1), DEVICE)
        assert cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {}).reason is FailureReason.FULL
        assert len(warnings_of(caplog)) == 1


LIMITED = """
import logging, resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
logging.basicConfig(stream=sys.stdout, format="%(levelname)s")
cache = KernelsCache(root)
for number in range(3):
    failure = cache.publish("artifacts", key(number), DEVICE, {"small": b"x", "a": b"x" * 300_000}, {})
    say(failure.reason.value)
say(len(list((root / "v1" / ".staging").iterdir())))
say(type(cache.publish("artifacts", key(4), DEVICE, {"a": b"x" * 1000}, {})).__name__)
"""


def test_a_file_size_limit(root):
    """What a full disk does, for users who cannot mount one."""
    with child(LIMITED, root) as limited:
        for expected in ("WARNING", "full", "full", "full", "0", "Entry"):
            limited.hears(expected)
        limited.finish()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, FailureReason.FULL),
        (errno.EDQUOT, FailureReason.FULL),
        (errno.EROFS, FailureReason.READ_ONLY),
        (errno.EIO, FailureReason.ERROR),
        (errno.EMFILE, FailureReason.ERROR),
    ],
)
@pytest.mark.parametrize("step", STEPS[:4])
def test_trouble_at_any_step_leaves_nothing_behind(root, step, number, reason):
    trouble = [True]

    def on_step(reached: str) -> None:
        if trouble[0] and reached == step:
            raise OSError(number, os.strerror(number))

    cache = KernelsCache(root, on_step=on_step)
    failure = cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {})
    assert isinstance(failure, Failure)
    assert failure.reason is reason
    assert staged(root) == []
    assert cache.entries() == []
    trouble[0] = False
    assert isinstance(cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {}), Entry)


def test_each_reason_is_told_once(root, caplog):
    numbers = [errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EIO]

    def on_step(_step: str) -> None:
        raise OSError(numbers.pop(), "trouble")

    cache = KernelsCache(root, on_step=on_step)
    for number in range(5):
        cache.publish("artifacts", key(number), DEVICE, {"a": b"a"}, {})
    assert len(warnings_of(caplog)) == 2
