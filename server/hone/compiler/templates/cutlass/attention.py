"""Fused attention by the kernel of CUTLASS's example 41: softmax(Q K^T scale + mask) V, its scores kept on the chip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.elements import ELEMENTS, arguments_of
from hone.compiler.templates.cutlass.epilogue import DTYPE_BYTES, MAX_ACCESS_BYTES, EpilogueProgram, literal
from hone.compiler.templates.cutlass.kernel import CutlassTemplate, Recipe
from hone.compiler.workload import Workload

#: Items of a head's row that are read at once: at least so many.
_MIN_ALIGNMENT = 4
#: Values that are deeper than a block's keys are summed in memory, in float32.
_ANY_DEPTH = 65536
#: (queries, keys) of a block: four or eight warps of 32 x 32 scores.
_BLOCKS = ((64, 64), (32, 128), (64, 128))
_FOLDERS = ("examples/41_fused_multi_head_attention",)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Of the problem that an attention workload poses."""

    batch: int
    heads: int
    queries: int
    keys: int
    depth: int
    depth_values: int

    @classmethod
    def of(cls, workload: Workload) -> AttentionSizes | None:
        """None where a head's row is not in one piece, or where sizes do not fit each other."""
        told = dict(workload.attributes)
        layouts = tuple(told.get("layouts", ()))
        if workload.op != "attention" or len(layouts) != 3 or len(workload.inputs) != 3 + bool(told.get("masked")):
            return None
        tensors = (*workload.inputs[:3], workload.output)
        sizes = []
        for layout, tensor in zip((*layouts, told.get("output_layout", "")), tensors, strict=True):
            letters = [letter for letter in layout if letter.isalpha()]
            if len(layout) != len(tensor.shape) or layout[-1:] != "d" or not set("sd") <= set(letters) <= set("bhsd"):
                return None
            if len(set(letters)) != len(letters) or 0 in tensor.shape:
                return None
            sizes.append({letter: dim for letter, dim in zip(layout, tensor.shape, strict=True) if letter.isalpha()})
        query, key, value, output = sizes
        for size in (key, value, output):
            if any(size.get(letter, 1) != query.get(letter, 1) for letter in "bh"):
                return None
        if key["d"] != query["d"] or value["s"] != key["s"]:
            return None
        if (output["s"], output["d"]) != (query["s"], value["d"]):
            return None
        return cls(query.get("b", 1), query.get("h", 1), query["s"], key["s"], query["d"], value["d"])

    @property
    def multiply_adds(self) -> int:
        return self.batch * self.heads * self.queries * self.keys * (self.depth + self.depth_values)


