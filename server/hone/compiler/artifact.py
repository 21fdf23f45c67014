"""Phase 8, export: what a compiled model is on disk, and the manifest that lets an engine run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hone.compiler.build import Library, toolchain
from hone.compiler.choices import KernelCall
from hone.compiler.phases.packing import content_digest
from hone.engines.tvm_artifact import MODULE_FILE, ArtifactManifest, ParameterSource
from hone.types import NUMPY_DTYPES, Array, TensorSpec

_DATATYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name != "BYTES"}


class Weighted(Protocol):
    """What an artifact tells of the imported model."""

    @property
    def params(self) -> Mapping[str, Array]: ...
    @property
    def initializers(self) -> Mapping[str, str]: ...
    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def outputs(self) -> tuple[TensorSpec, ...]: ...
    @property
    def guarded(self) -> bool: ...


class Compiled(Protocol):
    """What an artifact tells of a compiled model, for whatever device it is."""

    @property
    def library(self) -> Library: ...
    @property
    def kernels(self) -> Sequence[KernelCall]: ...
    @property
    def packed(self) -> tuple[str, ...]: ...
    @property
    def returns_tuple(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class ExportedArtifact:
    """Files by the names that they have in the entry, and the manifest's part that concerns the engine."""

    files: dict[str, Path]
    manifest: dict[str, Any]

    def telling(self, **fields: Any) -> ExportedArtifact:
        """With a manifest that tells these, too."""
        return replace(self, manifest={**self.manifest, **fields})


def export_artifact(
    compiled: Compiled, model: Weighted, constants_digest: str | None, folder: Path, pool: str | None = None
) -> ExportedArtifact:
    """Write the executable into `folder`. `constants_digest` names the entry that keeps `derived_constants(model)`,
    `pool` the one with the library that runs parallel loops (see `parallel.ParallelPool`).

    Raises LinkFailed, and ValueError when the model has derived constants and no digest is given.
    """
    path = folder / MODULE_FILE
    compiled.library.export(path)
    sources = []
    for name, array in model.params.items():
        initializer = model.initializers.get(name)
        if initializer is None and constants_digest is None:
            raise ValueError(f"parameter '{name}' comes from no initializer, and no constants were kept")
        sources.append(
            ParameterSource(
                name=name,
                datatype=_DATATYPES[array.dtype],
                shape=tuple(array.shape),
                sha256=content_digest(array),
                initializer=initializer,
                constants=None if initializer is not None else constants_digest,
            )
        )
    manifest = ArtifactManifest(
        inputs=tuple(model.inputs),
        outputs=tuple(model.outputs),
        kernels=tuple(kernel.digest for kernel in compiled.kernels),
        parameters=tuple(sources),
        packed=compiled.packed,
        returns_tuple=compiled.returns_tuple,
        guarded=model.guarded,
        pool=pool,
    )
    return ExportedArtifact({MODULE_FILE: path}, {**manifest.fields(), "toolchain": toolchain()})


def derived_constants(model: Weighted) -> dict[str, Array]:
    """The weights that no initializer of the model file is equal to (folded ones): they are kept under `constants/`."""
    return {name: array for name, array in model.params.items() if name not in model.initializers}
