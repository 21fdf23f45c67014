"""B0: one problem for every family of kernels and every dtype, to be compared with float64 before anything is timed.

A row names the template and what its candidate must be (split-K, a walk through the data, a residence), so that each
way of computing is run, and not only the one that is guessed to be fastest. Sizes are small to medium, and none is a
multiple of all tiles: edges are computed too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu.rows import Row
from hone.compiler.templates.cutlass.conv2x import (
    ANALYTIC,
    FEW_CHANNELS,
    FIXED_CHANNELS,
    MULTIPLE_GROUPS,
    NO_GROUPS,
    OPTIMIZED,
    SINGLE_GROUP,
)
from hone.compiler.templates.cutlass.epilogue import COLUMN_SUM
from hone.compiler.templates.cutlass.gemm2x import STREAM_K
from hone.compiler.templates.cutlass.tiles import SIMT, TF32_THRICE
from hone.compiler.templates.cutlass.tiles3x import COOPERATIVE, PINGPONG
from hone.compiler.workload import Operand, Step, TensorType, Workload

TABLE = "B0"
_HALVES = ("float16", "bfloat16")
#: The depth in so many slices: which of them are tried depends on the card's speed.
_CUT = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Full ones, or those that host twins do in a moment."""

    is_small: bool

    def of(self, full: int, small: int) -> int:
        return small if self.is_small else full


def family_rows(*, small: bool = False) -> list[Row]:
    """Rows that no template takes on an architecture are for the caller to leave out.

    `small`: for host twins, which know neither tiles nor ways to share the depth: any candidate is wanted.
    """
    sizes = _Sizes(small)
    rows = [*_products(sizes), *_convolutions(sizes), *_depthwise(sizes), *_attention(sizes), *_pairs(sizes)]
    return [replace(row, wants=None) for row in rows] if small else rows


def _products(sizes: _Sizes) -> list[Row]:
    m, n, k = sizes.of(500, 40), sizes.of(392, 24), sizes.of(512, 32)
    deep = sizes.of(4096, 64)

    def row(template: str, what: str, workload: Workload, **wanted: int | tuple[int, ...]) -> Row:
        return _row(template, what, workload, wanted)

    def plain(dtype: str, *steps: str, depth: int = k, out: str = "", batch: int = 0, tf32: bool = False) -> Workload:
        return product((batch, m, depth, n), dtype, steps, out or dtype, "tf32" if tf32 else "")

    return [
        row("gemm3x", "f16 pingpong bias+gelu", plain("float16", "bias", "gelu"), schedule=PINGPONG, stream_k=0),
        row(
            "gemm3x", "f16 cooperative residual+relu", plain("float16", "residual", "relu"),
            schedule=COOPERATIVE, stream_k=0,
        ),
        row("gemm3x", "f16 stream-K bias+silu", plain("float16", "bias", "silu", depth=deep), stream_k=1),
        row("gemm3x", "bf16 batched tanh", plain("bfloat16", "tanh", batch=3), stream_k=0),
        row("gemm3x", "tf32 bias+sigmoid", plain("float32", "bias", "sigmoid", tf32=True), stream_k=0),
        row("gemm3x", "s8 to s32", plain("int8", out="int32"), stream_k=0),
        row("gemm3x", "s8 to f32 scaled+bias", plain("int8", "scale", "bias", out="float32"), stream_k=0),
        row("gemm2x", "f16 residual+gelu_tanh", plain("float16", "residual", "gelu_tanh"), slices=1),
        row("gemm2x", "f16 split-K bias+softplus", plain("float16", "bias", "softplus", depth=deep), slices=_CUT),
        row("gemm2x", "f16 stream-K bias+mish", plain("float16", "bias", "mish", depth=deep), slices=STREAM_K),
        row("gemm2x", "f16 batched times column+relu6", plain("float16", "column", "relu6", batch=3), slices=1),
        row("gemm2x", "bf16 bias+leakyrelu", plain("bfloat16", "bias", "leakyrelu"), slices=1),
        row("gemm2x", "tf32 bias+relu", plain("float32", "bias", "relu", tf32=True), slices=1),
        row("gemm2x", "f32 by tf32 thrice, bias", plain("float32", "bias"), math=TF32_THRICE, slices=1),
        row("gemm2x", "f32 without tensor cores, bias", plain("float32", "bias"), math=SIMT, slices=1),
        row("gemm2x", "s8 to s32", plain("int8", out="int32"), slices=1),
        row("gemm2x", "s8 to f32 scaled+bias", plain("int8", "scale", "bias", out="float32"), slices=1),
        row("gemm2x", "f16 column sums of relu", plain("float16", "relu", COLUMN_SUM, out="float32")),
    ]  # fmt: skip


