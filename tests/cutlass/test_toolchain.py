"""The toolchain: where it is looked for, what is said when a part is missing, memory, logs; building into the cache.

A script stands in for nvcc, so that all but the compilation itself is run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from hone.cli import kernels as kernels_command
from hone.cli.main import main
from hone.compiler.build import BuildFailed
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass import slots, toolchain
from hone.compiler.templates.cutlass.gemm2x import Gemm2x
from hone.compiler.templates.cutlass.prebuild import PlannedKernel
from hone.compiler.templates.cutlass.published import BuildRefused, log_of, published_kernel
from hone.compiler.templates.cutlass.resources import KernelResources, parse_resources
from hone.compiler.templates.cutlass.slots import compiler_slot
from hone.compiler.templates.cutlass.toolchain import CudaToolchain, NvccFailed, ToolchainMissing, find_toolchain
from hone.kernels import Entry, Failure, FailureReason, KernelsCache
from tests.cutlass.workloads import matmul

A100 = CudaTarget.preset("a100")
WORKLOAD = matmul((64, 64), (64, 64))

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7cutlass6KernelE' for 'sm_80'
ptxas info    : Function properties for _ZN7cutlass6KernelE
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 232 registers, used 1 barriers, 8 bytes cumulative stack size, 512 bytes smem, 440 bytes cmem[0]
ptxas info    : Function properties for __internal_helper
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 400 bytes cmem[0]
"""


def test_the_compilers_report_is_read():
    assert parse_resources(LOG) == (
        KernelResources("_ZN7cutlass6KernelE", 232, 512, 8, 16, 24),
        KernelResources("second", 40, 0, 0, 0, 0),
    )


# --- finding


def test_the_toolchain_of_the_environment_is_found():
    found = find_toolchain()
    assert found.nvcc.is_file()
    assert (found.cutlass / "include" / "cutlass" / "cutlass.h").is_file()
    assert found.libcudart.is_file()
    assert {"75", "80", "86", "89", "90a", "100a"} <= set(found.architectures)
    assert found.fields()["nvcc"] == found.version


@pytest.fixture
def no_pypi(monkeypatch):
    monkeypatch.setattr(toolchain, "_pypi_folders", list)


def test_without_nvcc_it_is_said_what_to_install_and_what_still_works(no_pypi, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainMissing, match=r"no nvcc.*hone\[cuda\].*answered by their baseline"):
        find_toolchain()


def test_a_toolkit_that_is_named_must_have_a_compiler(no_pypi, tmp_path):
    with pytest.raises(ToolchainMissing, match="has no bin/nvcc"):
        find_toolchain(tmp_path)


def test_a_toolkit_that_is_named_is_taken_before_path(no_pypi, tmp_path):
    nvcc = fake_nvcc(tmp_path / "toolkit" / "bin" / "nvcc")
    (tmp_path / "toolkit" / "lib64").mkdir()
    (tmp_path / "toolkit" / "lib64" / "libcudart.so.12").touch()
    found = find_toolchain(tmp_path / "toolkit")
    assert (found.nvcc, found.version) == (nvcc, "11.8.89")
    assert found.architectures == ("75", "80")