class FusedAttention(CutlassTemplate):
    """Queries, keys and values of many heads: float16, from 8.0 on also bfloat16, and float32.

    Attribute `layouts` tells each of the first three inputs' dimensions by letters, b(atch) h(ead) s(equence) d(epth),
    or by a digit where only that index of a dimension is meant; `output_layout` the output's; depth is innermost.
    Attribute `scale` multiplies scores. Where `masked`, the fourth input is broadcast to (batch, head, query, key) and
    added to them. float32 is multiplied as three tf32 products of its parts, or without tensor cores.
    """

    name = "cutlass.attention"

    def matches(self, workload: Workload, target: CudaTarget) -> bool:
        sizes = AttentionSizes.of(workload)
        if sizes is None or workload.epilogue or target.arch not in ("75", "80", "86", "89", "90a"):
            return False
        dtype = workload.inputs[0].dtype
        known = ("float16", "float32") if target.compute_capability < 80 else ("float16", "bfloat16", "float32")
        if dtype not in known or any(tensor.dtype != dtype for tensor in (*workload.inputs, workload.output)):
            return False
        if sizes.depth % _MIN_ALIGNMENT or sizes.depth_values % _MIN_ALIGNMENT:
            return False
        return not workload.attribute("masked") or _mask_fits(workload, sizes)

    def candidates(self, workload: Workload, target: CudaTarget) -> Sequence[Candidate]:
        sizes = self._checked(workload, target)
        found = []
        for queries, keys in _BLOCKS:
            if (queries, keys) == (64, 128) and (
                target.compute_capability < 80 or workload.inputs[0].dtype == "float32"
            ):
                continue  # two such blocks would not fit a multiprocessor
            # Values no deeper than a block's keys stay in registers until the end.
            depth = keys if sizes.depth_values <= keys else _ANY_DEPTH
            cost = _cost(sizes, queries, keys, depth, target)
            found.append((cost, Candidate.of(self.name, queries=queries, keys=keys, max_depth=depth)))
        found.sort(key=lambda pair: (pair[0], str(pair[1])))
        return [candidate for _, candidate in found]

    def workspace_bytes(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> int:
        sizes = self._checked(workload, target)
        if target.twin or candidate["max_depth"] <= candidate["keys"] or workload.output.dtype == "float32":
            return 0
        return sizes.batch * sizes.heads * sizes.queries * sizes.depth_values * 4

    def recipe(self, workload: Workload, candidate: Candidate, target: CudaTarget) -> Recipe:
        sizes = self._checked(workload, target)
        dtype = workload.inputs[0].dtype
        wide = MAX_ACCESS_BYTES // DTYPE_BYTES[dtype]
        aligned = sizes.depth % wide == 0 and sizes.depth_values % wide == 0
        masked = bool(workload.attribute("masked"))
        align = 1 if target.twin else wide if aligned else _MIN_ALIGNMENT
        output = EpilogueProgram((), (), workload.output.dtype)
        operands = (align,) * 3 + ((1 if target.twin else wide,) if masked else ())
        values: dict[str, Any] = {
            "twin": target.twin,
            "items": dict(ELEMENTS),
            "arguments": arguments_of(workload, output, operands, align),
            "element": ELEMENTS[dtype],
            "layouts": list(workload.attribute("layouts")),
            "output_layout": workload.attribute("output_layout"),
            "masked": masked,
            "mask_alignment": 1 if target.twin else wide,
            "alignment": align,
            "scale": literal(float(workload.attribute("scale"))),
        }
        if target.twin:
            return Recipe("attention_twin.cu", values)
        values |= {
            "arch_tag": "Sm80" if target.compute_capability >= 80 else "Sm75",
            "aligned": aligned,
            "queries": candidate["queries"],
            "keys": candidate["keys"],
            "max_depth": candidate["max_depth"],
            "max_shared_bytes": target.max_shared_memory_per_block,
        }
        return Recipe("attention.cu", values, num_gib=1.5, folders=_FOLDERS)

    def _checked(self, workload: Workload, target: CudaTarget) -> AttentionSizes:
        """Raises ValueError for a workload that is not its kind."""
        sizes = AttentionSizes.of(workload)
        if sizes is None or not self.matches(workload, target):
            raise ValueError(f"{self.name} does not take {workload}: ask matches() first")
        return sizes


def _mask_fits(workload: Workload, sizes: AttentionSizes) -> bool:
    """Whether it varies over keys and broadcasts to the scores, and whether vectors of keys can be read."""
    mask = workload.inputs[3]
    full = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    if len(mask.shape) > 4 or mask.shape[-1:] != (sizes.keys,):
        return False
    shape = (1,) * (4 - len(mask.shape)) + tuple(mask.shape)
    broadcasts = all(dim in (1, out) for dim, out in zip(shape, full, strict=True))
    return broadcasts and sizes.keys % (MAX_ACCESS_BYTES // DTYPE_BYTES[mask.dtype]) == 0


def _cost(sizes: AttentionSizes, queries: int, keys: int, depth: int, target: CudaTarget) -> float:
    """Orders candidates: rounds of blocks, and what each walks over."""
    num_blocks = sizes.batch * sizes.heads * -(-sizes.queries // queries)
    resident = max(1, 16 // (queries * keys // 1024))
    rounds = math.ceil(num_blocks / (target.num_sms * resident))
    steps = -(-sizes.keys // keys)
    products = queries * keys * (sizes.depth + -(-sizes.depth_values // keys) * keys)
    in_memory = 1.3 if depth == _ANY_DEPTH else 1.0
    return rounds * steps * products * resident * in_memory
