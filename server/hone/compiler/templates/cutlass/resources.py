"""What a kernel takes of the GPU, by the compiler's own report (`ptxas -v`)."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

_FUNCTION = re.compile(r"Compiling entry function '([^']+)' for")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class KernelResources:
    """One entry function. `shared_bytes` is static shared memory only; CUTLASS's kernels ask for theirs at launch."""

    function: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def parse_resources(log: str) -> tuple[KernelResources, ...]:
    """Every entry function that ptxas tells of, in its order. Device functions that are called are left out."""
    found: list[KernelResources] = []
    function, spills = "", (0, 0, 0)
    for line in log.splitlines():
        if entry := _FUNCTION.search(line):
            function = entry[1]
        elif told := _SPILLS.search(line):
            spills = (int(told[1]), int(told[2]), int(told[3]))
        elif (used := _REGISTERS.search(line)) and function:
            shared = _SHARED.search(line)
            found.append(KernelResources(function, int(used[1]), int(shared[1]) if shared else 0, *spills))
            function, spills = "", (0, 0, 0)
    return tuple(found)
