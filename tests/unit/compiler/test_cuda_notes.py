"""What people are told of a GPU's kernel beside its workload."""

from __future__ import annotations

from hone.compiler.cuda.notes import note_of, operators_padded
from hone.compiler.cuda.padding import Padding
from hone.compiler.workload import TensorType, Workload


def half(*shape: int) -> TensorType:
    return TensorType(shape, "float16")


def product(rows: int, depth: int, columns: int) -> Workload:
    return Workload("matmul", (half(rows, depth), half(depth, columns)), half(rows, columns))


def convolution(data: tuple[int, ...], weight: tuple[int, ...]) -> Workload:
    return Workload("conv2d", (half(*data), half(*weight)), half(*data[:3], weight[0]))


PADDED = Padding(product(4, 9, 10), product(4, 16, 16), 8, 0)
FIRST = Padding(convolution((1, 6, 6, 3), (16, 3, 3, 3)), convolution((1, 6, 6, 8), (16, 3, 3, 8)), 8, 0)
POINT = Padding(convolution((1, 6, 6, 16), (5, 1, 1, 16)), convolution((1, 6, 6, 16), (8, 1, 1, 16)), 8, 0)


def test_there_is_nothing_to_tell_of_what_is_as_the_model_has_it():
    assert note_of(product(4, 16, 24), (PADDED, FIRST)) == ""


def test_padded_operators_are_found_however_their_kernel_is_called():
    transposed = Workload(
        "matmul", (half(1, 4, 16), half(16, 16)), half(1, 4, 16), (("transpose_b", True), ("weights", (1,)))
    )
    for workload in (PADDED.padded, transposed):
        assert note_of(workload, (FIRST, PADDED)) == "padded from matmul 4x9 x 9x10"
    as_product = Workload("matmul", (half(36, 16), half(8, 16)), half(36, 8), (("transpose_b", True),))
    assert operators_padded(as_product, (FIRST, PADDED, POINT)) == [POINT.operator]
    # Two operators share a kernel.
    again = Padding(product(4, 12, 10), product(4, 16, 16), 8, 0)
    assert note_of(PADDED.padded, (PADDED, again)) == "padded from matmul 4x9 x 9x10 and matmul 4x12 x 12x10"


def test_a_pair_tells_its_second_operator_what_is_between_and_both_paddings():
    pair = Workload(
        "conv2d_conv2d",
        (half(1, 6, 6, 8), half(16, 3, 3, 8), half(8, 1, 1, 16), half(16)),
        half(1, 6, 6, 8),
        (("epilogue0", (("add", (("value", 0), ("input", 3))), ("relu", (("value", 1),)))), ("weights", (1, 2))),
    )
    assert note_of(pair, ()) == "two operators in one kernel: the first +add +relu, then 8x1x1x16"
    assert operators_padded(pair, (FIRST, POINT, PADDED)) == [FIRST.operator, POINT.operator]
    dense = Workload(
        "matmul_matmul",
        (half(4, 16), half(16, 16), half(16, 24)),
        half(4, 24),
        (("epilogue0", ()), ("weights", (1, 2))),
    )
    assert note_of(dense, (PADDED,)) == (
        "two operators in one kernel: the first, then 16x24; padded from matmul 4x9 x 9x10"
    )
