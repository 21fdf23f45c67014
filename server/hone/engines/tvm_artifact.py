"""What an artifact says of itself: the part of its manifest that an engine needs to run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.errors import EngineError
from hone.types import NUMPY_DTYPES, TensorSpec

#: Changes whenever the meaning of the fields does; an artifact of another format is refused.
FORMAT = 3
#: The VM executable in an artifact's folder, and the kernel in a kernel's.
MODULE_FILE = "module.so"
KERNEL_FILE = "kernel.so"


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """Where a weight comes from: an initializer of the model file, or a tensor kept under `constants/<digest>`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    sha256: str
    initializer: str | None = None
    constants: str | None = None

    def fields(self) -> dict[str, Any]:
        source: dict[str, Any] = (
            {"source": "model", "initializer": self.initializer}
            if self.initializer is not None
            else {"source": "constants", "digest": self.constants, "key": self.name}
        )
        return {"datatype": self.datatype, "shape": list(self.shape), "sha256": self.sha256, **source}


@dataclass(frozen=True, slots=True)
class ArtifactManifest:
    """`parameters` are the arguments of `main_transform_params` in order; `packed` names its results in order.

    A packed weight's key is a digest of the contents of its sources and of the computation, so equal keys are equal
    weights, whichever artifact made them.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kernels: tuple[str, ...]
    parameters: tuple[ParameterSource, ...]
    packed: tuple[str, ...]
    returns_tuple: bool
    guarded: bool = False
    """`main` returns one thing more, the last: a scalar, INT32, that is 0 where its outputs do not count."""
    pool: str | None = None
    """Digest of the library that runs its parallel loops, kept like a kernel's; None where it has no such loop."""

    def fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "format": FORMAT,
            "inputs": [_spec_fields(spec) for spec in self.inputs],
            "outputs": [_spec_fields(spec) for spec in self.outputs],
            "kernels": list(self.kernels),
            "params": {source.name: source.fields() for source in self.parameters},
            "params_order": [source.name for source in self.parameters],
            "packed": list(self.packed),
            "returns_tuple": self.returns_tuple,
            "guarded": self.guarded,
            "pool": self.pool,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ArtifactManifest:
        """Raises EngineError naming the field that is missing or wrong."""
        if fields.get("format") != FORMAT:
            raise EngineError(f"the artifact's format is {fields.get('format')!r}, expected {FORMAT}: tune again")
        try:
            return cls(
                inputs=tuple(_spec(spec) for spec in fields["inputs"]),
                outputs=tuple(_spec(spec) for spec in fields["outputs"]),
                kernels=tuple(str(digest) for digest in fields["kernels"]),
                parameters=tuple(_source(name, fields["params"][name]) for name in fields["params_order"]),
                packed=tuple(str(key) for key in fields["packed"]),
                returns_tuple=bool(fields["returns_tuple"]),
                guarded=bool(fields["guarded"]),
                pool=None if fields["pool"] is None else str(fields["pool"]),
            )
        except (KeyError, TypeError, ValueError) as problem:
            raise EngineError(f"the artifact's manifest is incomplete: {type(problem).__name__} {problem}") from problem


def _spec_fields(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _spec(fields: Mapping[str, Any]) -> TensorSpec:
    datatype = str(fields["datatype"])
    if datatype not in NUMPY_DTYPES or datatype == "BYTES":
        raise ValueError(f"datatype '{datatype}' of '{fields['name']}' is not one of tensors")
    return TensorSpec(str(fields["name"]), datatype, tuple(int(dim) for dim in fields["shape"]))


def _source(name: str, fields: Mapping[str, Any]) -> ParameterSource:
    spec = _spec({"name": name, **fields})
    kind = fields["source"]
    if kind not in ("model", "constants"):
        raise ValueError(f"source '{kind}' of parameter '{name}' is neither 'model' nor 'constants'")
    return ParameterSource(
        name=name,
        datatype=spec.datatype,
        shape=spec.shape,
        sha256=str(fields["sha256"]),
        initializer=str(fields["initializer"]) if kind == "model" else None,
        constants=str(fields["digest"]) if kind == "constants" else None,
    )
