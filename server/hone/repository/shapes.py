"""Shapes as clients see them (`dims`) and as the engine takes them (`reshape.shape`), and how one becomes the other.

-1 stands for any size. A dimension of any size keeps its place in order: the n-th of `dims` is the n-th of the
reshape, and the products of the fixed sizes between them agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hone.types import Shape, TensorSpec, num_elements

VARIABLE = -1


def show(shape: Sequence[int]) -> str:
    return "[" + ",".join(str(size) for size in shape) + "]"


def runs(dims: Sequence[int]) -> list[int]:
    """Products of the fixed sizes before, between and after the variable ones: [2, 4, -1, 6] gives [8, 6]."""
    products = [1]
    for size in dims:
        if size == VARIABLE:
            products.append(1)
        else:
            products[-1] *= size
    return products


def engine_dims(tensor: Any) -> Shape:
    """What a ModelInput or ModelOutput asks of the engine, without the batch dimension."""
    return tuple(tensor.reshape.shape) if tensor.HasField("reshape") else tuple(tensor.dims)


def to_engine(shape: Sequence[int], tensor: Any, graph_shape: Sequence[int], *, batching: bool) -> Shape:
    """Shape that the engine takes, for a client's shape that fits the tensor's `dims`.

    `graph_shape` is the engine's own: a scalar there is written `dims: [ 1 ]` where the model does not batch.
    """
    if tensor.HasField("reshape"):
        batch = 1 if batching else 0
        return (*shape[:batch], *_substitute(shape[batch:], tensor.dims, tensor.reshape.shape))
    if not graph_shape and not batching and num_elements(shape) == 1:
        return ()
    return tuple(shape)


def to_client(shape: Sequence[int], tensor: Any, *, batching: bool) -> Shape:
    """Shape that clients see, for a shape that the engine returned. The inverse of `to_engine`."""
    batch = 1 if batching else 0
    if tensor.HasField("reshape") and len(shape) - batch == len(tensor.reshape.shape):
        return (*shape[:batch], *_substitute(shape[batch:], tensor.reshape.shape, tensor.dims))
    if not shape and not batching:
        return (1,) * len(tensor.dims)
    return tuple(shape)


def narrowed(specs: Sequence[TensorSpec], config: Any) -> tuple[TensorSpec, ...]:
    """The graph's inputs with the sizes that the model's configuration fixes where the graph leaves them open. What the
    configuration does not list stays as it is."""
    tensors = {tensor.name: tensor for tensor in config.input}
    batch = (VARIABLE,) if config.max_batch_size > 0 else ()

    def narrow(spec: TensorSpec) -> TensorSpec:
        asked = (*batch, *engine_dims(tensors[spec.name])) if spec.name in tensors else ()
        if len(asked) != len(spec.shape):
            return spec
        pairs = zip(spec.shape, asked, strict=True)
        return replace(spec, shape=tuple(size if fixed == VARIABLE else fixed for fixed, size in pairs))

    return tuple(narrow(spec) for spec in specs)


def _substitute(shape: Sequence[int], pattern: Sequence[int], target: Sequence[int]) -> Shape:
    """`target` with its variable sizes taken, in order, from where `pattern` has its own."""
    sizes = iter([size for size, expected in zip(shape, pattern, strict=True) if expected == VARIABLE])
    return tuple(next(sizes) if size == VARIABLE else size for size in target)
