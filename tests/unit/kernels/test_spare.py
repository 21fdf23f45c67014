"""What a full or read-only folder will not take is used from a temporary one, and moved when there is room again."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from hone.kernels import Entry, Failure, FailureReason, KernelsCache
from hone.kernels.spare import PREFIX, SpareFolder, has_room, sweep, why_not
from tests.unit.kernels.support import ARCHITECTURE, DEVICE, child, key, mounted, warnings_of


class Trouble:
    """A disk that fails while `number` is set."""

    def __init__(self) -> None:
        self.number = errno.ENOSPC

    def __call__(self, _step: str) -> None:
        if self.number:
            raise OSError(self.number, os.strerror(self.number))


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


@pytest.fixture
def cache(tmp_path, root, trouble):
    opened = KernelsCache(root, spare=tmp_path / "spare", on_step=trouble)
    yield opened
    opened.close()


def publish(cache: KernelsCache, number: int = 1, kind="artifacts", scope=DEVICE) -> Entry | Failure:
    return cache.publish(kind, key(number), scope, {"a": b"module"}, {"n": number})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_what_cannot_be_kept_is_found_and_loaded_all_the_same(cache, trouble, tmp_path, number):
    trouble.number = number
    entry = publish(cache)
    assert isinstance(entry, Entry)
    assert entry.proven
    assert entry.path.is_relative_to(tmp_path / "spare")
    assert cache.get("artifacts", key(1), DEVICE) == entry
    held = cache.get("artifacts", key(1), DEVICE, hold=True)
    assert held.files["a"].read_bytes() == b"module"
    cache.release(held)
    assert cache.hold(entry)
    cache.release(entry)
    assert cache.num_spared == 1
    assert cache.entries() == []


def test_another_process_with_the_same_folders_finds_it(cache, tmp_path, root):
    publish(cache)
    other = KernelsCache(root, spare=tmp_path / "spare")
    assert isinstance(other.get("artifacts", key(1), DEVICE), Entry)
    assert not KernelsCache(root).get("artifacts", key(1), DEVICE)


def test_it_moves_once_there_is_room(cache, trouble, root, caplog):
    caplog.set_level(logging.INFO, logger="hone.kernels.cache")
    held = publish(cache)
    assert cache.hold(held)
    publish(cache, 2, "kernels", ARCHITECTURE)
    publish(cache, 3, "constants", "")
    assert cache.keep_spared() == 0
    assert cache.num_spared == 3
    trouble.number = 0
    assert cache.keep_spared() == 3
    assert cache.num_spared == 0
    entry = KernelsCache(root).get("artifacts", key(1), DEVICE)
    assert isinstance(entry, Entry)
    assert (entry.manifest, entry.proven) == ({"n": 1}, True)
    assert len(cache.entries()) == 3
    cache.release(held)
    assert cache.keep_spared() == 0
    assert "3 entries are remembered now" in caplog.text


def test_it_is_told_once_with_path_reason_and_cure(cache, trouble, root, tmp_path, caplog):
    publish(cache)
    publish(cache, 2)
    cache.keep_spared()
    (told,) = warnings_of(caplog)
    assert str(root) in told and str(tmp_path / "spare") in told
    assert "No space left" in told and "make room" in told
    trouble.number = 0
    cache.keep_spared()
    trouble.number = errno.ENOSPC
    publish(cache, 3)
    assert len(warnings_of(caplog)) == 2, "after it was over, it is news"


def test_where_both_are_full_it_says_both(tmp_path, root, trouble):
    (tmp_path / "spare").write_bytes(b"no folder can be made here")
    cache = KernelsCache(root, spare=tmp_path / "spare", on_step=trouble)
    failure = publish(cache)
    assert failure.reason is FailureReason.FULL
    assert "No space left" in failure.detail
    assert f"temporary folder {tmp_path / 'spare'}" in failure.detail.replace("kernels cache: ", "")


def test_counts(cache, trouble):
    publish(cache)
    cache.get("artifacts", key(1), DEVICE)
    counts = cache.statistics.snapshot()
    assert counts.publishes == {("artifacts", "full"): 1}
    assert counts.hits == {"artifacts": 1}
    assert counts.misses == {}
    trouble.number = 0
    cache.keep_spared()
    assert cache.statistics.snapshot().publishes[("artifacts", "published")] == 1


def test_a_damaged_one_is_a_miss(cache):
    entry = publish(cache)
    entry.files["a"].write_bytes(b"damage")
    assert not cache.get("artifacts", key(1), DEVICE)
    assert cache.num_spared == 0


# --- the folder itself


def test_the_folder_is_private_and_goes_with_its_server(tmp_path):
    spare = SpareFolder.make([tmp_path])
    assert stat.S_IMODE(spare.path.stat().st_mode) == 0o700
    publish(KernelsCache(spare.path))
    assert sweep(tmp_path) == 0, "its server lives"
    spare.close()
    assert list(tmp_path.iterdir()) == []
    spare.close()


OWNER = """
from hone.kernels.spare import SpareFolder
spare = SpareFolder.make([root])
say(spare.path.name)
hear()
"""


def test_what_a_killed_server_left_is_removed_by_the_next(tmp_path):
    with child(OWNER, tmp_path) as owner:
        left = tmp_path / owner.read()
        publish(KernelsCache(left))
        assert sweep(tmp_path) == 0
        owner.kill()
    other = tmp_path / f"{PREFIX}of-nobody"
    other.mkdir()
    spare = SpareFolder.make([tmp_path])
    assert not left.exists()
    assert other.exists(), "without the mark of an owner it may be a stranger's"
    spare.close()


def test_a_place_that_will_not_do_is_passed_over(tmp_path, caplog):
    assert SpareFolder.make([tmp_path / "missing"]) is None
    assert "TMPDIR" in warnings_of(caplog)[0]
    spare = SpareFolder.make([tmp_path / "missing", tmp_path])
    assert spare.path.parent == tmp_path
    spare.close()


def test_places_without_room_or_where_nothing_may_be_run(tmp_path):
    assert why_not(tmp_path) == ""
    assert not has_room(Path(tmp_path), 1 << 60)
    with mounted(tmp_path / "small", "size=1m,mode=0700") as can_mount:
        if not can_mount:
            pytest.skip("mounting takes root")
        assert "free" in why_not(tmp_path / "small")
    with mounted(tmp_path / "noexec", "size=100m,mode=0700,noexec"):
        assert "noexec" in why_not(tmp_path / "noexec")
