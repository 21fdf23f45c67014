"""A model as a tuned one is served, without a search: hone's own pipeline, its artifact on disk, and the tuned engine.

For `onnx_coverage`, in its child. What is left out of the way that a tuning child goes is the cache, and the gate's
comparison of speed.
"""

from __future__ import annotations

from pathlib import Path

from hone.compiler.artifact import derived_constants, export_artifact
from hone.compiler.onnx_import import ImportedModel
from hone.compiler.parallel import ParallelPool
from hone.compiler.pipeline import compile_model
from hone.compiler.target import CpuTarget
from hone.engines.tvm import PackedWeights, TvmEngine
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_runtime import TvmRuntime
from hone.types import Array

#: More than one: loops are parallel as they are on a server, and go through hone's pool of threads.
NUM_THREADS = 2
#: Stands for the entry that keeps derived constants.
_CONSTANTS = "0" * 64


class TunedEngines:
    """Makes engines for this process. The pool's library stays in `folder`, which outlives them."""

    def __init__(self, folder: Path) -> None:
        """Raises BuildFailed where there is no C++ compiler."""
        self._target = CpuTarget.detect(num_threads=NUM_THREADS)
        self._runtime = TvmRuntime.load(NUM_THREADS)
        pool = ParallelPool.here()
        self._pool, self._pool_file = pool.digest, folder / "pool.so"
        pool.build(self._pool_file)

    def make(self, model: ImportedModel, path: Path, folder: Path) -> TvmEngine:
        """`path` is the model's file, `folder` an empty one for the artifact. Every template has its first guess.

        Raises BuildFailed, LinkFailed and EngineError.
        """
        compiled = compile_model(model, self._target)
        libraries = {self._pool: self._pool_file}
        for call in compiled.kernels:
            libraries[call.digest] = folder / call.digest / KERNEL_FILE
            libraries[call.digest].parent.mkdir()
            call.build(self._target).export(libraries[call.digest])
        exported = export_artifact(compiled, model, _CONSTANTS, folder, self._pool)
        constants = derived_constants(model)

        def read(_: str) -> dict[str, Array]:
            return constants

        return TvmEngine.load(
            folder,
            exported.manifest,
            model=path,
            kernels=libraries,
            constants=read,
            runtime=self._runtime,
            packed=PackedWeights(),
        )
