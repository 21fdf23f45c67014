"""Layers of both sides side by side, and what ONNX Runtime's profiler tells."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from hone.compiler.choices import KernelCall
from hone.compiler.profile import Profile, ProfiledCall
from hone.compiler.roofline import Roofline
from hone.compiler.templates.base import Candidate
from hone.compiler.workload import TensorType, Workload
from hone.errors import EngineError
from hone.kernels import DeviceKey, KernelsCache, digest_of
from hone.tuning.baseline_profile import ProfiledNode, nodes_of, profile_baseline
from hone.tuning.explanation import Explanation, groups_of, layers_of, recall_lowering
from hone.tuning.lowering import KeptLayer, Lowering

LOWERING = Lowering("bf16", 12, 2.5, 0.8, (KeptLayer(3, "a layer", 1.5),))
LIMITS = Roofline(1, 100.0, 100.0, 100.0, ((1 << 30, 1000.0),))


def tensor(*shape: int) -> TensorType:
    return TensorType(shape, "float32")


CONVOLUTION = Workload("conv2d", (tensor(1, 1, 8, 8, 16), tensor(32, 16, 3, 3)), tensor(1, 2, 8, 8, 16))
PRODUCT = Workload("matmul", (tensor(4, 32), tensor(32, 10)), tensor(4, 10))


def call(workload: Workload | None, microseconds: float) -> ProfiledCall:
    candidate = Candidate.of("a", tile=4)
    kernel = KernelCall(workload, None, candidate, "0" * 64, 1) if workload else None
    return ProfiledCall("f", kernel, None, ((4, 10),), (microseconds,), 0.0)


def node(op: str, inputs, outputs, microseconds: float) -> ProfiledNode:
    return ProfiledNode(op.lower(), op, tuple(inputs), tuple(outputs), (microseconds,), 0.0)


NODES = (
    node("ReorderInput", [(1, 16, 8, 8)], [(1, 16, 8, 8)], 2.0),
    node("Conv", [(1, 16, 8, 8), (32, 16, 3, 3), (32,)], [(1, 32, 8, 8)], 30.0),
    node("Gemm", [(4, 32)], [(4, 10)], 3.0),
)


def test_layers_are_matched_by_what_they_compute():
    layers = {layer.what: layer for layer in layers_of([call(CONVOLUTION, 20.0), call(PRODUCT, 4.0)], NODES)}
    convolution = layers["convolution 32x16x3x3 to 64 pixels"]
    assert (convolution.tuned_us, convolution.baseline_us, convolution.lost) == (20.0, 30.0, False)
    product = layers["product of depth 32 to 40 numbers"]
    assert (product.tuned_us, product.baseline_us, product.lost) == (4.0, 3.0, True)
    assert layers["everything else"].baseline_us == 2.0


def test_no_time_is_left_out_where_a_layer_has_no_counterpart():
    layers = layers_of([call(CONVOLUTION, 20.0), call(None, 1.0)], NODES[2:])
    assert sum(layer.tuned_us for layer in layers) == 21.0
    assert sum(layer.baseline_us for layer in layers) == 3.0
    assert [layer.what for layer in layers] == ["everything else"]


def test_the_greatest_loss_comes_first():
    layers = layers_of([call(CONVOLUTION, 20.0), call(PRODUCT, 9.0)], NODES)
    assert layers[0].what.startswith("product")


def test_groups_tell_rates_and_shares():
    profile = Profile((call(CONVOLUTION, 30.0), call(None, 10.0)), 41.0, 1.0, ())
    first, second = groups_of(profile, LIMITS)
    assert first.share == 0.75
    assert first.layout == "NCHW16c"
    assert first.gflops == pytest.approx(2 * 32 * 16 * 9 * 64 / 30e3)
    assert first.of_roofline == pytest.approx(first.gflops / 100.0)
    assert second.of_roofline is None


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.onnx"
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("MatMul", ["y", "y"], ["z"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 8])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [8, 8])],
    )
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_onnxruntime_tells_of_its_nodes(model):
    profile = profile_baseline(model, {"x": np.ones((8, 8), np.float32)}, rounds=3)
    assert [one.op for one in profile.nodes] == ["Relu", "MatMul"]
    assert profile.nodes[1].outputs == ((8, 8),)
    assert all(len(one.times_us) == 3 for one in profile.nodes)
    assert profile.total_us > 0


def test_a_model_that_does_not_load_is_an_error_with_a_reason(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(EngineError, match=r"model\.onnx could not be profiled"):
        profile_baseline(path, {}, rounds=1)


def test_events_of_no_run_are_no_nodes():
    assert nodes_of([{"cat": "Session", "name": "session_initialization", "ts": 0, "dur": 5}]) == ()


def test_the_trace_has_both_sides(model):
    baseline = profile_baseline(model, {"x": np.ones((8, 8), np.float32)}, rounds=1)
    profile = Profile((call(PRODUCT, 3.0),), 3.0, 0.0, ())
    found = Explanation("x", "bf16", LOWERING, LIMITS, groups_of(profile, LIMITS), (), profile, baseline)
    trace = json.loads(json.dumps(found.trace()))
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2}
    assert [event["dur"] for event in trace["traceEvents"] if event["pid"] == 1 and event["ph"] == "X"] == [3.0]
    told = json.loads(json.dumps(found.to_json()))
    assert told["tuned"]["groups"][0]["parameters"] == {"tile": 4}
    assert told["lowering"]["kept"] == [{"layer": 3, "what": "a layer", "effect": 1.5}]


def test_groups_tell_what_they_compute_in():
    lowered = replace(PRODUCT, attributes=(("precision", "bf16"),))
    profile = Profile((call(lowered, 3.0), call(PRODUCT, 3.0), call(None, 1.0)), 7.0, 0.0, ())
    assert [group.precision for group in groups_of(profile, LIMITS)] == ["bf16", "f32", "f32"]


def test_what_is_kept_is_read_from_the_artifact(tmp_path):
    cache, device = KernelsCache(tmp_path / "cache"), DeviceKey.for_cpu()
    digests = [digest_of({"artifact": i}) for i in range(3)]
    for digest, manifest in zip(digests, ({"lowering": LOWERING.to_json()}, {}, {"lowering": {}}), strict=True):
        (tmp_path / "file").write_text("x")
        told = {**manifest, "key": {"artifact": digests.index(digest)}}
        cache.publish("artifacts", digest, device.digest, {"file": tmp_path / "file"}, told)
    assert recall_lowering(cache, device, digests[0]) == LOWERING
    assert recall_lowering(cache, device, digests[1]) is None
    assert recall_lowering(cache, device, "0" * 64) is None
    with pytest.raises(EngineError, match="not understood"):
        recall_lowering(cache, device, digests[2])