def test_a_compiler_that_is_none_is_refused(no_pypi, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    script(nvcc, "echo hello")
    with pytest.raises(ToolchainMissing, match="names no release"):
        find_toolchain(tmp_path)


def test_an_architecture_that_nvcc_does_not_know_is_named(fake, tmp_path):
    with pytest.raises(ToolchainMissing, match=r"no code for sm_90a, only for 75, 80"):
        fake.compile("", tmp_path / "out.so", CudaTarget.preset("h100"))


# --- building


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return path


def fake_nvcc(path: Path) -> Path:
    """Writes what it is asked for; fails where the folder holds a file `fail`, waits where there is one `wait`."""
    folder = path.parent
    (folder / "log").parent.mkdir(parents=True, exist_ok=True)
    (folder / "log").write_text(LOG)
    return script(
        path,
        f"""
case "$1" in
  --version) echo "Cuda compilation tools, release 11.8, V11.8.89"; exit;;
  --list-gpu-code) printf 'sm_75\\nsm_80\\n'; exit;;
esac
echo "$@" >>'{folder}/calls'
cat '{folder}/log' >&2
[ -e '{folder}/fail' ] && {{ echo "kernel.cu(7): error: no such tile" >&2; exit 2; }}
[ -e '{folder}/killed' ] && kill -KILL $$
[ -e '{folder}/says' ] && {{ cat '{folder}/says' >&2; exit 1; }}
while [ -e '{folder}/wait' ]; do sleep 0.05; done
while [ $# -gt 1 ]; do [ "$1" = -o ] && cp '{folder}/library.so' "$2"; shift; done
exit 0""",
    )


@pytest.fixture
def fake(tmp_path, slots_in):
    """A toolchain whose nvcc is a script that copies a real library without kernels."""
    folder = tmp_path / "fake"
    nvcc = fake_nvcc(folder / "nvcc")
    source = folder / "library.cpp"
    source.write_text("extern const long shared; const long shared = 1;")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "library.so", source], check=True)
    real = find_toolchain()
    return CudaToolchain(nvcc, "11.8.89", ("75", "80"), real.cutlass, real.cutlass_version, real.libcudart)


class FakeTemplate(Gemm2x):
    def __init__(self, toolchain):
        super().__init__()
        self._toolchain = toolchain

    def toolchain(self):
        return self._toolchain


@pytest.fixture
def cache(tmp_path):
    cache = KernelsCache(tmp_path / "cache")
    yield cache
    cache.close()


def calls(fake):
    path = fake.nvcc.parent / "calls"
    return path.read_text().splitlines() if path.exists() else []


def planned(fake, count=3):
    template = FakeTemplate(fake)
    return [PlannedKernel(template, WORKLOAD, one) for one in template.candidates(WORKLOAD, A100)[:count]]


def test_a_kernel_is_built_once_and_found_again(fake, cache):
    one = planned(fake)[0]
    first = published_kernel(cache, one.template, one.workload, one.candidate, A100)
    again = published_kernel(cache, one.template, one.workload, one.candidate, A100)
    assert first.path == again.path
    assert len(calls(fake)) == 1
    assert "arch=compute_80,code=sm_80" in calls(fake)[0]
    entry = cache.get("kernels", first.digest, "sm_80")
    assert isinstance(entry, Entry)
    assert entry.manifest["resources"][0]["registers"] == 232
    assert entry.manifest["candidate"] == one.candidate.fields()


def test_a_refused_source_leaves_the_compilers_log_and_is_not_tried_again(fake, cache, capfd):
    one = planned(fake)[0]
    (fake.nvcc.parent / "fail").touch()
    with pytest.raises(BuildFailed, match=r"nvcc exited with 2: kernel.cu\(7\): error: no such tile"):
        published_kernel(cache, one.template, one.workload, one.candidate, A100)
    digest = one.template.digest(one.workload, one.candidate, A100)
    assert cache.quarantined(digest, "sm_80").endswith("error: no such tile")
    assert "Compiling entry function" in log_of(cache, digest, A100).read_text()
    with pytest.raises(BuildRefused):
        published_kernel(cache, one.template, one.workload, one.candidate, A100)
    assert len(calls(fake)) == 1
    assert capfd.readouterr() == ("", "")
    (fake.nvcc.parent / "fail").unlink()
    cache.pardon(digest, "sm_80")
    assert published_kernel(cache, one.template, one.workload, one.candidate, A100).digest == digest


def test_a_killed_compiler_says_nothing_of_the_kernel(fake, cache):
    one = planned(fake)[0]
    (fake.nvcc.parent / "killed").touch()
    with pytest.raises(BuildFailed, match="was ended by signal 9"):
        published_kernel(cache, one.template, one.workload, one.candidate, A100)
    (fake.nvcc.parent / "killed").unlink()
    published_kernel(cache, one.template, one.workload, one.candidate, A100)


