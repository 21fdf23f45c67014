"""How results leave the registers: the epilogue's steps, then the store, for rows and columns of a product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hone.compiler.templates.cpu.nests import store, unravel, vector, vectors, view
from hone.compiler.templates.epilogue import apply_epilogue
from hone.compiler.workload import Workload


class Finish:
    """Epilogue and store for an output that is seen as rows times columns: all dimensions but the last are rows.

    To be made where a kernel begins; `registers` then goes into every task before it stores.
    """

    def __init__(self, workload: Workload, inputs: Sequence[Any], output: Any) -> None:
        self._workload, self._inputs = workload, inputs
        shape = workload.output.shape
        self._leading = shape[:-1]
        rows = (prod(self._leading), shape[-1])
        #: Operands of the output's shape, as rows and columns.
        self._whole = {
            at: view(inputs[at], *rows) for at, tensor in enumerate(workload.inputs) if at > 0 and tensor.shape == shape
        }
        self._out = view(output, *rows)
        self._steps: list[Any] = []

    def registers(self, lanes: int) -> None:
        """One vector a step, so that a value which several steps use is computed once."""
        self._steps = vectors(len(self._workload.epilogue), lanes)

    def store(self, row: Any, column: Any, lanes: int, value: Callable[[Any], Any]) -> None:
        """Finish `lanes` results beside each other; `value(lane)` is the operator's."""
        indices = unravel(row, self._leading)
        readers = [self._reader(at, row) for at in range(len(self._inputs))]
        with vector(lanes) as lane:
            free = iter(self._steps)

            def keep(result: Any) -> Any:
                register = next(free)
                store(register, result, lane)
                return register[lane]

            last = apply_epilogue(self._workload, value(lane), readers, [*indices, column + lane], keep)
            store(self._out, last, row, column + lane)

    def _reader(self, at: int, row: Any) -> Callable[..., Any]:
        whole = self._whole.get(at)
        if whole is not None:
            return lambda *indices: whole[row, indices[-1]]
        return lambda *indices: self._inputs[at][tuple(indices)]
