"""Shared libraries of compiled code, each loaded once for all engines that run it.

The loader gives one copy of a library's static variables to everybody who opens its file. In one of them tvm-ffi keeps
the module by which the code finds its imports: of two modules of one file it is the later one for both, and when that
one goes, the code of the other calls into freed memory. So engines of the same artifact (two models with one graph, a
generation that is replaced by its like) share the module, and so do artifacts with the same kernel.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tvm_ffi

from hone.errors import EngineError


@dataclass(slots=True, weakref_slot=True, eq=False)
class Library:
    """A loaded module with what it imports. Its code stays mapped while somebody holds this."""

    module: Any
    imports: list[Library] = field(default_factory=list)


class Libraries:
    """The libraries in use by any engine of this process. Thread-safe. It holds nothing by itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: weakref.WeakValueDictionary[tuple[int, int], Library] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._loaded)

    def open(
        self, path: Path, kernels: Iterable[str] = (), files: Mapping[str, Path] = MappingProxyType({})
    ) -> Library:
        """The library of a file. Where nobody has it yet it is loaded, and its code made to find the functions of its
        `kernels`, whose libraries are `files`. Raises EngineError."""
        with self._lock:
            library = self._known(path)
            if library is None:
                library = Library(load_library(path))
                for digest in kernels:
                    if digest not in files:
                        raise EngineError(f"kernel {digest} of the artifact is not in the cache")
                    kernel = self._known(files[digest]) or self._keep(
                        files[digest], Library(load_library(files[digest]))
                    )
                    machine_code(library.module).import_module(kernel.module)
                    library.imports.append(kernel)
                self._keep(path, library)  # only now: what is not whole is nobody else's
            return library

    def _known(self, path: Path) -> Library | None:
        return self._loaded.get(_identity(path))

    def _keep(self, path: Path, library: Library) -> Library:
        self._loaded[_identity(path)] = library
        return library


def _identity(path: Path) -> tuple[int, int]:
    """By which the system's loader knows a file. Raises EngineError."""
    try:
        status = path.stat()
    except OSError as problem:
        raise EngineError(f"tvm: {path.name} does not load: {problem.strerror}") from problem
    return status.st_dev, status.st_ino


def load_library(path: Path) -> Any:
    """A module of its own of a file that nobody else has open: see above. Raises EngineError."""
    try:
        return tvm_ffi.load_module(str(path), keep_module_alive=False)
    except Exception as problem:  # RuntimeError and its kin, by what the loader says
        reason = str(problem).replace(str(path), path.name)
        lines = [line.strip() for line in reason.splitlines() if line.strip()]
        raise EngineError(f"tvm: {path.name} does not load: {lines[0] if lines else type(problem).__name__}") from (
            problem
        )


def machine_code(executable: Any) -> Any:
    """The module whose calls kernels answer: compiled code looks for functions in its own module's imports."""
    code = [module for module in executable.imports if module.kind == "library"]
    if len(code) != 1:
        raise EngineError(f"the artifact's executable has {len(code)} libraries of code, expected one")
    return code[0]
