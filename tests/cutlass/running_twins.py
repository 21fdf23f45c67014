"""Runs what the compiler for GPUs made, without one: twins in place of kernels, in artifacts, by the tuned engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hone.compiler.artifact import derived_constants
from hone.compiler.choices import Choices
from hone.compiler.cuda.export import export_cuda_artifact
from hone.compiler.cuda.pipeline import compile_cuda_model
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.phases.precision import Precision
from hone.compiler.templates.cutlass.published import published_kernel
from hone.compiler.templates.cutlass.toolchain import find_toolchain
from hone.engines.tvm import PackedWeights, TvmEngine
from hone.engines.tvm_runtime import TvmRuntime
from tests.cutlass.models import SmallModel

TWIN = CudaTarget.preset("a100").as_twin()

#: Largest difference, as a part of the outputs' largest magnitude.
TOLERANCES = {"f32": 2e-6, "tf32": 4e-3, "f16": 6e-3, "bf16": 4e-2}


def imported(model: SmallModel) -> ImportedModel:
    found = import_model(model.path, model.shapes)
    assert isinstance(found, ImportedModel), found
    return found


def choices_of(precision: str, **told) -> Choices:
    return Choices(precision=Precision(precision), **told)


def assert_near(outputs, wanted, tolerance: float) -> None:
    assert len(outputs) == len(wanted)
    for found, expected in zip(outputs, wanted, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def run_twins(model: SmallModel, choices: Choices, cache, folder: Path):
    """The compiled model, and its outputs as the engine gives them from the exported artifact."""
    source = imported(model)
    compiled = compile_cuda_model(source, TWIN, choices)
    constants = derived_constants(source)
    artifact = export_cuda_artifact(compiled, source, "derived", folder, None)
    find_toolchain().load_runtime()  # as the engine for GPUs does: kernels name CUDA's runtime without a folder
    kernels = {
        call.digest: published_kernel(cache, call.template, call.workload, call.candidate, TWIN).path
        for call in compiled.kernels
    }
    engine = TvmEngine.load(
        folder,
        artifact.manifest,
        model=model.path,
        kernels=kernels,
        constants=lambda _: constants,
        runtime=TvmRuntime.load(num_threads=1),
        packed=PackedWeights(),
    )
    return compiled, engine.instantiate().run(model.inputs, [spec.name for spec in engine.outputs])
