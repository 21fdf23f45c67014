"""What hone itself costs beside a model's own work: `make bench-overheads` (seconds).

Two figures: choosing the engine that runs an execution (slot, lease, route lookup, the thread's instance), and a call
of a tuned module that computes next to nothing, beside the same model on ONNX Runtime. Each is the median over many
loops of what one turn takes, with the interpreter's own loop taken off.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.report import describe_machine
from hone.compiler.artifact import derived_constants, export_artifact
from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.pipeline import compile_model
from hone.compiler.target import CpuTarget
from hone.engines.onnxruntime import OnnxRuntimeEngine, SessionSettings
from hone.engines.tvm import PackedWeights, TvmEngine, aligned_empty
from hone.engines.tvm_runtime import TvmRuntime
from hone.serving.slot import Slot
from hone.specialization import Signature, Specialization
from hone.types import Array, TensorSpec

#: Microseconds that the issue of tuning allows.
LOOKUP_BAR, CALL_BAR = 5.0, 2.0
_TURNS, _LOOPS = 20_000, 15
_CALL_TURNS = 2_000


class NoEngine:
    """Runs nothing: what is measured is the way to it."""

    kind = "none"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    initializers: tuple[TensorSpec, ...] = ()
    is_steady = True

    def instantiate(self) -> NoEngine:
        return self

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        return []

    def close(self) -> None:
        pass


def microseconds(turn: Callable[[], object], turns: int) -> float:
    """Of one turn, the interpreter's loop taken off."""

    def loop(body: Callable[[], object]) -> float:
        began = time.perf_counter()
        for _ in range(turns):
            body()
        return (time.perf_counter() - began) / turns * 1e6

    loop(turn)
    return statistics.median(loop(turn) - loop(_nothing) for _ in range(_LOOPS))


def _nothing() -> None:
    pass


def lookups(num_buckets: int) -> float:
    """Microseconds from a request's shapes to its engine's instance, and back, with so many buckets promoted."""
    slot = Slot(NoEngine(), ("IN",), batching=True)
    key = ((3, 224, 224),)
    slot.promote(
        [
            Specialization(Signature.of([("IN", "FP32", (rows, 3, 224, 224))]), NoEngine(), str(rows), rows)
            for rows in range(1, num_buckets + 1)
        ]
    )

    def turn() -> None:
        generation = slot.acquire(key, max(1, num_buckets))
        generation.instance()
        generation.release()

    return microseconds(turn, _TURNS)


def contended(num_threads: int) -> float:
    """The same of a thread's own time (processor), while others do nothing else."""
    slot = Slot(NoEngine(), ("IN",))
    spent: list[float] = []

    def work() -> None:
        began = time.thread_time()
        for _ in range(_TURNS):
            generation = slot.acquire(((1,),), 1)
            generation.instance()
            generation.release()
        spent.append((time.thread_time() - began) / _TURNS * 1e6)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.median(spent)


def calls(folder: Path) -> Mapping[str, float]:
    """Microseconds of a run of one negation of four numbers, by engine."""
    path = folder / "model.onnx"
    spec = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("IN", "OUT")]
    graph = helper.make_graph([helper.make_node("Neg", ["IN"], ["OUT"])], "negation", spec[:1], spec[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    imported = import_model(path, {})
    assert isinstance(imported, ImportedModel)
    compiled = compile_model(imported, CpuTarget.detect(num_threads=1))
    artifact = export_artifact(compiled, imported, "0" * 64, folder, None)
    constants: dict[str, Array] = dict(derived_constants(imported))
    tuned = TvmEngine.load(
        folder,
        artifact.manifest,
        model=path,
        kernels={},
        constants=lambda _: constants,
        runtime=TvmRuntime.load(1),
        packed=PackedWeights(),
    )
    given = aligned_empty((1, 4), np.dtype(np.float32))
    given[...] = 1.0
    found = {}
    for name, engine in (
        ("ONNX Runtime", OnnxRuntimeEngine.load(path, SessionSettings(0, 1))),
        ("tuned module", tuned),
    ):
        instance = engine.instantiate()
        found[name] = microseconds(lambda instance=instance: instance.run({"IN": given}, ["OUT"]), _CALL_TURNS)  # type: ignore[misc]
    machine = tuned.instantiate()
    argument = machine._argument(0, given)
    found["of it, TVM's call"] = microseconds(lambda: machine._main(argument, machine._packed), _CALL_TURNS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    about = describe_machine()
    print(f"{about['date']}, {about['cpu']}, {about['cores']} cores, load {about['load_average_before'][0]:.2f}")
    met = True
    for num_buckets in (0, 1, 8, 16):
        us = lookups(num_buckets)
        met &= us <= LOOKUP_BAR
        print(f"slot, lease, route lookup, {num_buckets:2} buckets: {us:6.2f} us (bar {LOOKUP_BAR:g})")
    print(f"the same on four threads at once, processor time each: {contended(4):6.2f} us")
    with tempfile.TemporaryDirectory() as folder:
        found = calls(Path(folder))
    for name, us in found.items():
        print(f"a run of a model that does nothing, {name}: {us:6.2f} us")
    call = found["of it, TVM's call"]
    met &= call <= CALL_BAR
    print(f"bar for TVM's call: {CALL_BAR:g} us: {'met' if call <= CALL_BAR else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
