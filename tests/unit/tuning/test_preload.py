"""Compilers that tuning starts yield, and compile what they compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hone.compiler.templates.cpp.compiler import host_compiler
from hone.tuning import preload
from hone.tuning.preload import programs_give_way

#: Whether a signal ends a sleep early, of a program with a handler for it that asks for restarts: only sleeps tell.
SLEEPS = """
import ctypes, time
began = time.monotonic()
ctypes.CDLL(None).usleep(900_000)
print("interrupted" if time.monotonic() - began < 0.8 else "slept")
"""
KERNEL = 'extern "C" int twice(int x) { return 2 * x; }'


@pytest.fixture
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    return tmp_path


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_programs_that_are_started_get_signals_and_this_one_does_not(environment):
    assert run(SLEEPS) == "slept"
    assert programs_give_way()
    assert run(SLEEPS) == "interrupted"
    assert run(f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {SLEEPS!r}]))") == repr(
        b"interrupted\n"
    )


def test_programs_that_wait_get_few(environment):
    programs_give_way()
    wait = "import ctypes, time\nlibc, num = ctypes.CDLL(None), 0\nend = time.monotonic() + 0.5\n"
    wait += "while time.monotonic() < end:\n    libc.usleep(100_000)\n    num += 1\nprint(num)"
    assert 20 < int(run(wait)) < 400  # at most every 2 ms but for the first moments; 1,000 without that


def test_compilers_make_the_same_of_a_source(environment, tmp_path):
    plain, yielding = tmp_path / "plain.so", tmp_path / "yielding.so"
    host_compiler(()).compile(KERNEL, plain)
    assert programs_give_way()
    host_compiler(()).compile(KERNEL, yielding)
    assert plain.read_bytes() == yielding.read_bytes()


def test_what_was_preloaded_before_stays(environment, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    assert programs_give_way()
    first, second = os.environ["LD_PRELOAD"].split(":")
    assert Path(first).is_relative_to(environment)
    assert second == "libm.so.6"
    assert run("print(1)") == "1"


@pytest.mark.parametrize("source", ["no C++", "[[gnu::constructor]] static void fall() { *(volatile int*)8 = 1; }"])
def test_without_a_library_that_works_programs_run_as_they_are(environment, monkeypatch, tmp_path, caplog, source):
    broken = tmp_path / "broken.cpp"
    broken.write_text(source)
    monkeypatch.setattr(preload, "_SOURCE", broken)
    with caplog.at_level("INFO"):
        assert not programs_give_way()
    assert "LD_PRELOAD" not in os.environ
    assert "compilers do not yield to serving" in caplog.text


def test_paths_that_the_loader_cannot_take_are_not_given_to_it(environment, monkeypatch, caplog):
    folder = environment / "with space"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with caplog.at_level("INFO"):
        assert not programs_give_way()
    assert "no path with a space" in caplog.text
    assert "LD_PRELOAD" not in os.environ
