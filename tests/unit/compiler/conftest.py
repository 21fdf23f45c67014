"""Kernels of C++ are compiled here by the hundred, and nine tenths of a small one's time is reading headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpp import bf16, int8
from hone.compiler.templates.cpp.compiler import SourceCompiler, host_compiler

#: All that any kernel includes; `cstdint` is what each includes first.
HEADERS = "#include <cstdint>\n#include <immintrin.h>\n#include <tvm/ffi/c_api.h>\n"


@pytest.fixture(scope="session")
def precompiled_headers(tmp_path_factory: pytest.TempPathFactory):
    """The headers as g++ reads them fastest, in the place of the first: it takes what fits a kernel's flags, and where
    nothing does (or the compiler is another) the headers themselves. The code that comes out is the same."""
    if shutil.which("g++") is None:
        yield
        return
    folder = tmp_path_factory.mktemp("headers")
    (folder / "cstdint.gch").mkdir()
    (folder / "all.h").write_text(HEADERS, "utf-8")
    host = set(CpuTarget.detect(num_threads=1).features)
    for number, features in enumerate((bf16.FEATURES, int8.FEATURES)):
        if set(features) <= host:
            precompile(host_compiler(features), folder / "all.h", folder / "cstdint.gch" / str(number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPLUS_INCLUDE_PATH", str(folder))
        yield


def precompile(compiler: SourceCompiler, header: Path, output: Path) -> None:
    flags = [flag for flag in compiler.flags if flag not in ("-shared", "-s")]
    includes = [part for include in compiler.folders for part in ("-I", str(include))]
    command = [compiler.command, *flags, *includes, "-x", "c++-header", "-o", str(output), str(header)]
    subprocess.run(command, check=True, timeout=120)
