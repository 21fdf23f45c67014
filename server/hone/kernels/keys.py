"""Keys: every field that changes what is kept, by name, so that none is forgotten.

An entry's digest is `key.digest`; its manifest carries `key.fields` as `"key"`, which is checked against the digest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from hone.kernels.digest import JSON, digest_of
from hone.kernels.entry import SCHEMA, Kind


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Versions of what makes binaries; "none" for what took no part."""

    tvm: str
    tvm_ffi: str
    llvm: str
    cxx: str
    nvcc: str
    cutlass: str


class _Key:
    kind: ClassVar[Kind]

    @cached_property
    def fields(self) -> dict[str, JSON]:
        """All fields as JSON, and the kind; what `digest` is of."""
        plain: Any = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {"kind": self.kind, **plain}

    @cached_property
    def digest(self) -> str:
        return digest_of(self.fields)


@dataclass(frozen=True)
class KernelKey(_Key):
    """One built candidate: a library with one function. No device in it, only the architecture."""

    kind: ClassVar[Kind] = "kernels"

    template: str
    candidate: Mapping[str, JSON]
    workload: Mapping[str, JSON]
    source_sha256: str
    """Of what is compiled, or, where code is generated from a template, of the template's sources."""
    flags: tuple[str, ...]
    architecture: str
    toolchain: Toolchain
    schema: int = SCHEMA


@dataclass(frozen=True)
class DecisionKey(_Key):
    """Which candidates won for a workload on a kind of device."""

    kind: ClassVar[Kind] = "decisions"

    workload: Mapping[str, JSON]
    templates_sha256: str
    """Of the sources of all templates that were to propose candidates."""
    precision: str
    device: str
    toolchain: Toolchain
    schema: int = SCHEMA


@dataclass(frozen=True)
class ArtifactKey(_Key):
    """One specialization: a signature of a model's graph and weights on a kind of device."""

    kind: ClassVar[Kind] = "artifacts"

    graph_sha256: str
    weights_sha256: str
    signature: Mapping[str, JSON]
    precision: str
    objective: str
    templates_sha256: str
    pipeline_sha256: str
    """Of the compiler's own sources: the same graph and another pass make another module."""
    flags: tuple[str, ...]
    device: str
    toolchain: Toolchain
    schema: int = SCHEMA
