"""Loading a library is running code: hone's own folder must be this user's alone, or nothing starts on it."""

from __future__ import annotations

import os
import stat

import pytest

from hone.errors import HoneError
from hone.kernels import CacheUnsafe, Entry, FailureReason, KernelsCache
from tests.unit.kernels.support import DEVICE, key, warnings_of


def test_it_is_made_private_whatever_the_umask(root):
    before = os.umask(0)
    try:
        KernelsCache(root)
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "v1").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o2770])
def test_one_that_others_may_write_is_refused(root, mode):
    KernelsCache(root)
    (root / "v1").chmod(mode)
    with pytest.raises(CacheUnsafe, match="can be written by others") as refused:
        KernelsCache(root)
    assert str(root / "v1") in str(refused.value)
    assert f"chmod 0700 {root / 'v1'}" in str(refused.value)
    assert isinstance(refused.value, HoneError)


def test_one_that_others_may_read_is_closed_to_them(root, caplog):
    KernelsCache(root)
    (root / "v1").chmod(0o755)
    KernelsCache(root)
    assert stat.S_IMODE((root / "v1").stat().st_mode) == 0o700
    assert "0755" in warnings_of(caplog)[0]


def test_someone_elses_is_refused(root, monkeypatch):
    KernelsCache(root)
    if os.geteuid() == 0:
        os.chown(root / "v1", 65534, 65534)
        owner = 65534
    else:  # only root can give files away
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CacheUnsafe, match=f"belongs to user {owner}.*run as user {owner}"):
        KernelsCache(root)


def test_a_symbolic_link_is_refused(root, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.mkdir()
    (root / "v1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheUnsafe, match="symbolic link"):
        KernelsCache(root)


def test_a_dangling_link_is_refused(root):
    root.mkdir()
    (root / "v1").symlink_to(root / "absent")
    with pytest.raises(CacheUnsafe, match="symbolic link"):
        KernelsCache(root)


def test_a_file_in_its_place_is_refused(root):
    root.mkdir()
    (root / "v1").write_bytes(b"")
    with pytest.raises(CacheUnsafe, match="not a folder"):
        KernelsCache(root)


def test_a_file_for_a_cache_is_refused(root):
    root.write_bytes(b"")
    with pytest.raises(CacheUnsafe, match=r"not a folder.*--kernels-cache"):
        KernelsCache(root)


def test_a_shared_parent_is_only_a_warning(root, caplog):
    root.mkdir()
    root.chmod(0o777)
    cache = KernelsCache(root)
    assert isinstance(cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {}), Entry)
    (told,) = warnings_of(caplog)
    assert "can be written by others (mode 0777)" in told


def test_a_parent_like_tmp_is_no_warning(root, caplog):
    root.mkdir()
    root.chmod(0o1777)
    KernelsCache(root)
    assert warnings_of(caplog) == []


def test_the_folder_given_may_be_a_link(root, tmp_path):
    (tmp_path / "volume").mkdir()
    root.symlink_to(tmp_path / "volume")
    cache = KernelsCache(root)
    assert isinstance(cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {}), Entry)


def test_one_that_turns_unsafe_later_is_written_no_more(root, caplog):
    cache = KernelsCache(root)
    (root / "v1").chmod(0o777)
    failure = cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {})
    assert failure.reason is FailureReason.FOREIGN
    with cache.lock("artifacts", key(1), DEVICE):
        pass
    cache.quarantine(key(1), DEVICE, "NaN")
    assert cache.quarantined(key(1), DEVICE) == "NaN"
    assert len(warnings_of(caplog)) == 1


def test_a_folder_that_is_taken_away_is_made_again(root):
    cache = KernelsCache(root)
    cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {})
    root.rename(root.with_name("away"))
    assert not cache.get("artifacts", key(1), DEVICE)
    assert isinstance(cache.publish("artifacts", key(1), DEVICE, {"a": b"a"}, {}), Entry)


def test_looking_makes_no_folder(root):
    cache = KernelsCache(root, create=False)
    assert not cache.exists
    assert cache.entries() == []
    assert cache.devices() == {}
    assert not cache.get("artifacts", key(1), DEVICE)
    assert not root.exists()
