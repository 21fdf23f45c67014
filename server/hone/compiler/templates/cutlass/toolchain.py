"""nvcc and what it needs: where they are, which architectures they can make code for, and one build of one source.

Nothing here needs a GPU or its driver. The toolchain is the one that the `[cuda]` extra installs from PyPI, else an
installed CUDA toolkit; whichever it is, its version goes into digests, so kernels of two toolkits never mix.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

import tvm_ffi.libinfo

from hone.compiler.build import BuildFailed, CompilerEnded, tells_of_want
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.resources import KernelResources, parse_resources
from hone.compiler.templates.cutlass.slots import compiler_slot

_TIMEOUT_SECONDS = 900.0
_VERSION = re.compile(r"release \d+\.\d+, V([0-9.]+)")

#: All that changes code besides the architecture. No fast math: what is approximated is said in the sources.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-diag-suppress=20012,20013,20014,20015",  # host and device annotations that CUTLASS's headers leave to compilers
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-shared",
    "-cudart=none",
    "-Xptxas=-v",
    "-Xlinker=-s",
)


class ToolchainMissing(BuildFailed):
    """No kernels can be built here; the text says what is missing and what still works."""

    def __init__(self, missing: str) -> None:
        problem = FileNotFoundError(
            f"{missing}. Until then models on GPUs are answered by their baseline; all else goes on"
        )
        super().__init__("CUDA toolchain", problem)


#: How compilers say that there is no room for what they write.
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded")


class NvccFailed(CompilerEnded):
    """The message has nvcc's first error."""

    def __init__(self, ended: str, log: str, *, is_refusal: bool = False) -> None:
        self.log = log
        self.is_refusal = is_refusal
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()]
        super().__init__(f"nvcc {ended}: {(errors or lines or ['no message'])[0]}")


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What the compiler told of a build."""

    log: str
    resources: tuple[KernelResources, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class CudaToolchain:
    """A compiler for CUDA with CUTLASS's headers. Only what `fields` tells changes code."""

    nvcc: Path
    version: str
    architectures: tuple[str, ...]
    """As nvcc names them: "75", "80", "90a"."""
    cutlass: Path
    """The folder with CUTLASS's `include`, `tools` and `examples`."""
    cutlass_version: str
    libcudart: Path

    @property
    def examples(self) -> Path:
        return self.cutlass / "examples"

    def fields(self) -> dict[str, Any]:
        return {
            "nvcc": self.version,
            "cutlass": self.cutlass_version,
            "tvm_ffi": metadata.version("apache-tvm-ffi"),
            "flags": list(_FLAGS),
        }

    def supports(self, arch: str) -> bool:
        return arch in self.architectures

    def check_supports(self, arch: str) -> None:
        """Raises ToolchainMissing for an architecture that this nvcc does not know."""
        if not self.supports(arch):
            raise ToolchainMissing(
                f"nvcc {self.version} makes no code for sm_{arch}, only for {', '.join(self.architectures)}:"
                " install another CUDA toolkit"
            )

    def compile(
        self, source: str, output: Path, target: CudaTarget, *, num_gib: float = 1.0, folders: Sequence[Path] = ()
    ) -> CompileReport:
        """One source into one shared library. `folders` are further include folders; `num_gib` is what it will take.

        Waits for one of two compiler slots of this machine, and for that much free memory. Raises BuildFailed with an
        NvccFailed that holds the compiler's log, and ToolchainMissing for an architecture that this nvcc does not know.
        """
        self.check_supports(target.arch)
        # A twin has no device code that is run: one architecture for all keeps one build for all.
        arch = "80" if target.twin else target.arch
        try:
            return self._compile(source, output, arch, num_gib, folders)
        except OSError as problem:
            raise machine_failed(problem) from problem

    def _compile(self, source: str, output: Path, arch: str, num_gib: float, folders: Sequence[Path]) -> CompileReport:
        """Raises BuildFailed, OSError."""
        includes = [self.cutlass / "include", self.cutlass / "tools" / "util" / "include", *folders]
        includes += [Path(folder) for folder in tvm_ffi.libinfo.include_paths()]
        with tempfile.TemporaryDirectory(prefix="hone-nvcc-") as folder:
            path = Path(folder) / "kernel.cu"
            path.write_text(source, encoding="utf-8")
            command = [str(self.nvcc), *_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"]
            command += [part for include in includes for part in ("-I", str(include))]
            command += [f"-L{self.libcudart.parent}", f"-Xlinker=-l:{self.libcudart.name}"]
            command += ["-o", str(output), str(path)]
            with compiler_slot(num_gib) as slot:
                started = time.monotonic()
                ran = _run(command, Path(folder), slot)
                seconds = time.monotonic() - started
        log = ran.stdout + ran.stderr
        if ran.returncode != 0:
            if _NO_ROOM.search(log):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            is_refusal = ran.returncode > 0 and "error" in log and not tells_of_want(log)
            refused = NvccFailed(_ended(ran.returncode), log, is_refusal=is_refusal)
            raise BuildFailed("a CUTLASS kernel", refused) from refused
        return CompileReport(log, parse_resources(log), seconds)

    def disassemble(self, library: Path) -> str:
        """The machine code (SASS) in a library. Raises ToolchainMissing, BuildFailed."""
        tool = self._tool("cuobjdump")
        # cuobjdump runs nvdisasm, which it looks for on PATH.
        path = os.pathsep.join([str(tool.parent), os.defpath])
        ran = subprocess.run(
            [str(tool), "-sass", str(library)],
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
            env={"PATH": path},
            timeout=_TIMEOUT_SECONDS,
        )
        if ran.returncode != 0:
            raise BuildFailed(f"cuobjdump of {library}", NvccFailed(_ended(ran.returncode), ran.stderr))
        return ran.stdout

    def load_runtime(self) -> None:
        """Loads CUDA's runtime library, which kernels name without a folder; it needs no driver to be loaded."""
        ctypes.CDLL(str(self.libcudart), mode=ctypes.RTLD_GLOBAL)

    def _tool(self, name: str) -> Path:
        beside = self.nvcc.parent / name
        found = beside if beside.is_file() else shutil.which(name)
        if found is None:
            raise ToolchainMissing(f"{name} is neither beside {self.nvcc} nor on PATH: install nvidia-cuda-{name}")
        return Path(found)


def find_toolchain(cuda_home: Path | None = None) -> CudaToolchain:
    """PyPI's nvcc, else the one in `cuda_home`, else on PATH, with CUTLASS's headers from PyPI's `nvidia-cutlass`.

    Raises ToolchainMissing.
    """
    return _toolchain(cuda_home, os.environ.get("PATH", os.defpath))


@cache
def _toolchain(cuda_home: Path | None, path: str) -> CudaToolchain:
    nvcc = _find_nvcc(cuda_home, path)
    if shutil.which("g++", path=path) is None:
        raise ToolchainMissing("nvcc needs a host compiler, and there is no g++ on PATH: install g++")
    version = _VERSION.search(_ask(nvcc, "--version"))
    if version is None:
        raise ToolchainMissing(f"{nvcc} --version names no release: is it NVIDIA's compiler?")
    # `--list-gpu-code` leaves out the architectures with suffix "a", which come with their plain one from 9.0 on.
    plain = re.findall(r"sm_(\d+)\b", _ask(nvcc, "--list-gpu-code"))
    own = [f"{number}a" for number in plain if int(number) >= 90]
    cutlass = _find_cutlass()
    return CudaToolchain(
        nvcc=nvcc,
        version=version[1],
        architectures=(*plain, *own),
        cutlass=cutlass,
        cutlass_version=metadata.version("nvidia-cutlass"),
        libcudart=_find_cudart(nvcc),
    )


def _find_nvcc(cuda_home: Path | None, path: str) -> Path:
    from_pypi = sorted(nvcc for folder in _pypi_folders() if (nvcc := folder / "bin" / "nvcc").is_file())
    if from_pypi:
        return from_pypi[-1]
    if cuda_home is not None:
        nvcc = cuda_home / "bin" / "nvcc"
        if nvcc.is_file():
            return nvcc
        raise ToolchainMissing(f"{cuda_home} is named as the CUDA toolkit, and has no bin/nvcc")
    found = shutil.which("nvcc", path=path)
    if found is None:
        raise ToolchainMissing("there is no nvcc, neither from PyPI (pip install 'hone[cuda]') nor on PATH")
    return Path(found).resolve()


def _find_cutlass() -> Path:
    found = util.find_spec("cutlass_library")
    places = list(found.submodule_search_locations or ()) if found else []
    for place in places:
        folder = Path(place) / "source"
        if (folder / "include" / "cutlass" / "cutlass.h").is_file():
            return folder
    raise ToolchainMissing("CUTLASS's headers are missing: install nvidia-cutlass (pip install 'hone[cuda]')")


def _find_cudart(nvcc: Path) -> Path:
    root = nvcc.parent.parent
    for folder in ("lib", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        found = sorted((root / folder).glob("libcudart.so.[0-9]*"), key=lambda path: len(path.name))
        if found:
            return found[0]
    raise ToolchainMissing(f"no libcudart.so belongs to {nvcc}: install nvidia-cuda-runtime")


def _pypi_folders() -> list[Path]:
    """Where PyPI's packages put a CUDA toolkit: `nvidia/cu<major>`."""
    found = util.find_spec("nvidia")
    places = list(found.submodule_search_locations or ()) if found else []
    return [folder for place in places for folder in Path(place).glob("cu[0-9]*")]


def _ask(nvcc: Path, flag: str) -> str:
    try:
        ran = subprocess.run([str(nvcc), flag], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as problem:
        raise ToolchainMissing(f"{nvcc} {flag} does not answer: {problem}") from problem
    return ran.stdout


def _run(command: Sequence[str], folder: Path, slot: int) -> subprocess.CompletedProcess[str]:
    """`slot` is the descriptor of the compiler's slot: the compiler and its parts hold it too, so that it is free only
    when they have ended, also where this process is killed."""
    environment: Mapping[str, str] = {**os.environ, "TMPDIR": str(folder)}  # its leftovers go with the folder
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
            env=environment,
            pass_fds=(slot,),
        )
    except subprocess.TimeoutExpired:
        told = NvccFailed(f"took more than {_TIMEOUT_SECONDS:.0f} s", "", is_refusal=True)
        raise BuildFailed("a CUTLASS kernel", told) from told


def machine_failed(problem: OSError) -> BuildFailed:
    """What the machine lacked while a kernel was built, and what can be done: to be raised from the problem."""
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        told = (
            f"{problem.strerror} in {tempfile.gettempdir()}, where compilers work: make room, or let TMPDIR name"
            " another folder. Kernels that are built already still serve"
        )
        problem = OSError(problem.errno, told)
    return BuildFailed("a CUTLASS kernel", problem)


def _ended(returncode: int) -> str:
    return f"was ended by signal {-returncode}" if returncode < 0 else f"exited with {returncode}"
