"""A second opinion on tiles: NVIDIA's nvMatmulHeuristics, where it is installed and knows the device.

It ranks configurations of a product by an analytical model, without a GPU. What it proposes and our rules hold legal
joins the candidates; it replaces none of them, and measurement decides. The package is optional and under NVIDIA's
licence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module, util
from typing import Any

from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.tiles import Access, Math, Problem, Tile, is_legal

PACKAGE = "nvMatmulHeuristics"
_COUNT = 8
#: Eight warps: the most that our own tiles have, and that were seen to compile.
_MAX_THREADS = 256

#: Parts of a device's name -> what the package calls it; the first that fits.
_DEVICES = (
    ("h200", "H200_SXM"),
    ("h100 pcie", "H100_PCIE"),
    ("h100 nvl", "H100_NVL"),
    ("h100", "H100_SXM"),
    ("a100 pcie", "A100_PCIE_80GB"),
    ("a100", "A100_SXM_80GB"),
    ("a10", "A10_PCIE"),
    ("a30", "A30_PCIE"),
    ("a40", "A40_PCIE"),
    ("l40s", "L40S"),
    ("l40", "L40"),
    ("l4", "L4"),
    ("4090", "RTX_4090"),
    ("3090", "RTX_3090"),
    ("a6000", "RTX_A6000"),
)
#: Inputs, sums and output as the package names them, one letter each.
_PRECISIONS = {"float16": "HSH", "bfloat16": "TST", "float32": "SSS"}


def proposed_tiles(
    dtype: str, math_: Math, problem: Problem, target: CudaTarget, access: Access, *, transpose_b: bool
) -> list[Tile]:
    """Legal tiles that the package proposes for a product of row-major matrices, the best first; none without it."""
    device = _device(target)
    if device is None or dtype not in _PRECISIONS or util.find_spec(PACKAGE) is None:
        return []
    layout = "TN_ROW_MAJOR" if transpose_b else "TT_ROW_MAJOR"
    found = _configurations(device, _PRECISIONS[dtype], layout, problem.m, problem.n, problem.k, problem.batch)
    tiles: list[Tile] = []
    for m, n, k, warp_m, warp_n, stages in found:
        if m % warp_m or n % warp_n:
            continue
        tile = Tile(m, n, k, m // warp_m, n // warp_n, stages)
        fits = (stages >= 3 or target.compute_capability < 80) and tile.num_threads <= _MAX_THREADS
        if fits and tile not in tiles and is_legal(tile, math_, target, access):
            tiles.append(tile)
    return tiles


def _device(target: CudaTarget) -> str | None:
    name = target.name.lower().replace("-", " ")
    return next((known for part, known in _DEVICES if part in name), None)


@cache
def _configurations(
    device: str, precision: str, layout: str, m: int, n: int, k: int, batch: int
) -> Sequence[tuple[int, int, int, int, int, int]]:
    """Tile (m, n, k), warp tile (m, n) and stages of each proposal."""
    interface, backend = _interface(device)
    package = import_module(PACKAGE)
    problem = interface.makeNvMatmulHeuristicsProblem(m, n, k, package.NvMatmulHeuristicsMatmulLayout[layout], batch)
    proposals = interface.getEx(problem, _COUNT, backend, precision=precision)
    kernels = [proposal["kernel"] for proposal in proposals]
    return [
        (one.cta_tile_m, one.cta_tile_n, one.cta_tile_k, one.warp_tile_m, one.warp_tile_n, one.stages)
        for one in kernels
    ]


@cache
def _interface(device: str) -> tuple[Any, Any]:
    """The package's own model of the device for CUTLASS 2.x kernels."""
    package = import_module(PACKAGE)
    kind = package.NvMatmulHeuristicsTarget["CUTLASS"]
    interface = package.NvMatmulHeuristicsInterfaceEx(
        backend=kind,
        flags=package.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        load_discovery_implicitly=True,
        gpu=package.NvMatmulHeuristicsNvidiaGpu[device],
    )
    return interface, interface.createBackend(kind)