@pytest.mark.parametrize(
    "said",
    [
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "g++: fatal error: Killed signal terminated program cc1plus",
        "nvlink error: cannot allocate memory",
        "cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes: error",
    ],
)
def test_a_compiler_whose_parts_were_killed_says_nothing_of_the_kernel(fake, cache, said):
    one = planned(fake)[0]
    (fake.nvcc.parent / "says").write_text(said)
    with pytest.raises(BuildFailed, match="nvcc exited with 1"):
        published_kernel(cache, one.template, one.workload, one.candidate, A100)
    assert cache.quarantined(one.template.digest(one.workload, one.candidate, A100), "sm_80") is None
    (fake.nvcc.parent / "says").unlink()
    published_kernel(cache, one.template, one.workload, one.candidate, A100)


def test_a_full_disk_ends_the_build_and_holds_nothing_against_kernels(fake, cache, capsys, monkeypatch):
    (fake.nvcc.parent / "says").write_text("kernel.cu: fatal error: error writing to kernel.s: No space left on device")
    assert kernels_command._build_all(cache, planned(fake, 3), A100) == 1
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "TMPDIR" in told
    assert "still serve" in told
    assert told.count("FAILED") == 1
    assert len(calls(fake)) <= 2
    assert not list(cache.quarantine_records("sm_80"))
    (fake.nvcc.parent / "says").unlink()
    assert kernels_command._build_all(cache, planned(fake, 3), A100) == 0


