"""What a block of TIR does with memory: its loops, and how far each step of a loop moves in every buffer it touches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import tvm_ffi.structural
from tvm import ir, sym, tirx
from tvm.s_tir import SBlockRealize, Schedule

from hone.compiler.mathematics import nesting

#: tirx.IterVar's kinds.
_SPATIAL, _REDUCTION = 0, 2

#: Operations that an arithmetic function of one argument stands for, roughly.
_CALL_OPERATIONS = {"tirx.exp": 20, "tirx.tanh": 25, "tirx.erf": 30, "tirx.log": 20, "tirx.sigmoid": 22, "tirx.pow": 40}
#: LLVM 22 makes wrong vectors of these, or none: of a tangent, and of a sine and a cosine in one loop, which it
#: computes together. Of single numbers its code is right.
_WITHOUT_VECTORS = tuple(
    frozenset(f"tirx.{name}" for name in names) for names in (("tan",), ("sinh",), ("cosh",), ("sin", "cos"))
)


class NotApplicable(Exception):
    """A schedule is for other functions: an answer, after which the next rule is tried."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop of a block and what a step of it moves, in items: `writes`, then each read (None: not a fixed step)."""

    rv: Any
    extent: int
    is_reduction: bool
    write: int | None
    reads: tuple[int | None, ...]

    @property
    def contiguous(self) -> bool:
        """Whether its steps can be lanes of a vector: neighbours in what is written, neighbours or one where read."""
        return self.write == 1 and all(step in (0, 1) for step in self.reads)

    @property
    def contiguous_reduction(self) -> bool:
        return self.is_reduction and 1 in self.reads and all(step in (0, 1) for step in self.reads)


@dataclass(frozen=True, slots=True)
class Block:
    """A block whose loops are plain: one loop an axis, from zero to a number, what is reduced innermost."""

    rv: Any
    name: str
    loops: tuple[Loop, ...]
    operations: int
    num_bytes: int
    nesting: int
    """Transcendental functions in each other's arguments (`mathematics.nesting`)."""
    has_vectors: bool
    """Whether LLVM makes right vectors of its arithmetic."""

    @property
    def spatial(self) -> tuple[Loop, ...]:
        return tuple(loop for loop in self.loops if not loop.is_reduction)

    @property
    def reduction(self) -> tuple[Loop, ...]:
        return tuple(loop for loop in self.loops if loop.is_reduction)

    def moved(self, schedule: Schedule, shared: int) -> Block:
        """The block after it was computed at a loop that stands for its first `shared` axes: what is left of it."""
        rvs = list(schedule.get_loops(self.rv))[-len(self.loops) :]
        loops = tuple(replace(loop, rv=rv) for loop, rv in zip(self.loops, rvs, strict=True))
        return replace(self, loops=loops[shared:])

    @property
    def points(self) -> int:
        return prod(loop.extent for loop in self.loops)


def root_blocks(schedule: Schedule) -> list[Any]:
    """The blocks of a function in program order; none where it is not made of blocks under a root."""
    realize = schedule.mod["main"].body
    if not isinstance(realize, SBlockRealize) or str(realize.block.name_hint) != "root":
        return []
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def read_block(schedule: Schedule, rv: Any) -> Block | None:
    """The block, or None where its loops are not plain (opaque code, sizes known at run time only) or never run."""
    block = schedule.get(rv)
    loops = schedule.get_loops(rv)
    variables = list(block.iter_vars)
    if len(loops) != len(variables) or len(block.writes) != 1:
        return None
    kinds = [int(variable.iter_type) for variable in variables]
    if kinds != sorted(kinds) or not set(kinds) <= {_SPATIAL, _REDUCTION}:
        return None
    extents = [_extent(schedule.get(loop)) for loop in loops]
    if None in extents or 0 in extents:
        return None
    sizes = [int(extent) for extent in extents if extent is not None]
    analyzer = sym.Analyzer()
    for variable, size in zip(variables, sizes, strict=True):
        analyzer.bind(variable.var, ir.Range(0, size))
    write = _places(block.writes[0], analyzer)
    # A reduction reads what it writes: that is not a read of its own.
    reads = [_places(region, analyzer) for region in block.reads if not region.source.same_as(block.writes[0].source)]
    return Block(
        rv=rv,
        name=str(block.name_hint),
        loops=tuple(
            Loop(
                rv=loop,
                extent=size,
                is_reduction=int(variable.iter_type) == _REDUCTION,
                write=_step(write, variable.var),
                reads=tuple(_step(places, variable.var) for places in reads),
            )
            for loop, size, variable in zip(loops, sizes, variables, strict=True)
        ),
        operations=_operations(block.body),
        num_bytes=sum(_num_bytes(region.source) for region in (*block.reads, *block.writes)),
        nesting=nesting(block.body),
        has_vectors=not any(names <= _functions(block.body) for names in _WITHOUT_VECTORS),
    )


