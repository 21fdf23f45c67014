"""What is measured on a GPU: the sizes of Bolt's evaluation (arXiv 2110.15238), in float16, as workloads.

B1 to B6 are kernels; B0, which only is compared with float64, is in `families.py`. A row is compared with the
vendor's libraries, with kernels of ours that do the same in more steps, or both. The small rows are for
trying the whole way where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hone.compiler.workload import Operand, Step, TensorType, Workload

F16 = "float16"


@dataclass(frozen=True, slots=True)
class Row:
    """`parts` are rows that together do what this one does; `pads` tells that the parts' data is padded by a copy,
    which counts for this row."""

    name: str
    table: str
    workload: Workload
    steps: tuple[str, ...] = ()
    """The epilogue, for people and for the reference; of a pair, the one behind each operator."""
    parts: tuple[str, ...] = ()
    pads: tuple[int, ...] = ()
    """Shape of the data before it was padded."""
    template: str = ""
    """The one template that the row is for; else all are tried."""
    wants: Callable[[Mapping[str, int]], bool] | None = None
    """Whether a candidate's parameters are what the row is for; None for all."""


def gemm(name: str, table: str, m: int, n: int, k: int, steps: Sequence[str] = (), parts: tuple[str, ...] = ()) -> Row:
    inputs = [TensorType((m, k), F16), TensorType((k, n), F16), *([TensorType((n,), F16)] if "bias" in steps else [])]
    workload = Workload("matmul", tuple(inputs), TensorType((m, n), F16), (("weights", (1,)),), _chain(steps))
    return Row(name, table, workload, tuple(steps), parts)


