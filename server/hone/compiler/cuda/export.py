"""Phase 11, export: an artifact as for CPUs, which tells beside what GPU it is for and what compiled it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hone.compiler.artifact import ExportedArtifact, Weighted, export_artifact
from hone.compiler.cuda.pipeline import CompiledCudaModel
from hone.compiler.templates.cutlass.toolchain import CudaToolchain


def export_cuda_artifact(
    compiled: CompiledCudaModel,
    model: Weighted,
    constants_digest: str | None,
    folder: Path,
    toolchain: CudaToolchain | None,
) -> ExportedArtifact:
    """See `export_artifact`. Raises LinkFailed, ValueError."""
    artifact = export_artifact(compiled, model, constants_digest, folder)
    told = dict(artifact.manifest)
    told["target"] = compiled.target.fields()
    if toolchain is not None:
        told["toolchain"] = {**told["toolchain"], "nvcc": toolchain.version, "cutlass": toolchain.cutlass_version}
    return replace(artifact, manifest=told)
