"""Sizes of a product as the dot-product kernels see it: positions times channels, whatever operator it was.

A convolution's positions are its output's rows and columns; a 1x1 convolution and a matrix product have one column,
and rows only. Channels of inputs lie in blocks, those of outputs in vectors of sixteen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hone.compiler.templates.cpp.epilogue import operand_positions
from hone.compiler.workload import TensorType, Workload

#: float32 in a vector, outputs in a vector of weights.
LANES = 16
#: Input channels in one block, where they need not come otherwise.
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Access:
    """How one tensor is addressed by the result's position: strides in items.

    `vector` is that of sixteen channels, or of eight where blocks of the output hold eight.
    """

    at: int
    type: str
    image: int
    vector: int
    row: int
    column: int
    per_channel: bool = True


@dataclass(frozen=True, slots=True)
class Accesses:
    output: Access
    operands: tuple[Access, ...]
    half: bool


@dataclass(frozen=True, slots=True)
class Geometry:
    """See `sources/dot_tile.cpp.jinja`. `source` is how inputs lie: "rows" of channels, "blocked" or in "planes"."""

    images: int
    rows: int
    columns: int
    outputs: int
    blocks: int
    block: int
    in_rows: int
    in_columns: int
    in_channels: int
    in_type: str
    source: str
    accesses: Accesses
    kernel: tuple[int, int] = (1, 1)
    strides: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    pad_top: int = 0
    pad_left: int = 0
    direct: bool = False

    @property
    def vectors(self) -> int:
        return -(-self.outputs // LANES)

    @property
    def tail_mask(self) -> int:
        left = self.outputs % LANES
        return (1 << left) - 1 if left else 0xFFFF

    @property
    def direct_row(self) -> int:
        return self.in_channels if self.source == "rows" else self.in_columns * self.block

    @property
    def direct_block(self) -> int:
        return self.block if self.source == "rows" else self.in_rows * self.in_columns * self.block

    @property
    def direct_column(self) -> int:
        return 0 if self.source == "rows" else self.block

    @property
    def direct_image(self) -> int:
        return self.in_rows * self.in_columns * self.in_channels

    @property
    def depth(self) -> int:
        """Products that are added up for one output, those with padding included."""
        return self.blocks * self.block * self.kernel[0] * self.kernel[1]

    @property
    def multiply_adds(self) -> int:
        return self.images * self.rows * self.columns * self.outputs * self.depth

    def buffer_bytes(self, rows: int, item_bytes: int) -> int:
        """What the inputs of so many rows of outputs take."""
        if self.source == "rows":
            return rows * self.blocks * self.block * item_bytes
        high = (rows - 1) * self.strides[0] + (self.kernel[0] - 1) * self.dilation[0] + 1
        wide = (self.columns - 1) * self.strides[1] + (self.kernel[1] - 1) * self.dilation[1] + 1
        return self.blocks * self.block * high * wide * item_bytes


def matmul_geometry(workload: Workload, types: Mapping[str, str], group: int) -> Geometry | None:
    """Of x [..., M, K] times [K, N]; None where the epilogue's operands do not go by it.

    `types` are dtypes in C++, `group` is how many channels one lane of an instruction multiplies."""
    x, weight, output = workload.inputs[0], workload.inputs[1], workload.output
    if (
        len(weight.shape) != 2
        or len(x.shape) < 2
        or x.shape[:-1] != output.shape[:-1]
        or x.shape[-1] != weight.shape[0]
    ):
        return None
    lead, rows, columns = prod(output.shape[:-2]), output.shape[-2], output.shape[-1]
    shape = (lead, rows, columns)
    operands = {}
    for at in operand_positions(workload):
        own = _aligned(workload.inputs[at], len(output.shape))
        outer = set(zip(own[:-2], output.shape[:-2], strict=True))
        if any(size != full for size, full in outer) and any(size != 1 for size, _ in outer):
            return None
        operands[at] = (prod(own[:-2]), own[-2], own[-1])
    if all(own[:2] in ((1, 1), (lead, rows)) for own in operands.values()):
        shape = (1, lead * rows, columns)
        operands = {at: (1, own[0] * own[1], own[2]) for at, own in operands.items()}

    def access(at: int, dtype: str, own: tuple[int, int, int]) -> Access:
        row = own[2] if own[1] == shape[1] and shape[1] > 1 else 0
        image = own[1] * own[2] if own[0] == shape[0] and shape[0] > 1 else 0
        per_channel = own[2] == shape[2]
        return Access(at, types[dtype], image, LANES if per_channel else 0, row, 0, per_channel)

    depth = x.shape[-1]
    block = min(_BLOCK, -(-depth // group) * group)
    return Geometry(
        images=shape[0],
        rows=shape[1],
        columns=1,
        outputs=columns,
        blocks=-(-depth // block),
        block=block,
        in_rows=shape[1],
        in_columns=1,
        in_channels=depth,
        in_type=types[x.dtype],
        source="rows",
        accesses=Accesses(
            access(-1, output.dtype, shape),
            tuple(access(at, workload.inputs[at].dtype, own) for at, own in operands.items()),
            half=False,
        ),
        direct=x.dtype == "bfloat16" and depth % block == 0,
    )


def convolution_geometry(workload: Workload, types: Mapping[str, str], group: int) -> Geometry | None:
    """Of a blocked convolution (NCHW{8,16}c out; in the same or plain); None for what is none."""
    data, output = workload.inputs[0], workload.output
    if len(output.shape) != 5 or output.shape[4] not in (LANES, LANES // 2) or workload.attribute("groups") != 1:
        return None
    if len(data.shape) == 5 and data.shape[4] % group:
        return None
    images, out_blocks, out_h, out_w, width = output.shape
    kernel = workload.inputs[1].shape[2:4]
    strides, dilation = workload.attribute("strides"), workload.attribute("dilation")
    top, left, bottom, right = workload.attribute("padding")
    operands = {at: _aligned(workload.inputs[at], 5) for at in operand_positions(workload)}
    if any(own[4] == 1 != own[1] for own in operands.values()):
        return None
    blocked = len(data.shape) == 5
    in_h, in_w = data.shape[2], data.shape[3]
    merged = (
        blocked
        and kernel == strides == (1, 1)
        and not any((top, left, bottom, right))
        and all((own[2] == out_h) == (own[3] == out_w) for own in operands.values())
    )
    full = (images, out_blocks, out_h, out_w, width)

    def access(at: int, dtype: str, own: Sequence[int]) -> Access:
        stride = [0] * 5
        step = 1
        for axis in range(4, -1, -1):
            stride[axis] = step if own[axis] == full[axis] and full[axis] > 1 else 0
            step *= own[axis]
        row, column = (stride[3] or stride[2], 0) if merged else (stride[2], stride[3])
        return Access(at, types[dtype], stride[0], stride[1], row, column, own[4] == width)

    return Geometry(
        images=images,
        rows=out_h * out_w if merged else out_h,
        columns=1 if merged else out_w,
        outputs=out_blocks * width,
        blocks=data.shape[1] if blocked else -(-data.shape[1] // group),
        block=data.shape[4] if blocked else group,
        in_rows=in_h * in_w if merged else in_h,
        in_columns=1 if merged else in_w,
        in_channels=data.shape[1] * (data.shape[4] if blocked else 1),
        in_type=types[data.dtype],
        source="blocked" if blocked else "planes",
        accesses=Accesses(
            access(-1, output.dtype, full),
            tuple(access(at, workload.inputs[at].dtype, own) for at, own in operands.items()),
            half=width == LANES // 2,
        ),
        kernel=(kernel[0], kernel[1]),
        strides=strides,
        dilation=dilation,
        pad_top=top,
        pad_left=left,
        direct=blocked and data.dtype == "bfloat16" and not any((top, left, bottom, right)),
    )


def _aligned(tensor: TensorType, rank: int) -> tuple[int, ...]:
    """The shape with ones in front, as broadcasting has it."""
    return (1,) * (rank - len(tensor.shape)) + tensor.shape
