"""A fake engine at the Engine seam: runs what the test says, counts, and can be held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hone.errors import EngineError
from hone.types import Array, TensorSpec


class FakeEngine:
    """Doubles its input `IN` into `OUT`. `gate` holds runs until set; `fail_if` makes a run fail by its input."""

    kind = "fake"
    is_steady = False

    def __init__(self, datatype: str = "FP32", shape: tuple[int, ...] = (-1, 4)) -> None:
        self.inputs = (TensorSpec("IN", datatype, shape),)
        self.outputs = (TensorSpec("OUT", datatype, shape),)
        self.initializers: tuple[TensorSpec, ...] = ()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.batches: list[tuple[int, ...]] = []
        self.addresses: list[int] = []
        self.threads: set[int] = set()
        self.fail_if: Callable[[Array], bool] = lambda array: False
        self.closed = False

    def instantiate(self) -> FakeEngine:
        return self

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        self.entered.release()
        if not self.gate.wait(30):
            raise AssertionError("the test never opened the gate")
        array = inputs["IN"]
        self.batches.append(array.shape)
        self.addresses.append(array.ctypes.data)
        self.threads.add(threading.get_ident())
        if self.fail_if(array):
            raise EngineError("fake engine was told to fail")
        return [array + array if array.dtype != np.object_ else array.copy() for _ in outputs]

    def close(self) -> None:
        self.closed = True