def conv(
    name: str,
    table: str,
    data: tuple[int, int, int, int],
    weight: tuple[int, int, int, int],
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    steps: Sequence[str] = (),
) -> Row:
    """`data` is NHWC, `weight` OHWI."""
    inputs = [TensorType(data, F16), TensorType(weight, F16)]
    inputs += [TensorType((weight[0],), F16)] if "bias" in steps else []
    rows, columns = ((data[i] + 2 * padding[i - 1] - weight[i]) // stride + 1 for i in (1, 2))
    output = TensorType((data[0], rows, columns, weight[0]), F16)
    return Row(
        name, table, Workload("conv2d", tuple(inputs), output, _conv(stride, padding), _chain(steps)), tuple(steps)
    )


def pair(name: str, table: str, first: Row, second: Row) -> Row:
    """Both in one kernel."""
    one, two = first.workload, second.workload
    bias0 = one.inputs[2:]
    weights, told = (one.inputs[1], two.inputs[1]), dict[str, object]()
    if one.op == "matmul":  # as its kernel reads them: the sums along rows
        weights = tuple(TensorType(weight.shape[::-1], F16) for weight in weights)  # type: ignore[assignment]
        told = {"transpose_b": True, "transpose_b1": True}
    attributes = {
        **told,
        **{key: value for key, value in one.attributes if key != "weights"},
        "epilogue0": tuple(_plain(step) for step in _chain(first.steps, 3)),
        "intermediate": F16,
        "weights": (1, 2),
    }
    workload = Workload(
        f"{one.op}_{two.op}",
        (one.inputs[0], *weights, *bias0, *two.inputs[2:]),
        two.output,
        tuple(sorted(attributes.items())),
        _chain(second.steps, 3 + len(bias0)),
    )
    return Row(name, table, workload, (*first.steps, "then", *second.steps), (first.name, second.name))


def all_rows() -> list[Row]:
    rows = [*_b1(), *_b2(), *_b3(), *_b4(), *_b5(), *_b6()]
    return list({row.name: row for row in rows}.values())


def small_rows() -> list[Row]:
    """One of each kind, to be run by host twins."""
    plain = gemm("gemm 32x16x24", "B1", 32, 16, 24)
    first, second = (
        gemm("gemm 64x16x8 relu", "B4", 64, 16, 8, ("relu",)),
        gemm("gemm 64x8x16 relu", "B4", 64, 8, 16, ("relu",)),
    )
    narrow = conv("conv 6x6 6->8 k3", "B6", (1, 6, 6, 6), (8, 3, 3, 6), padding=(1, 1))
    wide = replace(
        conv("conv 6x6 6->8 k3 padded", "B6", (1, 6, 6, 8), (8, 3, 3, 8), padding=(1, 1)),
        parts=(narrow.name,),
        pads=(1, 6, 6, 6),
    )
    return [
        plain,
        conv("conv 8x8 8->8 k3", "B2", (2, 8, 8, 8), (8, 3, 3, 8), padding=(1, 1)),
        gemm("gemm 32x16x24 bias+gelu", "B3", 32, 16, 24, ("bias", "gelu"), parts=(plain.name,)),
        first,
        second,
        pair("gemm 64x16x8 then 8", "B4", first, second),
        narrow,
        wide,
    ]


def _b1() -> list[Row]:
    sizes = [(1280, 3072, 768), (1280, 768, 768), (1280, 768, 3072), (1024, 1024, 1024), (2048, 2048, 2048)]
    return [gemm(f"gemm {m}x{n}x{k}", "B1", m, n, k) for m, n, k in sizes]


def _b2() -> list[Row]:
    sizes = [(56, 64, 64, 1), (56, 128, 128, 2), (28, 128, 128, 1), (28, 256, 256, 2)]
    sizes += [(14, 256, 256, 1), (14, 512, 512, 2), (7, 512, 512, 1)]
    return [
        conv(f"conv {s}x{s} {c}->{o} k3 s{t}", "B2", (32, s, s, c), (o, 3, 3, c), t, (1, 1)) for s, c, o, t in sizes
    ]


def _b3() -> list[Row]:
    rows = []
    for act in ("relu", "gelu", "hardswish", "softplus"):
        parts = ("gemm 1280x3072x768",)
        rows.append(gemm(f"gemm 1280x3072x768 bias+{act}", "B3", 1280, 3072, 768, ("bias", act), parts=parts))
    for act in ("relu", "gelu", "hardswish", "softplus"):
        row = conv(f"conv 56x56 64->64 k3 bias+{act}", "B3", (32, 56, 56, 64), (64, 3, 3, 64), 1, (1, 1), ("bias", act))
        rows.append(replace(row, parts=("conv 56x56 64->64 k3 s1",)))
    return rows


def _b4() -> list[Row]:
    # The paper's first pair (2464x1x4, then 2464x4x1) is below what tensor cores read at once: it runs padded to 8.
    pairs = [(2464, 8, 8, 8), (16384, 64, 256, 16), (32768, 128, 576, 64), (128320, 32, 96, 96), (81920, 64, 576, 128)]
    rows = []
    for m, n0, k0, n1 in pairs:
        first = gemm(f"gemm {m}x{n0}x{k0} relu", "B4", m, n0, k0, ("relu",))
        second = gemm(f"gemm {m}x{n1}x{n0} relu", "B4", m, n1, n0, ("relu",))
        rows += [first, second, pair(f"gemm {m}x{n0}x{k0} then {n1}", "B4", first, second)]
    return rows


def _b5() -> list[Row]:
    pairs = [(224, 3, 48, 2), (112, 48, 48, 2), (56, 48, 48, 1), (224, 3, 64, 2), (112, 64, 64, 2), (56, 64, 64, 1)]
    rows = []
    for s, c, o, t in pairs:
        read = -(-c // 8) * 8  # images of three channels are padded
        steps = ("bias", "relu")
        first = conv(f"conv {s}x{s} {c}->{o} k3 s{t} relu", "B5", (32, s, s, read), (o, 3, 3, read), t, (1, 1), steps)
        half = s // t
        second = conv(
            f"conv {half}x{half} {o}->{o} k1 relu ({s})", "B5", (32, half, half, o), (o, 1, 1, o), steps=steps
        )
        rows += [first, second, pair(f"conv {s}x{s} {c}->{o} s{t} then 1x1", "B5", first, second)]
    return rows


def _b6() -> list[Row]:
    sizes = [
        (32, 20, 26, 46, 32, 3, 3, 1, 1),
        (32, 20, 26, 46, 32, 5, 5, 2, 2),
        (128, 14, 19, 46, 32, 5, 7, 0, 0),
        (288, 11, 15, 46, 32, 5, 7, 0, 0),
        (32, 20, 26, 174, 64, 3, 3, 1, 1),
        (32, 20, 26, 174, 64, 5, 5, 2, 2),
    ]
    rows = []
    for n, h, w, c, o, r, s, top, left in sizes:
        name, wide = f"conv {n}x{h}x{w} {c}->{o} k{r}x{s}", -(-c // 8) * 8
        rows.append(conv(name, "B6", (n, h, w, c), (o, r, s, c), padding=(top, left)))
        padded = conv(f"{name} padded", "B6", (n, h, w, wide), (o, r, s, wide), padding=(top, left))
        rows.append(replace(padded, parts=(name,), pads=(n, h, w, c)))
    return rows


def _conv(stride: int, padding: tuple[int, int]) -> tuple[tuple[str, object], ...]:
    told: dict[str, object] = {
        "strides": (stride, stride),
        "padding": (*padding, *padding),
        "dilation": (1, 1),
        "groups": 1,
        "data_layout": "NHWC",
        "kernel_layout": "OHWI",
        "out_layout": "NHWC",
        "weights": (1,),
    }
    return tuple(sorted(told.items()))


def _chain(steps: Sequence[str], bias_at: int = 2) -> tuple[Step, ...]:
    """Each step reads the one before."""
    return tuple(
        Step("add", (Operand("value", at), Operand("input", bias_at)))
        if step == "bias"
        else Step(step, (Operand("value", at),))
        for at, step in enumerate(steps)
    )


def _plain(step: Step) -> tuple[object, ...]:
    return (step.op, tuple(tuple(operand.fields()) for operand in step.operands))
