"""Products by dot-product instructions: what their templates share, whatever the instruction multiplies.

Tiles and their costs, how threads share the work, and the values of `sources/dot_tile.cpp.jinja`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cpp.compiler import SourceCompiler, host_compiler
from hone.compiler.templates.cpp.epilogue import expressions, is_expressible
from hone.compiler.templates.cpp.geometry import Geometry
from hone.compiler.templates.cpp.render import render
from hone.compiler.templates.cpp.template import RenderedTemplate
from hone.compiler.workload import TensorType, Workload

MAX_CANDIDATES = 12

_DTYPE_CODES = {"float32": (2, 32), "bfloat16": (4, 16), "uint16": (1, 16), "int8": (0, 8)}  # DLPack's
_AMX_POSITIONS = 16
#: What the busiest of two threads does over half of all, where the other does next to nothing.
_IDLE = 1.9


class DotTemplate(RenderedTemplate):
    """A product whose workload asks for a precision (attribute `precision`)."""

    op: ClassVar[str]
    precision: ClassVar[str]
    #: What a kernel needs of the CPU, by LLVM's names, and what makes some tiles faster where it is there too.
    features: ClassVar[tuple[str, ...]]
    amx_features: ClassVar[tuple[str, ...]] = ()
    #: Bytes of one input in the buffer, and multiplications of one lane in one instruction.
    item_bytes: ClassVar[int]

    def geometry(self, workload: Workload) -> Geometry | None:
        raise NotImplementedError

    def takes(self, workload: Workload) -> bool:
        """Whether the dtypes and attributes are its own."""
        raise NotImplementedError

    def values(self, workload: Workload) -> Mapping[str, Any]:
        """What the source wants besides."""
        raise NotImplementedError

    def matches(self, workload: Workload, target: CpuTarget) -> bool:
        return (
            workload.op == self.op
            and dict(workload.attributes).get("precision") == self.precision
            and all(name in target.features for name in self.features)
            and 1 in workload.weights
            and self.takes(workload)
            and is_expressible(workload)
            and self.geometry(workload) is not None
        )

    def candidates(self, workload: Workload, target: CpuTarget) -> Sequence[Candidate]:
        geometry = self.checked_geometry(workload)
        parallel = _is_parallel(geometry, target)
        found: list[tuple[float, Candidate]] = []
        for rows, columns, vectors in _tiles(geometry, target):
            cost = _tiles_cost(geometry, rows, columns, vectors)
            chunk = _chunk_rows(geometry, rows, target, self.item_bytes)
            for split in (0, 1) if parallel else (0,):
                candidate = Candidate.of(
                    self.name, rows=rows, columns=columns, vectors=vectors, split=split, chunk=chunk
                )
                found.append((cost * (_imbalance(geometry, candidate) if parallel else 1.0), candidate))
        if parallel:  # a thread without work is never faster; on a busy machine it may look so
            shared = [pair for pair in found if _imbalance(geometry, pair[1]) < _IDLE]
            found = shared or found
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        # Both ways of sharing the work are tried: what caches make of it is not in the cost.
        kinds = [[one for _, one in found if one["split"] == split] for split in (0, 1)]
        best = [one for pair in itertools.zip_longest(*kinds) for one in pair if one is not None][:MAX_CANDIDATES]
        if found and best[0] != found[0][1]:
            best.remove(found[0][1])
            best.insert(0, found[0][1])
        if self._has_amx(target):
            best = [*_with_amx(self.name, best, geometry, target, self.item_bytes), *best][:MAX_CANDIDATES]
        return best

    def source(self, name: str, workload: Workload, candidate: Candidate, target: CpuTarget) -> str:
        g = self.checked_geometry(workload)
        packed = self.packing(workload, candidate, target)
        arguments = [packed[at].result if at in packed else tensor for at, tensor in enumerate(workload.inputs)]
        amx = bool(dict(candidate.parameters).get("amx", 0))
        return render(
            "dot_tile.cpp",
            {
                "name": name,
                "arguments": [_argument(tensor) for tensor in (*arguments, workload.output)],
                "parallel": _is_parallel(g, target),
                # Every task of a split over channels prepares all of the input: one for each thread, then.
                "num_tasks": target.num_threads if candidate["split"] and not g.direct else 0,
                "failure": "no memory for its buffer" + (", or no AMX from the system" if amx else ""),
                "s": g,
                "tile": {parameter: candidate[parameter] for parameter in ("rows", "columns", "vectors")},
                "chunk_rows": candidate["chunk"],
                "split": "channels" if candidate["split"] else "rows",
                "access": g.accesses,
                "steps": expressions(workload),
                "unroll": min(4, max(1, g.block * self.item_bytes // 4)),
                "amx": amx,
                **self.values(workload),
            },
        )

    def compiler(self, workload: Workload, candidate: Candidate, target: CpuTarget) -> SourceCompiler:
        amx = bool(dict(candidate.parameters).get("amx", 0))
        return host_compiler((*self.features, *(self.amx_features if amx else ())))

    def checked_geometry(self, workload: Workload) -> Geometry:
        """Raises ValueError for a workload that is not its kind."""
        geometry = self.geometry(workload)
        if geometry is None:
            raise ValueError(f"{self.name} does not take {workload}: ask matches() first")
        return geometry

    def _has_amx(self, target: CpuTarget) -> bool:
        return bool(self.amx_features) and all(name in target.features for name in self.amx_features)


def _argument(tensor: TensorType) -> dict[str, Any]:
    code, bits = _DTYPE_CODES[tensor.dtype]
    return {"shape": tensor.shape, "dtype": tensor.dtype, "code": code, "bits": bits}


def _is_parallel(geometry: Geometry, target: CpuTarget) -> bool:
    weight_bytes = 2 * geometry.outputs * geometry.depth
    return target.is_worth_threads(geometry.multiply_adds / 2, weight_bytes)


def _tiles(g: Geometry, target: CpuTarget) -> Iterable[tuple[int, int, int]]:
    """Rows, columns and vectors of every tile that fits: sums, a step's weights, and one repeated input."""
    rows = range(1, min(g.rows, 28) + 1) if g.columns == 1 else range(1, min(g.rows, 4) + 1)
    columns = range(1, min(g.columns, 28) + 1)
    for r, c, v in itertools.product(rows, columns, range(1, min(g.vectors, 12) + 1)):
        if r * c * v + v + 1 <= target.num_vector_registers:
            yield r, c, v


