"""From scheduled functions to libraries: LLVM, then the C++ compiler as a linker."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx

from hone.compiler.mathematics import expand_transcendentals
from hone.compiler.target import CpuTarget
from hone.engines.tvm_parallel import BARRIER_VARIABLE, has_variable

#: Candidates in this order; the first on PATH links.
LINKERS = ("g++", "clang++", "c++")


_TOLD = "Error message:"


class BuildFailed(Exception):
    """No code could be made of a function: `reason` is the problem's first line. `is_of_the_machine`: for want of what
    the machine had at that time, so that another time may bring another outcome."""

    def __init__(self, what: str, problem: BaseException) -> None:
        self.reason = first_line(problem)
        self.is_of_the_machine = is_of_the_machine(problem)
        super().__init__(f"{what}: {self.reason}")


class GraphRefused(BuildFailed):
    """TVM does not take a graph: the same graph fails again, whatever is free or installed here."""


class CompilerEnded(Exception):
    """A compiler that is a program made nothing of a source; `log` is all that it said."""

    log: str
    is_refusal: bool
    """It ran to its end and said no: trying again gives the same."""


#: How C++, ONNX Runtime, compilers and linkers say that memory or room is short, or that something killed them.
_IN_WANT = re.compile(
    "|".join(
        (
            r"bad_alloc|Failed to allocate memory|memory exhausted|[Oo]ut of memory|[Cc]annot allocate memory",
            r"(Killed|Terminated) signal|died due to signal (7|9|15)\b|unable to execute command: Killed",
            r"Input/output error|Read-only file system|Too many open files",
            *(re.escape(os.strerror(number)) for number in (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        )
    )
)


def tells_of_want(words: str) -> bool:
    """Whether a message, or a compiler's log, says that the machine lacked something."""
    return _IN_WANT.search(words) is not None


def is_of_the_machine(problem: BaseException) -> bool:
    """Whether something failed for want of what the machine had at that time: it says nothing of the model."""
    if isinstance(problem, BuildFailed):
        return problem.is_of_the_machine
    if isinstance(problem, CompilerEnded):
        return not problem.is_refusal
    return isinstance(problem, (OSError, MemoryError, subprocess.TimeoutExpired)) or tells_of_want(str(problem))


def graph_problem(what: str, problem: BaseException) -> BuildFailed:
    """What failed, told by its cause: the machine's troubles are a BuildFailed, all else is a GraphRefused."""
    return BuildFailed(what, problem) if is_of_the_machine(problem) else GraphRefused(what, problem)


class LinkFailed(Exception):
    """No shared library could be made; the message holds the compiler's own words."""


@dataclass(frozen=True, slots=True)
class Library:
    """Built code in memory: callable in this process, and ready to be written as a shared library."""

    module: Any

    def function(self, name: str) -> Any:
        return self.module[name]

    @property
    def assembly(self) -> str:
        return str(self.module.inspect_source("asm"))

    def export(self, path: Path) -> None:
        link(self.module, path)


def build_functions(functions: Mapping[str, Any], target: CpuTarget) -> Library:
    """Compile scheduled PrimFuncs to machine code under the given names. Raises BuildFailed."""
    try:
        expanded = {
            name: expand_transcendentals(func).with_attr("global_symbol", name) for name, func in functions.items()
        }
        built = tvm.tirx.build(tvm.IRModule(expanded), target=target.tvm())
    except Exception as problem:  # TVM raises whatever its passes raise; a candidate that fails is a result
        raise BuildFailed(", ".join(functions), problem) from problem
    return Library(built)


def link(module: Any, path: Path) -> None:
    """Write a TVM runtime module and its imports as one shared library. Raises LinkFailed."""
    linker = find_linker()
    if linker is None:
        raise LinkFailed(f"no C++ compiler on PATH (looked for {', '.join(LINKERS)}): install g++ to build libraries")

    def create(output: str, objects: list[str], options: list[str] | None = None) -> None:
        # Unresolved symbols are TVM's runtime, which the loading process has.
        command = [linker, "-shared", "-fPIC", "-s", "-o", output, *objects, *(options or [])]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            told = (ran.stderr or ran.stdout).strip().splitlines()
            raise LinkFailed(f"{linker} exited with {ran.returncode}: {told[-1] if told else 'no message'}")

    create.output_format = "so"  # type: ignore[attr-defined]  # what TVM asks of a linker function
    create.object_format = "o"  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="hone-link-") as workspace:
        tvm.runtime.Executable(module).export_library(str(path), fcompile=create, workspace_dir=workspace)
    if has_variable(path, BARRIER_VARIABLE):
        path.unlink()
        raise LinkFailed("a parallel loop has a barrier between its tasks, which hone's pool of threads has not")


def find_linker() -> str | None:
    return next((found for name in LINKERS if (found := shutil.which(name))), None)


@cache
def toolchain() -> dict[str, str]:
    """Versions that change generated code."""
    return {
        "tvm": version("apache-tvm"),
        "tvm-ffi": version("apache-tvm-ffi"),
        "llvm": str(tvm.get_global_func("target.llvm_version_major")()),
    }


def source_digest(files: Iterable[Path]) -> str:
    """SHA-256 over files, in the order of their names."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()


def first_line(problem: BaseException) -> str:
    """TVM's messages hold code and C++ traces; what went wrong is the first line, or where it says so."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    told = [line.removeprefix(_TOLD).strip() for line in lines if line.startswith(_TOLD)]
    lines = told or lines
    return lines[0] if lines else type(problem).__name__


def build_executable(mod: Any, target: CpuTarget, exec_mode: str = "compiled") -> Library:
    """Phase 7: a lowered module becomes a VM executable.

    `main` is machine code too: interpreted, its calls and allocations cost 50 ns each, a quarter of a small net's time.
    With `exec_mode="bytecode"` it is interpreted, and can be watched call by call (`profile.py`). Raises BuildFailed,
    GraphRefused where that is for ever.
    """
    try:
        functions = {
            name: expand_transcendentals(func) if isinstance(func, tirx.PrimFunc) else func
            for name, func in mod.functions.items()
        }
        built = relax.build(
            tvm.IRModule(functions, attrs=mod.attrs), target=target.tvm(), relax_pipeline=None, exec_mode=exec_mode
        )
    except Exception as problem:  # as above
        raise graph_problem("phase 8 build", problem) from problem
    return Library(built.mod)
