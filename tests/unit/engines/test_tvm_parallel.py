"""The pool for parallel loops: who does which tasks, shown by tasks that wait for each other, not by times."""

from __future__ import annotations

import ctypes
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi.libinfo

from hone.compiler.parallel import ParallelPool as PoolLibrary
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_parallel import LAUNCH_VARIABLE, ParallelPool, has_variable
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError
from tests.unit.engines.tvm_artifacts import MANIFEST, baseline, compile_to, load, save_model

ROOT = Path(__file__).parents[3]
DEADLINE_SECONDS = 30.0


class Group(ctypes.Structure):
    _fields_ = (("sync_handle", ctypes.c_void_p), ("num_task", ctypes.c_int32))


TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(Group), ctypes.c_void_p)


class Pool:
    """A pool of its own: the library under a name that nobody else has loaded. Tasks are Python functions."""

    def __init__(self, path: Path, num_threads: int = 2) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.hone_parallel_set_default(num_threads)

    def launch(self, task: Callable[[int, int], int | None], num_tasks: int = 0) -> int:
        called = TASK(lambda at, group, _: task(at, group.contents.num_task) or 0)
        return int(self.library.hone_parallel_launch(called, None, num_tasks))

    @property
    def num_workers(self) -> int:
        return int(self.library.hone_parallel_num_workers())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pool") / "pool.so"
    PoolLibrary.here().build(path)
    return path


@pytest.fixture
def pool(built: Path, tmp_path: Path) -> Pool:
    path = tmp_path / "own.so"
    path.write_bytes(built.read_bytes())
    return Pool(path)


@pytest.fixture
def in_thread() -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    started: list[threading.Thread] = []

    def start(work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work)
        thread.start()
        started.append(thread)
        return thread

    yield start
    for thread in started:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 5, 1000, 70_000])
def test_every_task_is_done_once(pool: Pool, num_threads: int, num_tasks: int) -> None:
    pool.library.hone_parallel_set_threads(num_threads)
    done: list[tuple[int, int]] = []
    assert pool.launch(lambda at, of: done.append((at, of)), num_tasks) == 0
    (of,) = {of for _, of in done}
    assert num_tasks in (0, of)
    assert sorted(at for at, _ in done) == list(range(of))
    pool.library.hone_parallel_set_threads(0)


def test_who_is_done_takes_what_others_have_left(pool: Pool) -> None:
    """A task waits for all the others: those that its thread would have done are done by the other thread."""
    others_done = threading.Event()
    done = []

    def task(at: int, of: int) -> None:
        if at == 0:
            assert others_done.wait(DEADLINE_SECONDS)
            return
        done.append(at)
        if len(done) == of - 1:
            others_done.set()

    assert pool.launch(task) == 0
    assert len(done) > 2


def test_nobody_waits_for_a_worker_that_does_not_come(pool: Pool, in_thread: Callable) -> None:
    """The one worker is held by another caller's task; a loop is finished without it."""
    release = threading.Event()
    held = threading.Barrier(3)

    def hold(at: int, of: int) -> None:
        held.wait(DEADLINE_SECONDS)
        assert release.wait(DEADLINE_SECONDS)

    in_thread(lambda: pool.launch(hold, 2))
    held.wait(DEADLINE_SECONDS)
    who = set()
    assert pool.launch(lambda at, of: who.add(threading.get_ident())) == 0
    assert who == {threading.get_ident()}
    release.set()


def test_no_more_threads_join_than_were_asked_for(pool: Pool, in_thread: Callable) -> None:
    pool.library.hone_parallel_set_threads(4)
    together = threading.Barrier(4)
    assert pool.launch(lambda at, of: together.wait(DEADLINE_SECONDS) and None, 4) == 0
    assert pool.num_workers == 3
    pool.library.hone_parallel_set_threads(2)
    for _ in range(50):
        who = set()
        assert pool.launch(lambda at, of, who=who: who.add(threading.get_ident()), 64) == 0
        assert len(who) <= 2
    pool.library.hone_parallel_set_threads(0)


def test_callers_share_the_workers(pool: Pool, in_thread: Callable) -> None:
    """More callers than there are slots, each with loops of its own, and as many workers as one of them wants."""
    results: list[int] = []

    def call() -> None:
        for _ in range(5):
            done: list[int] = []
            code = pool.launch(lambda at, of, done=done: done.append(at), 40)
            results.append(code or (sorted(done) != list(range(40))))

    threads = [in_thread(call) for _ in range(80)]
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert results == [0] * 400
    assert pool.num_workers == 1


