"""Registered regions: off by default, bounds checked at every access, keys never told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hone.errors import AlreadyExists, InvalidRequest, NotFound, Unsupported
from hone.serving.shared_memory import SharedMemoryRegions
from hone.types import RegionSlice


@pytest.fixture
def regions(tmp_path):
    (tmp_path / "block").write_bytes(bytes(range(100)))
    regions = SharedMemoryRegions(allowed=True, directory=tmp_path)
    yield regions
    regions.close()


def test_off_by_default_and_says_how_to_allow_it(tmp_path):
    regions = SharedMemoryRegions(allowed=False, directory=tmp_path)
    for call in (
        lambda: regions.register("r", "block", 0, 1),
        lambda: regions.unregister("r"),
        regions.statuses,
        lambda: regions.view(RegionSlice("r", 0, 1)),
    ):
        with pytest.raises(Unsupported, match="--allow-client-shm=true"):
            call()


def test_views_read_and_write_the_object(regions, tmp_path):
    regions.register("r", "/block", 10, 50)
    view = regions.view(RegionSlice("r", 5, 3))
    assert bytes(view) == bytes([15, 16, 17])
    view[:] = b"abc"
    assert (tmp_path / "block").read_bytes()[15:18] == b"abc"
    assert [status.name for status in regions.statuses()] == ["r"]
    assert regions.statuses("r")[0].byte_size == 50


@pytest.mark.parametrize(
    ("key", "offset", "size"),
    [
        ("block", 0, 101),
        ("block", 100, 1),
        ("block", -1, 10),
        ("block", 0, 0),
        ("block", 0, 2**63),
        ("missing", 0, 1),
        ("../block", 0, 1),
        ("a/b", 0, 1),
        ("..", 0, 1),
        ("", 0, 1),
        ("/", 0, 1),
        ("a\0b", 0, 1),
        ("x" * 300, 0, 1),
        ("link", 0, 1),
    ],
)
def test_bad_registrations_are_refused_without_telling_the_key(regions, tmp_path, key, offset, size):
    (tmp_path / "link").symlink_to(tmp_path / "block")
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(InvalidRequest) as caught:
        regions.register("r", key, offset, size)
    assert len(key) < 4 or key not in str(caught.value)
    assert regions.statuses() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open


@pytest.mark.parametrize(("offset", "size"), [(0, 51), (50, 1), (-1, 2), (0, -1), (2**62, 2**62)])
def test_accesses_outside_the_region_are_refused(regions, offset, size):
    regions.register("r", "block", 10, 50)
    with pytest.raises(InvalidRequest, match="Invalid offset"):
        regions.view(RegionSlice("r", offset, size))


def test_names_are_unique_and_unknown_ones_told(regions):
    regions.register("r", "block", 0, 10)
    with pytest.raises(AlreadyExists, match="already in manager"):
        regions.register("r", "block", 0, 10)
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'q'"):
        regions.view(RegionSlice("q", 0, 1))
    with pytest.raises(NotFound):
        regions.statuses("q")
    regions.unregister("q")


def test_an_object_truncated_after_registration_is_refused_not_touched(regions, tmp_path):
    regions.register("r", "block", 0, 100)
    os.truncate(tmp_path / "block", 10)
    with pytest.raises(InvalidRequest, match="smaller"):
        regions.view(RegionSlice("r", 0, 100))


def test_unregistering_while_a_view_lives_is_safe(regions):
    regions.register("r", "block", 0, 100)
    view = regions.view(RegionSlice("r", 0, 4))
    regions.unregister("")
    assert bytes(view) == bytes([0, 1, 2, 3])
    assert regions.statuses() == []
