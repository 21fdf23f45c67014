"""The library with hone's pool of threads for parallel loops: named by digest and built like a kernel (`pool.cpp`).

A server loads it beside the first artifact that has parallel loops; the compiler loads it before it measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hone.compiler.build import source_digest, toolchain
from hone.compiler.templates.cpp.compiler import SourceCompiler, host_compiler
from hone.kernels.digest import JSON, digest_of

_SOURCE = Path(__file__).parent / "pool.cpp"
#: Its code is never unmapped: its threads outlive whoever loaded it.
_LINKED = ("-Wl,-z,nodelete", "-pthread")


@dataclass(frozen=True, slots=True)
class ParallelPool:
    """`digest` names the library that `build` gives, without building it."""

    digest: str
    fields: dict[str, JSON]
    compiler: SourceCompiler

    @classmethod
    def here(cls) -> ParallelPool:
        """Of this machine's C++ compiler. Raises BuildFailed when there is none."""
        host = host_compiler(())
        compiler = replace(host, flags=(*host.flags, *_LINKED))
        fields: dict[str, JSON] = {
            "parallel_pool": source_digest([_SOURCE]),
            "compiler": compiler.fields(),
            "tvm_ffi": toolchain()["tvm-ffi"],
        }
        return cls(digest_of(fields), fields, compiler)

    def build(self, path: Path) -> None:
        """Write the shared library. Raises BuildFailed."""
        self.compiler.compile(_SOURCE.read_text(encoding="utf-8"), path)