def test_a_loop_in_a_task_is_run_by_the_task(pool: Pool) -> None:
    inner: list[tuple[int, int, bool]] = []

    def task(at: int, of: int) -> None:
        who = threading.get_ident()
        assert pool.launch(lambda at, of: inner.append((at, of, threading.get_ident() == who))) == 0

    assert pool.launch(task, 4) == 0
    assert inner == [(0, 1, True)] * 4


def test_a_task_that_fails_fails_the_loop_with_its_error(pool: Pool) -> None:
    """The worker's error is raised in the caller's thread, once, and the next loop knows nothing of it."""
    tvm = ctypes.PyDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    caller = threading.get_ident()
    worker_failed = threading.Event()

    def task(at: int, of: int) -> int:
        if threading.get_ident() == caller:
            assert worker_failed.wait(DEADLINE_SECONDS)
            return 0
        tvm.TVMFFIErrorSetRaisedFromCStr(b"ValueError", b"no such row")
        worker_failed.set()
        return -7

    assert pool.launch(task, 2) == -7
    error = ctypes.c_void_p()
    tvm.TVMFFIErrorMoveFromRaised(ctypes.byref(error))
    assert error.value
    tvm.TVMFFIObjectDecRef(error)
    tvm.TVMFFIErrorMoveFromRaised(ctypes.byref(error))
    assert not error.value
    assert pool.launch(lambda at, of: None) == 0


def test_after_a_failure_no_more_tasks_are_begun(pool: Pool) -> None:
    pool.library.hone_parallel_set_threads(2)
    begun = itertools.count()
    failed = threading.Event()

    def task(at: int, of: int) -> int:
        if next(begun) > 0:
            assert failed.wait(DEADLINE_SECONDS)
            return 0
        failed.set()
        return 1

    assert pool.launch(task, 1000) == 1
    assert next(begun) < 1000


