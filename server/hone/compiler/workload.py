"""A workload: one operator with its fused epilogue at concrete sizes, dtypes and layouts, and its name, a digest.

The epilogue is a small program in single-assignment form: value 0 is the operator's result, each step adds one. It
says what is computed and not how, so the same text names the same work in every model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.kernels.digest import digest_of


@dataclass(frozen=True, slots=True)
class TensorType:
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def fields(self) -> list[Any]:
        return [list(self.shape), self.dtype]


@dataclass(frozen=True, slots=True)
class Operand:
    """What a step reads: a "value" (0: the operator's result, i: step i's), an "input" by position, or a "constant"."""

    kind: str
    at: int = 0
    constant: float = 0.0

    def fields(self) -> list[Any]:
        return [self.kind, self.constant if self.kind == "constant" else self.at]


@dataclass(frozen=True, slots=True)
class Step:
    """One element-wise operation of an epilogue."""

    op: str
    operands: tuple[Operand, ...]

    def fields(self) -> list[Any]:
        return [self.op, [operand.fields() for operand in self.operands]]


@dataclass(frozen=True, slots=True)
class Workload:
    """`inputs` are the operator's operands, then the epilogue's, in the order of the kernel's arguments.

    Attribute `weights` holds the positions of the operands that are known at load time, which a kernel may want packed.
    """

    op: str
    inputs: tuple[TensorType, ...]
    output: TensorType
    attributes: tuple[tuple[str, Any], ...] = ()
    epilogue: tuple[Step, ...] = ()

    def attribute(self, name: str) -> Any:
        return dict(self.attributes)[name]

    @property
    def weights(self) -> tuple[int, ...]:
        return tuple(dict(self.attributes).get("weights", ()))

    def fields(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "inputs": [tensor.fields() for tensor in self.inputs],
            "output": self.output.fields(),
            "attributes": {name: _plain(value) for name, value in self.attributes},
            "epilogue": [step.fields() for step in self.epilogue],
        }

    @property
    def digest(self) -> str:
        return digest_of(self.fields())

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Workload:
        """The workload that `fields()` told."""
        return cls(
            op=fields["op"],
            inputs=tuple(TensorType(tuple(shape), dtype) for shape, dtype in fields["inputs"]),
            output=TensorType(tuple(fields["output"][0]), fields["output"][1]),
            attributes=tuple(sorted((name, _frozen(value)) for name, value in fields["attributes"].items())),
            epilogue=tuple(
                Step(
                    op,
                    tuple(
                        Operand(kind, constant=value) if kind == "constant" else Operand(kind, value)
                        for kind, value in operands
                    ),
                )
                for op, operands in fields["epilogue"]
            ),
        )

    def __str__(self) -> str:
        shapes = " x ".join("x".join(map(str, tensor.shape)) for tensor in self.inputs[:2])
        tail = "+".join(step.op for step in self.epilogue)
        return f"{self.op} {shapes}" + (f" +{tail}" if tail else "")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
