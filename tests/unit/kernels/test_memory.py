"""What is free, of the machine and of the control group."""

from __future__ import annotations

import pytest

from hone.kernels.memory import free_bytes

MIB = 1 << 20


@pytest.fixture
def told(tmp_path):
    """Writes what the system says; the folders to read it from."""

    def write(available_mib=None, **group):
        if available_mib is not None:
            text = f"MemTotal: 1 kB\nMemAvailable: {available_mib << 10} kB\n"
            (tmp_path / "meminfo").write_text(text, encoding="ascii")
        for name, value in group.items():
            (tmp_path / f"memory.{name}").write_text(f"{value}\n", encoding="ascii")
        return tmp_path, tmp_path

    return write


def test_the_machine_alone(told):
    assert free_bytes(*told(512, max="max", current=5)) == 512 * MIB


def test_a_control_group_may_have_less(told):
    assert free_bytes(*told(512, max=100 * MIB, current=70 * MIB)) == 30 * MIB


@pytest.mark.parametrize("limited", ["", "system.slice", "system.slice/hone.service"])
def test_every_group_that_this_process_is_in_may_have_less(told, limited):
    proc, groups = told(512)
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text("0::/system.slice/hone.service\n")
    folder = groups / limited
    (groups / "system.slice" / "hone.service").mkdir(parents=True)
    (folder / "memory.max").write_text(f"{100 * MIB}\n")
    (folder / "memory.current").write_text(f"{70 * MIB}\n")
    assert free_bytes(proc, groups) == 30 * MIB


def test_files_that_were_read_make_room(told):
    stat = f"anon {10 * MIB}\ninactive_file {50 * MIB}"
    assert free_bytes(*told(512, max=100 * MIB, current=70 * MIB, stat=stat)) == 80 * MIB


def test_where_nobody_tells(told):
    assert free_bytes(*told()) is None