def test_a_temporary_folder_that_takes_nothing_is_told(fake, cache, monkeypatch):
    def full(*arguments, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    one = planned(fake)[0]
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(BuildFailed, match=r"No space left on device in .* make room") as caught:
        published_kernel(cache, one.template, one.workload, one.candidate, A100)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_cache_that_takes_no_kernel_ends_the_build(fake, cache, capsys, monkeypatch):
    monkeypatch.setattr(type(cache), "publish", lambda *arguments, **more: Failure(FailureReason.FULL, "no room"))
    assert kernels_command._build_all(cache, planned(fake, 3), A100) == 1
    told = capsys.readouterr().err
    assert "could not be kept" in told
    assert told.count("FAILED") == 1


def test_an_old_nvcc_is_told_once_and_before_anything_is_built(fake, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(toolchain, "find_toolchain", lambda home=None: fake)
    assert main(["kernels", "build", "--arch", "90a", "--kernels-cache", str(tmp_path / "none")]) == 1
    told = capsys.readouterr().err
    assert "nvcc 11.8.89 makes no code for sm_90a, only for 75, 80: install another CUDA toolkit" in told
    assert "answered by their baseline" in told
    assert not calls(fake)


BUILD = """
import sys
from pathlib import Path
from hone.cli import kernels
from hone.compiler.templates.cutlass import slots
from hone.kernels import KernelsCache
from tests.cutlass import test_toolchain as here
from hone.compiler.templates.cutlass.toolchain import CudaToolchain, find_toolchain
folder, cache, slot_folder = map(Path, sys.argv[1:4])
slots._folder = lambda: slot_folder
real = find_toolchain()
fake = CudaToolchain(folder / "nvcc", "11.8.89", ("75", "80"), real.cutlass, real.cutlass_version, real.libcudart)
sys.exit(kernels._build_all(KernelsCache(cache), here.planned(fake, int(sys.argv[4])), here.A100))
"""


def test_a_build_that_was_killed_goes_on_and_its_compilers_keep_their_slots(fake, cache, slots_in):
    """SIGKILL leaves no time to tidy up. What compilers are still doing then counts until they have ended."""
    folder = fake.nvcc.parent
    command = [sys.executable, "-c", BUILD, str(folder), str(cache.path.parent), str(slots_in)]

    def build(count):
        return subprocess.run([*command, str(count)], capture_output=True, text=True, check=False, timeout=60)

    assert build(2).returncode == 0
    (folder / "wait").touch()
    killed = subprocess.Popen([*command, "4"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(calls(fake)) == 4)
    killed.kill()
    killed.wait()
    with pytest.raises(BuildFailed, match="waited"), compiler_slot(0.1, patience_seconds=0.0):
        pass
    (folder / "wait").unlink()
    again = build(4)
    assert again.returncode == 0, again.stderr
    assert "2 are there already" in again.stdout
    assert len(list(cache.entries())) == 4


def test_building_goes_on_where_it_was_ended(fake, cache, capsys):
    assert kernels_command._build_all(cache, planned(fake, 2), A100) == 0
    assert kernels_command._build_all(cache, planned(fake, 4), A100) == 0
    told = capsys.readouterr().out
    assert "2 are there already" in told
    assert "[4/4]" in told
    assert "built 2 kernels" in told
    assert len(calls(fake)) == 4


def test_the_time_that_is_left_is_told_from_the_start_on(fake, cache, capsys):
    assert kernels_command._build_all(cache, planned(fake, 2), A100) == 0
    first, *rest, _ = capsys.readouterr().out.splitlines()
    assert first == "2 are to be built: about 10 s left"  # of 10 s each, two at a time
    assert [line.split("  ")[0].split()[0] for line in rest] == ["[1/2]", "[2/2]"]
    assert rest[-1].endswith("done")


def test_estimates_follow_what_was_measured():
    estimate = kernels_command._Estimate(["a", "a", "b3x", "b3x"], [("a", 20.0), ("a", 40.0)])
    assert estimate.left() == f"about {(30 + 30 + 45 + 45) / 2:.0f} s left"
    estimate.done("a", 60.0)  # twice as long as it took before, and alone
    assert estimate.left() == "about 4 min left"
    for name in ("a", "b3x", "b3x"):
        estimate.done(name, 300.0)
    assert estimate.left() == "done"


def test_what_fails_is_told_and_the_others_are_built(fake, cache, capsys):
    (fake.nvcc.parent / "fail").touch()
    assert kernels_command._build_all(cache, planned(fake, 2), A100) == 1
    (fake.nvcc.parent / "fail").unlink()
    assert kernels_command._build_all(cache, planned(fake, 3), A100) == 1
    told = capsys.readouterr()
    assert told.err.count("FAILED (as before)") == 2
    assert "built 1 kernels" in told.out
    assert "quarantine" in told.out


def test_two_compilers_at_once_and_no_more(fake, cache):
    (fake.nvcc.parent / "wait").touch()
    build = threading.Thread(target=kernels_command._build_all, args=(cache, planned(fake, 4), A100))
    build.start()
    wait_for(lambda: len(calls(fake)) == 2)
    assert len(calls(fake)) == 2
    (fake.nvcc.parent / "wait").unlink()
    build.join(30)
    assert not build.is_alive()
    assert len(calls(fake)) == 4


def test_kernels_are_listed_with_what_they_take(fake, cache, tmp_path, capsys):
    kernels_command._build_all(cache, planned(fake, 2), A100)
    capsys.readouterr()
    assert main(["kernels", "ls", "--kernels-cache", str(tmp_path / "cache")]) == 0
    told = capsys.readouterr().out
    assert "REGISTERS" in told
    assert "232" in told
    assert "40 B" in told  # 16 bytes of spills stored, 24 loaded
    assert "2 kernels in" in told
    assert main(["kernels", "ls", "--arch", "75", "--kernels-cache", str(tmp_path / "cache")]) == 0
    assert capsys.readouterr().out.startswith("0 kernels")


def test_the_command_names_what_it_does_not_know(tmp_path, capsys):
    assert main(["kernels", "build", "--arch", "70", "--kernels-cache", str(tmp_path)]) == 1
    assert "architecture '70' is unknown, expected one of 75, 80" in capsys.readouterr().err
    assert main(["kernels", "build", "--arch", "80", "--dtype", "f17", "--kernels-cache", str(tmp_path)]) == 1
    assert "'f17' is unknown" in capsys.readouterr().err
    assert main(["kernels", "ls", "--kernels-cache", str(tmp_path / "none")]) == 1
    assert "no kernels cache" in capsys.readouterr().err


# --- memory and slots


@pytest.fixture
def slots_in(tmp_path, monkeypatch):
    """Slots of this test alone: whoever compiles on the machine meanwhile is not waited for."""
    monkeypatch.setattr(slots, "_folder", lambda: tmp_path)
    return tmp_path


def test_a_compiler_waits_for_memory(slots_in):
    free = iter([1.0, 1.0, 9.0])
    with compiler_slot(4.0, free=lambda: next(free)):
        assert next(free, None) is None


def test_a_compiler_that_never_gets_its_memory_says_so(slots_in):
    with (
        pytest.raises(BuildFailed, match=r"waited 0 s for a compiler's turn and 4.0 GiB; 1.0 are free"),
        compiler_slot(4.0, patience_seconds=0.0, free=lambda: 1.0),
    ):
        pass


def test_who_waits_longest_is_next(slots_in):
    """A build of many kernels asks again as soon as one is done, and would never let anybody else have a turn."""
    order = []

    def wait_for_a_turn():
        with compiler_slot(0.1):
            order.append("waited")

    with compiler_slot(0.1), compiler_slot(0.1) as other:
        waiting = threading.Thread(target=wait_for_a_turn)
        waiting.start()
        door = os.open(slots_in / "door", os.O_RDWR)
        wait_for(lambda: not slots._locked(door) or fcntl.flock(door, fcntl.LOCK_UN))
        fcntl.flock(other, fcntl.LOCK_UN)
        with compiler_slot(0.1):
            order.append("came later")
        waiting.join(30)
    os.close(door)
    assert order == ["waited", "came later"]


def test_memory_is_not_given_twice(slots_in):
    """What the first was given is still free when the second asks: its compiler has only begun."""
    with (
        compiler_slot(4.0, free=lambda: 6.0),
        pytest.raises(BuildFailed, match="waited"),
        compiler_slot(4.0, patience_seconds=0.0, free=lambda: 6.0),
    ):
        pass
    with compiler_slot(4.0, free=lambda: 9.0), compiler_slot(4.0, free=lambda: 9.0):
        pass


def test_what_a_compiler_has_taken_already_is_not_counted_twice(slots_in, monkeypatch):
    monkeypatch.setattr(slots, "resident_gib", lambda slot: 3.5)
    with compiler_slot(4.0, free=lambda: 9.0), compiler_slot(4.0, patience_seconds=0.0, free=lambda: 5.2):
        pass


def test_the_memory_of_compilers_that_hold_a_slot_is_seen(slots_in, tmp_path):
    """By a program of a compiler's name that inherited it."""
    nvcc = tmp_path / "nvcc"
    nvcc.symlink_to("/bin/sleep")
    with compiler_slot(0.1) as slot:
        opened = os.fstat(slot)
        assert slots.resident_gib(opened) == 0.0
        holder = subprocess.Popen([str(nvcc), "600"], pass_fds=(slot,))
        try:
            wait_for(lambda: slots.resident_gib(opened) > 0.0)
        finally:
            holder.kill()
            holder.wait()
        assert slots.resident_gib(opened) == 0.0


def test_a_third_compiler_waits_for_one_of_two(slots_in):
    with (
        compiler_slot(0.1),
        compiler_slot(0.1),
        pytest.raises(BuildFailed, match="waited"),
        compiler_slot(0.1, patience_seconds=0.0),
    ):
        pass
    with compiler_slot(0.1):
        pass


def test_a_killed_process_gives_its_slots_back(slots_in):
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom hone.compiler.templates.cutlass import slots\n"
        "slots._folder = lambda: Path(sys.argv[1])\n"
        "with slots.compiler_slot(0.1), slots.compiler_slot(0.1):\n  print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(slots_in)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BuildFailed, match="waited"), compiler_slot(0.1, patience_seconds=0.0):
            pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    with compiler_slot(0.1, patience_seconds=0.0):
        pass


def test_nvccs_first_error_is_what_is_told():
    assert str(NvccFailed("exited with 1", "warning: x\nfoo.cu(3): error: y\nerror: z")) == (
        "nvcc exited with 1: foo.cu(3): error: y"
    )


def wait_for(condition, seconds=30):
    event, ticks = threading.Event(), int(seconds / 0.05)
    for _ in range(ticks):
        if condition():
            return
        event.wait(0.05)
    raise AssertionError("it did not come to that")
