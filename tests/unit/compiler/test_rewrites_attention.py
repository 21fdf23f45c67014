"""Attention as products and a softmax is what ONNX Runtime makes of it, also for queries that may look at no key."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites import rewrite
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run

B, H, Q, K, D, W = 2, 4, 3, 5, 8, 6
LOWEST = np.finfo(np.float32).min


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def attention(inputs, attributes="", *, outputs=1, opset=24, constants=()):
    """A model of these inputs by name, those left out being optional ones."""
    kinds = {"float32": "float", "float16": "float16", "int64": "int64", "bool": "bool"}
    names = ["q", "k", "v", "m", "pk", "pv", "n"]
    given = [
        f"{kinds[inputs[name].dtype.name]}[{', '.join(map(str, inputs[name].shape))}] {name}"
        for name in names
        if name in inputs and name not in constants
    ]
    kind = kinds[inputs["q"].dtype.name]
    results = ["y", "present_key", "present_value", "qk"][:outputs]
    used = ", ".join(name if name in inputs else "" for name in names).rstrip(", ")
    ranks = {"y": inputs["q"].ndim}
    listed = [f"{kind}[{', '.join(f'd{name}{at}' for at in range(ranks.get(name, 4)))}] {name}" for name in results]
    text = (
        f"g ({', '.join(given)}) => ({', '.join(listed)}) "
        f"{{ {', '.join(results)} = Attention{f' <{attributes}>' if attributes else ''} ({used}) }}"
    )
    return model(text, {name: inputs[name] for name in constants}, opset=opset)


def check(tmp_path, inputs, attributes="", *, outputs=1, opset=24, constants=(), tolerance=1e-5):
    proto = attention(inputs, attributes, outputs=outputs, opset=opset, constants=constants)
    inputs = {name: array for name, array in inputs.items() if name not in constants}
    graph = graph_of(proto, inputs, tmp_path)
    assert rewrite(graph)
    assert "Attention" not in operators(graph)
    results = run(graph.attached(), inputs)
    assert all(results[outputs:])  # the guards
    wanted = run(proto, inputs)
    assert_same(results[:outputs], wanted, tolerance=tolerance)
    return graph, wanted


def qkv(heads=H, kv_heads=H, dtype=np.float32, keys=K):
    return {
        "q": numbers(B, heads, Q, D, seed=1, dtype=dtype),
        "k": numbers(B, kv_heads, keys, D, seed=2, dtype=dtype),
        "v": numbers(B, kv_heads, keys, W, seed=3, dtype=dtype),
    }


def rows_of(array):
    """[batch, heads, length, items] as [batch, length, heads * items]."""
    batch, heads, length, items = array.shape
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(batch, length, heads * items)


def mask_of(kind):
    """A mask whose second query is left with no key, said in several ways."""
    mask = numbers(Q, K, seed=4)
    if kind == "bool":
        mask = mask > -0.5
        mask[1] = False
    elif kind == "mixed":
        mask[1] = [-np.inf, LOWEST, -np.inf, LOWEST, -np.inf]
    else:
        mask[1] = {"infinite": -np.inf, "lowest": LOWEST, "nearly": np.nextafter(LOWEST, np.float32(0))}[kind]
    return mask


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("constants", [(), ("m",)], ids=["asked", "known"])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("kind", ["bool", "infinite", "lowest", "mixed", "nearly"])
def test_queries_that_may_look_at_nothing(kind, causal, constants, opset, tmp_path):
    inputs = {**qkv(), "m": mask_of(kind)}
    _, (y, *_) = check(tmp_path, inputs, f"is_causal = {causal}", opset=opset, constants=constants)
    assert np.isfinite(y).all()
    assert (y[:, :, 1] == 0).all() == (kind != "nearly")


@pytest.mark.parametrize("shape", [(Q, K), (H, Q, K), (1, Q, K), (B, 1, Q, K), (1, H, Q, K), (B, H, Q, K)], ids=str)
@pytest.mark.parametrize("rank", [3, 4])
def test_masks_are_broadcast(shape, rank, tmp_path):
    inputs = qkv()
    if rank == 3:
        inputs = {name: rows_of(array) for name, array in inputs.items()}
    inputs["m"] = np.random.default_rng(5).random(shape) < 0.4  # some are left with nothing
    heads = f"q_num_heads = {H}, kv_num_heads = {H}" if rank == 3 else ""
    check(tmp_path, inputs, heads)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["bool", "infinite", "lowest"])
def test_scores_and_weights(kind, mode, tmp_path):
    inputs = {**qkv(), "m": mask_of(kind), "pk": numbers(B, H, 2, D, seed=6), "pv": numbers(B, H, 2, W, seed=7)}
    inputs["m"] = np.concatenate([inputs["m"], inputs["m"][:, :2]], axis=1)
    check(tmp_path, inputs, f"qk_matmul_output_mode = {mode}, softcap = 1.5, is_causal = 1", outputs=4)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rank", [3, 4])
def test_heads_share_keys(kv_heads, rank, tmp_path):
    inputs = qkv(kv_heads=kv_heads)
    if rank == 3:
        inputs = {name: rows_of(array) for name, array in inputs.items()}
    heads = f"q_num_heads = {H}, kv_num_heads = {kv_heads}, " if rank == 3 else ""
    check(tmp_path, inputs, heads + "is_causal = 1, scale = 0.2")


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("lengths", [(0, 5), (1, 4), (3, 2)], ids=str)
@pytest.mark.parametrize("kind", ["", "bool", "infinite"])
def test_lengths_of_keys(kind, lengths, causal, tmp_path):
    inputs = {**qkv(), "n": np.array(lengths, np.int64)}
    if kind:
        inputs["m"] = mask_of(kind)
    graph, _ = check(tmp_path, inputs, f"is_causal = {causal}")
    assert graph.guards  # ONNX Runtime refuses other lengths


@pytest.mark.parametrize("lengths", [(-1, 2), (2, K + 1)], ids=str)
def test_lengths_that_cannot_be_are_declined(lengths, tmp_path):
    inputs = {**qkv(), "n": np.array(lengths, np.int64)}
    graph = graph_of(attention(inputs), inputs, tmp_path)
    assert rewrite(graph)
    assert not all(run(graph.attached(), inputs)[1:])


def test_half_precision(tmp_path):
    inputs = {**qkv(dtype=np.float16), "m": mask_of("bool")}
    check(tmp_path, inputs, "softmax_precision = 1", tolerance=2e-3)


def test_a_key_that_is_no_number_is_one(tmp_path):
    inputs = {**qkv(), "m": mask_of("mixed")}
    inputs["m"][1, 2] = np.nan
    _, (y, *_) = check(tmp_path, inputs)
    assert np.isnan(y[:, :, 1]).all()


def test_nothing_is_asked_where_every_query_has_a_key(tmp_path):
    causal, _ = check(tmp_path, qkv(), "is_causal = 1")
    known, _ = check(tmp_path, {**qkv(), "m": np.eye(Q, K, dtype=bool)}, constants=("m",))
    assert "Where" not in operators(causal) | operators(known)


def test_other_opsets_have_their_definition(tmp_path):
    graph = graph_of(attention(qkv(), opset=25), qkv(), tmp_path)
    assert not rewrite(graph)