def test_a_child_of_fork_has_workers_of_its_own(built: Path) -> None:
    program = """
import os, sys, threading
from pathlib import Path
from tests.unit.engines.test_tvm_parallel import Pool

pool = Pool(Path(sys.argv[1]))
both = threading.Barrier(2)

def meet(at, of):
    both.wait(30)

assert pool.launch(meet, 2) == 0
child = os.fork()
if child == 0:
    both = threading.Barrier(2)
    assert pool.num_workers == 0
    assert pool.launch(meet, 2) == 0
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pool.launch(meet, 2) == 0
print("ran")
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(built)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stdout) == (0, "ran\n"), ran.stderr


def test_idle_workers_sleep(pool: Pool) -> None:
    both = threading.Barrier(2)
    worker = []

    def task(at: int, of: int) -> None:
        both.wait(DEADLINE_SECONDS)
        worker.append(threading.get_native_id())

    assert pool.launch(task, 2) == 0
    (identity,) = set(worker) - {threading.get_native_id()}
    status = Path(f"/proc/self/task/{identity}")
    assert (status / "comm").read_text().strip() == "hone-parallel"
    blocked = next(line for line in (status / "status").read_text().splitlines() if line.startswith("SigBlk"))
    assert int(blocked.split()[1], 16) & 1 << (15 - 1), "SIGTERM is for others"
    assert pool.num_workers == 1
    spent = -1
    for _ in range(3000):  # at most 30 s: whoever sleeps gives up his core of his own will, and then stays where he is
        now = (status / "stat").read_text().rsplit(")", 1)[1].split()
        if now[0] == "S" and now[11] == spent:
            break
        spent = now[11]
        threading.Event().wait(0.01)
    else:
        pytest.fail("the worker does not sleep")


# --- with artifacts


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    weights = {"w": np.random.default_rng(0).standard_normal((64, 64, 3, 3)).astype(np.float32) / 24}
    model = save_model(
        folder / "model.onnx",
        [("Conv", ["x", "w"], ["c"], {"pads": [1, 1, 1, 1]}), ("Relu", ["c"], ["r"], {}), ("Exp", ["r"], ["y"], {})],
        {"x": ("float32", [1, 64, 40, 40])},
        {"y": ("float32", [1, 64, 40, 40])},
        weights,
    )
    return compile_to(folder / "artifact", model, num_threads=2)


def test_the_engine_runs_its_loops_in_the_pool(network: Path) -> None:
    told = json.loads((network / MANIFEST).read_text(encoding="utf-8"))
    assert any(has_variable(path, LAUNCH_VARIABLE) for path in network.glob("**/*.so"))
    runtime = TvmRuntime.load(num_threads=2)
    engine = load(network, runtime)
    assert runtime.parallel.is_loaded
    instance = engine.instantiate()
    x = np.random.default_rng(1).standard_normal((1, 64, 40, 40)).astype(np.float32)
    expected = baseline(network / "model.onnx", {"x": x}, ["y"])[0]
    for _ in range(20):
        np.testing.assert_allclose(instance.run({"x": x}, ["y"])[0], expected, rtol=1e-4, atol=1e-5)
    assert runtime.parallel.num_workers == 1
    assert told["pool"] == PoolLibrary.here().digest


@pytest.mark.parametrize(
    ("pool", "message"), [(None, "names no pool of threads: tune again"), ("0" * 64, "is not in the cache")]
)
def test_an_artifact_without_its_pool_is_refused(network: Path, pool: str | None, message: str) -> None:
    told = json.loads((network / MANIFEST).read_text(encoding="utf-8"))
    kernels = {digest: network / "kernels" / digest / KERNEL_FILE for digest in told["kernels"]}
    from hone.engines.tvm import PackedWeights, TvmEngine

    with pytest.raises(EngineError, match=message):
        TvmEngine.load(
            network, {**told, "pool": pool}, model=network / "model.onnx", kernels=kernels, constants=lambda _: {},
            runtime=TvmRuntime.load(num_threads=2), packed=PackedWeights(),
        )  # fmt: skip


def test_a_barrier_between_tasks_is_refused_when_it_is_linked(tmp_path: Path) -> None:
    from tvm import te
    from tvm.s_tir import Schedule

    from hone.compiler.build import LinkFailed, build_functions
    from hone.compiler.target import CpuTarget

    x = te.placeholder((64, 8), name="x")
    schedule = Schedule(te.create_prim_func([x, te.compute((64, 8), lambda i, j: x[i, j] + 1, name="y")]))
    outer, inner = schedule.split(schedule.get_loops("y")[0], [4, 16])
    schedule.annotate(outer, "pragma_parallel_launch_point", True)
    schedule.parallel(inner)
    schedule.annotate(inner, "pragma_parallel_barrier_when_finish", True)
    library = build_functions({"f": schedule.mod["main"]}, CpuTarget.detect(2))
    with pytest.raises(LinkFailed, match="a parallel loop has a barrier between its tasks"):
        library.export(tmp_path / "kernel.so")
    assert not (tmp_path / "kernel.so").exists()


def test_a_library_that_is_no_pool(network: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"module\.so is no pool for parallel loops"):
        ParallelPool().load(network / "module.so", 2)
    (tmp_path / "pool.so").write_bytes(b"\x7fELF not a library")
    with pytest.raises(EngineError, match=r"the pool for parallel loops, pool\.so, does not load") as caught:
        ParallelPool().load(tmp_path / "pool.so", 2)
    assert str(tmp_path) not in str(caught.value)


def test_a_hundred_loads_start_no_more_threads(network: Path) -> None:
    """Engines come and go, and threads that run them; the pool's workers stay as many as one of them wants."""
    program = """
import gc, os, sys, threading
from pathlib import Path
import numpy as np
from hone.engines.tvm_runtime import TvmRuntime
from tests.unit.engines.tvm_artifacts import load

folder = Path(sys.argv[1])
runtime = TvmRuntime.load(num_threads=2)
x = {"x": np.ones((1, 64, 40, 40), np.float32)}
before = len(os.listdir("/proc/self/task"))

def serve():
    engine = load(folder, runtime)
    instance = engine.instantiate()
    for _ in range(3):
        instance.run(x, ["y"])
    engine.close()

for _ in range(100):
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
gc.collect()
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line}
print(len(os.listdir("/proc/self/task")) - before, [Path(name).parent.name == sys.argv[2] for name in mapped])
"""
    told = json.loads((network / MANIFEST).read_text(encoding="utf-8"))
    command = [sys.executable, "-c", program, str(network), told["pool"]]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (ran.returncode, ran.stdout) == (0, "1 [True]\n"), ran.stderr + ran.stdout