def _convolutions(sizes: _Sizes) -> list[Row]:
    side, batch = sizes.of(29, 7), sizes.of(4, 1)
    channels, outputs = sizes.of(64, 16), sizes.of(72, 24)

    def row(template: str, what: str, workload: Workload, **wanted: int | tuple[int, ...]) -> Row:
        return _row(template, what, workload, wanted)

    def plain(dtype: str, *steps: str, out: str = "", tf32: bool = False, stride: int = 1, dilation: int = 1,
              data: int = channels, groups: int = 1, results: int = outputs) -> Workload:  # fmt: skip
        return convolution(
            (batch, side, side, data),
            (results, 3, 3, data // groups),
            dtype,
            steps,
            out or dtype,
            math_="tf32" if tf32 else "",
            stride=stride,
            dilation=dilation,
            groups=groups,
        )

    walk: dict[str, int | tuple[int, ...]] = {"iterator": OPTIMIZED, "groups": NO_GROUPS, "slices": 1}
    return [
        row("conv3x", "f16 residual+relu", plain("float16", "residual", "relu")),
        row("conv3x", "bf16 dilated bias+silu", plain("bfloat16", "bias", "silu", dilation=2)),
        row("conv3x", "tf32 stride 2 bias", plain("float32", "bias", tf32=True, stride=2)),
        row("conv3x", "s8 to f32 scaled", plain("int8", "scale", out="float32")),
        row("conv2x", "f16 stride 2 bias+relu", plain("float16", "bias", "relu", stride=2), **walk),
        row("conv2x", "f16 split-K residual", plain("float16", "residual"), **{**walk, "slices": _CUT}),
        row("conv2x", "f16 few channels bias+relu", plain("float16", "bias", "relu", data=3), iterator=FEW_CHANNELS),
        row("conv2x", "f16 fixed channels bias", plain("float16", "bias", data=4), iterator=FIXED_CHANNELS),
        row(
            "conv2x", "f16 2 groups, one a block, bias",
            plain("float16", "bias", groups=2, data=2 * channels, results=128), groups=SINGLE_GROUP,
        ),
        row(
            "conv2x", "f16 8 groups, more a block, bias",
            plain("float16", "bias", groups=8, data=64, results=64), groups=MULTIPLE_GROUPS, iterator=ANALYTIC,
        ),
        row("conv2x", "bf16 times image vector", plain("bfloat16", "image"), **walk),
        row("conv2x", "tf32 bias", plain("float32", "bias", tf32=True), **walk),
        row("conv2x", "s8 to s32", plain("int8", out="int32"), **walk),
        row("conv2x", "f16 column sums of relu", plain("float16", "relu", COLUMN_SUM, out="float32"), **walk),
    ]  # fmt: skip


def _depthwise(sizes: _Sizes) -> list[Row]:
    side, channels = sizes.of(29, 7), sizes.of(96, 16)
    rows = []
    for dtype, kernel, stride in (("float16", 3, 1), ("bfloat16", 3, 2), ("float32", 5, 1)):
        workload = convolution(
            (2, side, side, channels), (channels, kernel, kernel, 1), dtype, ("bias", "relu6"), dtype,
            stride=stride, groups=channels,
        )  # fmt: skip
        rows.append(_row("depthwise", f"{_short(dtype)} {kernel}x{kernel} stride {stride} bias+relu6", workload, {}))
    return rows


def _attention(sizes: _Sizes) -> list[Row]:
    batch, heads, queries, keys, depth = 2, sizes.of(4, 2), sizes.of(120, 10), sizes.of(136, 16), sizes.of(64, 16)
    rows = []
    for dtype, is_masked in (("float16", False), ("bfloat16", True), ("float32", True)):
        inputs = [(batch, queries, heads, depth), (batch, keys, heads, depth), (batch, keys, heads, depth)]
        mask = [(batch, 1, 1, keys)] if is_masked else []
        told = {
            "layouts": ("bshd",) * 3,
            "output_layout": "bshd",
            "masked": is_masked,
            "scale": depth**-0.5,
            "weights": (),
        }
        workload = Workload(
            "attention",
            tuple(TensorType(shape, dtype) for shape in inputs + mask),
            TensorType(inputs[0], dtype),
            tuple(sorted(told.items())),
        )
        rows.append(_row("attention", f"{_short(dtype)}{' masked' if is_masked else ''}", workload, {}))
    return rows


def _pairs(sizes: _Sizes) -> list[Row]:
    m, side = sizes.of(1000, 40), sizes.of(29, 7)
    n0, n1, k = sizes.of(64, 32), sizes.of(128, 16), sizes.of(264, 24)
    rows = []
    for dtype in _HALVES:
        types = [TensorType(shape, dtype) for shape in ((m, k), (n0, k), (n1, n0), (n0,), (n1,))]
        products_ = Workload(
            "matmul_matmul",
            tuple(types),
            TensorType((m, n1), dtype),
            _told(transpose_b=True, transpose_b1=True, weights=(1, 2), intermediate=dtype, epilogue0=_first_steps()),
            _steps(("bias", "relu"), {"bias": 4}),
        )
        first = convolution((2, side, side, 24), (n0, 3, 3, 24), dtype, (), dtype)
        types = [*first.inputs, *(TensorType(shape, dtype) for shape in ((n1, 1, 1, n0), (n0,), (n1,)))]
        told = {**dict(first.attributes), "weights": (1, 2), "intermediate": dtype, "epilogue0": _first_steps()}
        output = TensorType((*first.output.shape[:3], n1), dtype)
        pair = Workload("conv2d_conv2d", tuple(types), output, _told(**told), _steps(("bias", "relu"), {"bias": 4}))
        for where, in_registers in (("registers", True), ("shared memory", False)):
            if dtype == "bfloat16" and not in_registers:
                continue
            for what, workload in (("products", products_), ("convolutions", pair)):
                name = f"{_short(dtype)} {what} in {where}"
                rows.append(replace(_row("persistent", name, workload, {}), wants=_residence(in_registers)))
    return rows


def _residence(in_registers: bool) -> Callable[[Mapping[str, int]], bool]:
    """Of a pair's candidates: whether a warp has all columns of its rows of both results."""
    return lambda told: (told["shared"] == 0) == in_registers


# --- workloads


def product(
    sizes: tuple[int, int, int, int], dtype: str, steps: Sequence[str], out: str = "", math_: str = ""
) -> Workload:
    """`sizes`: batch (0 for none), M, K, N. b is stored N by K, as all dtypes take it; that of a batch is no weight."""
    batch, m, k, n = sizes
    lead = (batch,) if batch else ()
    inputs = [TensorType((*lead, m, k), dtype), TensorType((*lead, n, k), dtype)]
    output = (n,) if COLUMN_SUM in steps else (*lead, m, n)
    vectors = dtype if dtype in (*_HALVES, "float32") else "float32"
    shapes = {"bias": (n,), "scale": (n,), "residual": (*lead, m, n), "column": (*lead, m, 1)}
    extra, places = _operands_of(steps, shapes, vectors)
    told = {"transpose_b": True, "weights": () if batch else (1,), **({"math": math_} if math_ else {})}
    return Workload("matmul", (*inputs, *extra), TensorType(output, out or dtype), _told(**told), _steps(steps, places))


def convolution(
    data: tuple[int, int, int, int],
    weight: tuple[int, int, int, int],
    dtype: str,
    steps: Sequence[str],
    out: str = "",
    math_: str = "",
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> Workload:
    """`data` is NHWC, `weight` OHWI; padded as far as the filter reaches."""
    pad = dilation * (weight[1] // 2)
    rows, columns = ((data[at] + 2 * pad - dilation * (weight[at] - 1) - 1) // stride + 1 for at in (1, 2))
    result = (data[0], rows, columns, weight[0])
    vectors = dtype if dtype in (*_HALVES, "float32") else "float32"
    shapes = {
        "bias": (weight[0],),
        "scale": (weight[0],),
        "residual": result,
        "image": (data[0], 1, 1, weight[0]),
    }
    extra, places = _operands_of(steps, shapes, vectors)
    told = {
        "strides": (stride, stride),
        "padding": (pad,) * 4,
        "dilation": (dilation, dilation),
        "groups": groups,
        "data_layout": "NHWC",
        "kernel_layout": "OHWI",
        "out_layout": "NHWC",
        "weights": (1,),
        **({"math": math_} if math_ else {}),
    }
    return Workload(
        "conv2d",
        (TensorType(data, dtype), TensorType(weight, dtype), *extra),
        TensorType((weight[0],) if COLUMN_SUM in steps else result, out or dtype),
        _told(**told),
        _steps(steps, places),
    )


#: How a named operand enters the chain; whatever else is named is an activation of the value before it.
_WITH_OPERAND = {"bias": "add", "residual": "add", "scale": "multiply", "column": "multiply", "image": "multiply"}


def _operands_of(
    steps: Sequence[str], shapes: Mapping[str, tuple[int, ...]], dtype: str
) -> tuple[list[TensorType], dict[str, int]]:
    named = [step for step in steps if step in _WITH_OPERAND]
    return [TensorType(shapes[name], dtype) for name in named], {name: 2 + at for at, name in enumerate(named)}


def _steps(steps: Sequence[str], places: Mapping[str, int]) -> tuple[Step, ...]:
    found = []
    for at, step in enumerate(steps):
        operands = [Operand("value", at)]
        if step in _WITH_OPERAND:
            operands.append(Operand("input", places[step]))
        if step == "leakyrelu":
            operands.append(Operand("constant", constant=0.1))
        found.append(Step(_WITH_OPERAND.get(step, step), tuple(operands)))
    return tuple(found)


def _first_steps() -> tuple[object, ...]:
    """A pair's first epilogue, plain as attributes are."""
    return tuple(
        (step.op, tuple(tuple(operand.fields()) for operand in step.operands))
        for step in _steps(("bias", "relu"), {"bias": 3})
    )


def _told(**attributes: object) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(attributes.items()))


def _row(template: str, what: str, workload: Workload, wanted: Mapping[str, int | tuple[int, ...]]) -> Row:
    """`wanted`: what a parameter must be, or one of several."""

    def wants(parameters: Mapping[str, int]) -> bool:
        return all(
            parameters[name] in value if isinstance(value, tuple) else parameters[name] == value
            for name, value in wanted.items()
        )

    return Row(f"{template} {what}", TABLE, workload, template=f"cutlass.{template}", wants=wants)


def _short(dtype: str) -> str:
    return {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}[dtype]