def _tiles_cost(g: Geometry, rows: int, columns: int, vectors: int) -> float:
    """Cycles per useful product of vectors, over all tiles: a step multiplies on two units and loads on two ports, and
    needs eight independent sums to hide its latency."""
    total = 0.0
    for r, num_r in _parts(g.rows, rows):
        for c, num_c in _parts(g.columns, columns):
            for v, num_v in _parts(g.vectors, vectors):
                step = max(r * c * v / 2, (r * c + v) / 2, 4.0) + 0.05 * (r * c + v)
                total += step * num_r * num_c * num_v
    return total / (g.rows * g.columns * g.vectors)


def _parts(size: int, part: int) -> list[tuple[int, int]]:
    """Whole parts and the rest: (length, how many)."""
    found = [(part, size // part)] if size >= part else []
    return found + ([(size % part, 1)] if size % part else [])


def _chunk_rows(g: Geometry, rows: int, target: CpuTarget, item_bytes: int) -> int:
    """Rows that are prepared at once: whole tiles of which the inputs take half of the second cache."""
    most = -(-g.rows // rows) * rows
    row_bytes = max(1, g.buffer_bytes(2 * rows, item_bytes) - g.buffer_bytes(rows, item_bytes))  # of `rows` more
    return min(most, max(1, (target.l2_bytes // 2) // row_bytes) * rows)


def _imbalance(g: Geometry, candidate: Candidate) -> float:
    """What the busier of two threads has to do, over half of all."""
    part, size = (candidate["vectors"], g.vectors) if candidate["split"] else (candidate["rows"], g.rows)
    num_parts = -(-size // part) * (1 if candidate["split"] else g.images)
    return -(-num_parts // 2) / (num_parts / 2)


def _with_amx(name: str, best: Sequence[Candidate], g: Geometry, target: CpuTarget, item_bytes: int) -> list[Candidate]:
    """Tiles of sixteen positions along one axis, up to four vectors."""
    rows, columns = (_AMX_POSITIONS, 1) if g.columns == 1 else (1, _AMX_POSITIONS)
    if g.rows < rows or g.columns < columns or g.block < 4:
        return []
    parallel = _is_parallel(g, target)
    return [
        Candidate.of(
            name,
            rows=rows,
            columns=columns,
            vectors=min(4, g.vectors),
            split=split,
            chunk=_chunk_rows(g, rows, target, item_bytes),
            amx=1,
        )
        for split in ((0, 1) if parallel else (0,))
    ]
