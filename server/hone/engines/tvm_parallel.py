"""Who runs parallel loops: hone's pool of threads in place of TVM's, once a process.

Compiled code calls a launch function through a variable of its library, which tvm-ffi fills when it loads the library
(or makes the code in memory). So the pool is there before the code. TVM's own divides a loop into as many parts as
threads: when one core is taken by somebody else, every loop waits for that core.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from pathlib import Path

import tvm_ffi.libinfo

from hone.errors import EngineError

#: What code with parallel loops has, and what it must not have: tasks are not run side by side for certain.
LAUNCH_VARIABLE = "__TVMBackendParallelLaunch"
BARRIER_VARIABLE = "__TVMBackendParallelBarrier"

_VERSION = 1


class ParallelPool:
    """The pool of a process. Thread-safe. Its workers are started by the first loop that wants them, sleep when there
    is nothing to do, and end with the process; all callers share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: ctypes.PyDLL | None = None

    @property
    def is_loaded(self) -> bool:
        return self._library is not None

    @property
    def num_workers(self) -> int:
        return int(self._library.hone_parallel_num_workers()) if self._library is not None else 0

    def load(self, path: Path, num_threads: int) -> None:
        """Make code that is loaded from now on use the pool of a library, unless there is one already: any will do.

        `num_threads`, itself included, run the loops of a thread that does not tell (see `use_threads`). Raises
        EngineError.
        """
        with self._lock:
            if self._library is not None:
                return
            library = _opened(path)
            library.hone_parallel_set_default(num_threads)
            register = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIEnvModRegisterContextSymbol
            register.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
            for variable, function in (
                (LAUNCH_VARIABLE, library.hone_parallel_launch),
                (BARRIER_VARIABLE, library.hone_parallel_barrier),
            ):
                # Of two of one name the later one counts: TVM's runtime has told its own.
                if register(variable.encode(), ctypes.cast(function, ctypes.c_void_p)) != 0:
                    raise EngineError(f"tvm-ffi did not take {variable} from {path.name}")
            self._library = library

    def use_threads(self, num_threads: int) -> None:
        """How many threads, itself included, run the calling thread's loops from now on."""
        if self._library is not None:
            self._library.hone_parallel_set_threads(num_threads)

    def check(self, libraries: Iterable[Path]) -> None:
        """Raises EngineError when one has parallel loops and there is no pool to run them."""
        if self._library is None and any(has_variable(path, LAUNCH_VARIABLE) for path in libraries):
            raise EngineError("the artifact has parallel loops, and its manifest names no pool of threads: tune again")


def has_variable(library: Path, name: str) -> bool:
    """Whether a library exports a variable: its name is then among the names in the file. Raises EngineError."""
    try:
        return b"\0" + name.encode() + b"\0" in library.read_bytes()
    except OSError as problem:
        raise EngineError(f"tvm: {library.name} does not load: {problem.strerror}") from problem


def _opened(path: Path) -> ctypes.PyDLL:
    try:
        # PyDLL: these functions return at once, and calls that keep the interpreter's lock cost half.
        library = ctypes.PyDLL(str(path))
        version = library.hone_parallel_version()
    except OSError as problem:
        reason = str(problem).rsplit(": ", 1)[-1]
        raise EngineError(f"the pool for parallel loops, {path.name}, does not load: {reason}") from problem
    except AttributeError as problem:
        raise EngineError(f"{path.name} is no pool for parallel loops: it has no hone_parallel_version") from problem
    if version != _VERSION:
        raise EngineError(f"the pool for parallel loops is of version {version}, expected {_VERSION}: tune again")
    return library
