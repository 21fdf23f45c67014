"""A limit to the memory that ONNX Runtime takes on behalf of requests.

Where a model makes a shape of what is in an input (ConstantOfShape, Expand, Range, Tile, Resize, …), whoever sends a
request chooses how much memory it takes. ONNX Runtime limits an arena that all sessions of the process share, and only
such a one: it is registered once, and sessions are told to use it. An allocation beyond the limit fails its request
alone.

Two things of ONNX Runtime's would let requests fail that fit. A session plans one block for all values of a run by the
input shapes of the run before, and takes that block on top where values grow with what is in the inputs: such plans are
off. And an arena keeps what it once took in pieces of those sizes: so when an allocation fails, free pieces go back to
the system, and the request is tried once more.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

# ONNX Runtime 1.32 reports its use to its maker and keeps files in the user's home, from import on, unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort

from hone.engines.protobuf import encoded
from hone.errors import EngineError

_MIB = 1 << 20

#: The arena's strategy by ONNX Runtime's numbers: it grows by what is asked for. Growing by powers of two (the default)
#: would reach the limit at half of it.
_AS_REQUESTED = 1

#: What the arena says at its limit, and when it cannot get more from the system.
_AT_THE_LIMIT = "is smaller than requested bytes of"
_REFUSED = "Failed to allocate memory for requested buffer"


class MemoryLimit:
    """What all sessions of the process may take together for the values of their runs: on the CPU, without the weights,
    and without the characters of strings. Thread-safe.

    To be made once in a process: sessions that are opened after a second one share the second's arena."""

    def __init__(self, mib: int) -> None:
        """Raises EngineError where ONNX Runtime refuses the limit."""
        self.mib = mib
        arena = ort.OrtArenaCfg({"max_mem": mib * _MIB, "arena_extend_strategy": _AS_REQUESTED})
        place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        try:
            ort.create_and_register_allocator(place, arena)
        except Exception as problem:  # its exceptions have no common root below Exception
            raise EngineError(f"onnxruntime: memory cannot be limited to {mib} MiB: {problem}") from problem
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.bind(options)
        self._idle = ort.InferenceSession(_identity(), options, providers=["CPUExecutionProvider"])
        self._nothing = {"x": np.zeros(1, np.float32)}
        self._giving_back = ort.RunOptions()
        self._giving_back.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    def bind(self, options: ort.SessionOptions) -> None:
        """Let the session that is made with these options take its memory within the limit."""
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.enable_mem_pattern = False

    def give_back(self) -> None:
        """Return to the system what the arena holds and no run uses."""
        self._idle.run(None, self._nothing, self._giving_back)

    def explain(self, problem: Exception) -> str:
        """What a client is told of a failed run; empty where memory was not the trouble."""
        text = str(problem)
        if _AT_THE_LIMIT in text:
            return f"onnxruntime: out of memory: this request, with others, takes more than the limit of {self.mib} MiB"
        return "onnxruntime: out of memory: the system has no more" if _REFUSED in text else ""


def _identity() -> bytes:
    """The smallest model, whose runs do nothing but what run options ask for. (Importing onnx takes 60 ms.)"""

    def message(*parts: tuple[int, Any]) -> bytes:
        return b"".join(piece for number, value in parts for piece in encoded(number, value))

    def value(name: bytes) -> bytes:
        tensor = message((1, 1), (2, message((1, message((1, 1))))))  # elem_type FLOAT, shape [1]
        return message((1, name), (2, message((1, tensor))))

    node = message((1, b"x"), (2, b"y"), (4, b"Identity"))
    graph = message((1, node), (2, b"idle"), (11, value(b"x")), (12, value(b"y")))
    return message((1, 8), (7, graph), (8, message((2, 17))))  # ir_version, graph, opset_import
