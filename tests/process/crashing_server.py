"""`python crashing_server.py SERVE-ARGUMENTS`: a server whose tuned modules read address 0 when IN begins with 13.

All but the module's code is real: artifacts from the cache, probation, executor threads, the fault handler.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

from hone.cli.main import main
from hone.tuning import assembly
from hone.types import TensorSpec

FATAL = 13.0


class Module:
    """OUT = IN, on an engine of TVM's kind."""

    kind = "tvm"
    inputs = (TensorSpec("IN", "FP32", (1, 4)),)
    outputs = (TensorSpec("OUT", "FP32", (1, 4)),)
    initializers: tuple[TensorSpec, ...] = ()
    is_steady = True

    def instantiate(self):
        return self

    def run(self, inputs, outputs):
        if inputs["IN"].flat[0] == FATAL:
            ctypes.string_at(0)
        return [np.array(inputs["IN"]) for _ in outputs]

    def close(self):
        pass


class Loader:
    def __init__(self, *arguments, **fields) -> None:
        pass

    def __call__(self, artifact, device, version):
        return Module()


if __name__ == "__main__":
    assembly._LazyLoader = Loader
    sys.exit(main(sys.argv[1:]))
