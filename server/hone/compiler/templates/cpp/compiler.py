"""A compiler as a value: the command, its flags and what tells one version from another."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tvm_ffi.libinfo

from hone.compiler.build import LINKERS, BuildFailed, CompilerEnded, tells_of_want

#: Extensions of the instruction set that kernels ask for -> the compiler's flag. Named one by one: a compiler may not
#: know the CPU's own name yet.
_FEATURE_FLAGS = {
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
    "avx512vnni": "-mavx512vnni",
    "avx512bf16": "-mavx512bf16",
    "fma": "-mfma",
    "amx-tile": "-mamx-tile",
    "amx-bf16": "-mamx-bf16",
    "amx-int8": "-mamx-int8",
}
_TIMEOUT_SECONDS = 120.0


class CompilerFailed(CompilerEnded):
    """The message has the compiler's first error. `returncode` is None where its time was up."""

    def __init__(self, command: str, returncode: int | None, log: str) -> None:
        self.log = log
        self.is_refusal = returncode is not None and returncode > 0 and not tells_of_want(log)
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        ended = f"exited with {returncode}" if returncode is not None else f"took more than {_TIMEOUT_SECONDS:.0f} s"
        super().__init__(f"{Path(command).name} {ended}: {(errors or lines or ['no message'])[0]}")


@dataclass(frozen=True, slots=True)
class SourceCompiler:
    """Makes a shared library of one source file.

    `command` is the program's name or path, `suffix` what its sources are called (".cpp", ".cu"). `flags` are all that
    changes code, and go into digests with `version`; `folders` are include folders, which do not.
    """

    command: str
    suffix: str
    flags: tuple[str, ...]
    folders: tuple[Path, ...] = ()

    def fields(self) -> dict[str, Any]:
        return {"command": Path(self.command).name, "version": _version(self.command), "flags": list(self.flags)}

    def compile(self, source: str, output: Path) -> None:
        """Raises BuildFailed with a CompilerFailed that tells the compiler's words."""
        with tempfile.TemporaryDirectory(prefix="hone-compile-") as folder:
            path = Path(folder) / f"kernel{self.suffix}"
            path.write_text(source, encoding="utf-8")
            includes = [part for include in self.folders for part in ("-I", str(include))]
            self._run([self.command, *self.flags, *includes, "-o", str(output), str(path)])

    def assembly(self, source: str) -> str:
        """What the compiler makes of it, as text."""
        with tempfile.TemporaryDirectory(prefix="hone-compile-") as folder:
            path, output = Path(folder) / f"kernel{self.suffix}", Path(folder) / "kernel.s"
            path.write_text(source, encoding="utf-8")
            includes = [part for include in self.folders for part in ("-I", str(include))]
            self._run([self.command, *self.flags, *includes, "-S", "-o", str(output), str(path)])
            return output.read_text(encoding="utf-8")

    def _run(self, command: Sequence[str]) -> None:
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, check=False, errors="replace", timeout=_TIMEOUT_SECONDS
            )
        except subprocess.TimeoutExpired as problem:
            raise BuildFailed("a rendered kernel", CompilerFailed(self.command, None, "")) from problem
        except OSError as problem:
            raise BuildFailed("a rendered kernel", problem) from problem
        if ran.returncode != 0:
            raise BuildFailed(
                "a rendered kernel", CompilerFailed(self.command, ran.returncode, ran.stderr or ran.stdout)
            )


def host_compiler(features: Sequence[str]) -> SourceCompiler:
    """The C++ compiler on PATH for a CPU with these extensions. Raises BuildFailed when there is none."""
    command = next((found for name in LINKERS if (found := shutil.which(name))), None)
    if command is None:
        missing = FileNotFoundError(f"no C++ compiler on PATH (looked for {', '.join(LINKERS)}): install g++")
        raise BuildFailed("a rendered kernel", missing)
    flags = ("-std=c++17", "-O3", "-fPIC", "-shared", "-s", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti")
    return SourceCompiler(
        command,
        ".cpp",
        (*flags, *(_FEATURE_FLAGS[feature] for feature in features)),
        tuple(Path(folder) for folder in tvm_ffi.libinfo.include_paths()),
    )


@cache
def _version(command: str) -> str:
    ran = subprocess.run([command, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return ran.stdout.strip().splitlines()[0] if ran.stdout.strip() else "unknown"