def loops_of_axes(schedule: Schedule, rv: Any) -> list[list[Any]]:
    """For each axis of a block, in its order, the loops that it is made of, wherever they are."""
    block = schedule.get(rv)
    found: list[Any] = []

    def see(realize: Any) -> None:
        if realize.block.same_as(block):
            found.append(realize)

    tvm_ffi.structural.structural_walk(schedule.mod["main"].body, (SBlockRealize, see))
    (realize,) = found
    loops = [(loop, schedule.get(loop).loop_var) for loop in schedule.get_loops(rv)]
    return [[loop for loop, variable in loops if _mentions(value, variable)] for value in realize.iter_values]


def _mentions(expression: Any, variable: Any) -> bool:
    seen = False

    def see(other: Any) -> None:
        nonlocal seen
        seen = seen or other.same_as(variable)

    tvm_ffi.structural.structural_walk(expression, (ir.Var, see))
    return seen


def _extent(loop: Any) -> int | None:
    extent, start = loop.extent, loop.min
    if not isinstance(extent, tirx.IntImm) or not isinstance(start, tirx.IntImm) or int(start) != 0:
        return None
    return int(extent)


def _places(region: Any, analyzer: Any) -> list[tuple[Any, int]] | None:
    """Each index of the one item that a region names, and how far one more of it is; None for a true region."""
    places: list[tuple[Any, int]] = []
    stride = 1
    for dim, span in zip(reversed(region.source.shape), reversed(region.region), strict=True):
        if not isinstance(dim, tirx.IntImm) or not isinstance(span.extent, tirx.IntImm) or int(span.extent) != 1:
            return None
        places.append((analyzer.simplify(span.min), stride))
        stride *= int(dim)
    return places


def _step(places: list[tuple[Any, int]] | None, variable: Any) -> int | None:
    """How far a step of the variable moves; None where that depends (on data, or on a division that TVM would keep)."""
    if places is None:
        return None
    total = 0
    for index, stride in places:
        linear = sym.detect_linear_equation(index, [variable])
        if len(linear) != 2 or not isinstance(linear[0], tirx.IntImm):
            return None
        total += int(linear[0]) * stride
    return total


def _operations(body: Any) -> int:
    """Arithmetic of one point."""
    count = 0

    def see(node: Any) -> None:
        nonlocal count
        if isinstance(node, ir.Call):
            count += _CALL_OPERATIONS.get(str(getattr(node.op, "name", "")), 2)
        elif str(getattr(node.ty, "dtype", "")).startswith("float"):
            count += 1

    kinds = (ir.Call, tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, tirx.Select)
    tvm_ffi.structural.structural_walk(body, (kinds, see))
    return max(count, 1)


def _functions(body: Any) -> set[str]:
    """Names of the functions that are called."""
    names: set[str] = set()
    tvm_ffi.structural.structural_walk(body, (ir.Call, lambda call: names.add(str(getattr(call.op, "name", "")))))
    return names


def _num_bytes(buffer: Any) -> int:
    digits = "".join(ch for ch in str(buffer.dtype) if ch.isdigit())
    item = max(1, int(digits) // 8) if digits else 1
    return item * prod(int(dim) for dim in buffer.shape if isinstance(dim, tirx.IntImm))
