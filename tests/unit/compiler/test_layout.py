"""Layouts over the graph: the plan is the cheapest there is, and blocks that are not full change no answer."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.compiler.choices import Choices
from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.phases.canonicalize import canonicalize
from hone.compiler.phases.layout_plan import plan_layouts
from hone.compiler.phases.mincut import MinCut
from hone.compiler.pipeline import GRAPH_PHASES, Compilation, run_phases
from hone.compiler.profile import profile_model
from tests.unit.compiler.blocked import AVX2, HOST, NEON
from tests.unit.engines.tvm_artifacts import baseline, save_model


@st.composite
def energies(draw):
    number = draw(st.integers(1, 7))
    costs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=number, max_size=number))
    ends = st.integers(0, number - 1)
    return costs, draw(st.lists(st.tuples(ends, ends, st.integers(0, 9)), max_size=12))


@settings(max_examples=150, deadline=None)
@given(energies())
def test_a_minimum_cut_is_the_cheapest_assignment(energy):
    costs, pairs = energy
    cut = MinCut()
    for node, (first, second) in enumerate(costs):
        cut.cost(node, first=first, second=second)
    for a, b, cost in pairs:
        cut.pair(a, b, cost)

    def cost_of(choice):
        paid = sum(cost for a, b, cost in pairs if choice[a] == 0 and choice[b] == 1)
        return paid + sum(costs[node][taken] for node, taken in enumerate(choice))

    total, second = cut.solve()
    assert total == cost_of([int(node in second) for node in range(len(costs))])
    assert total == min(map(cost_of, itertools.product((0, 1), repeat=len(costs))))


def _weights(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"w{at}": (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        for at, shape in enumerate(shapes)
    }


SAME = {"pads": [1, 1, 1, 1]}


def _odd_channels():
    """3, 24, 12, 20 and 5 channels: blocks that are not full, half blocks, residuals, an activation used twice."""
    nodes = [
        ("Conv", ["x", "w0"], ["a"], {**SAME, "strides": [2, 2]}),
        ("Relu", ["a"], ["b"], {}),
        ("Conv", ["b", "w1"], ["c"], SAME),
        ("HardSwish", ["c"], ["d"], {}),
        ("Conv", ["d", "w2"], ["e"], {}),
        ("Add", ["e", "b"], ["f"], {}),
        ("Conv", ["f", "w3"], ["g"], {"pads": [0, 0, 1, 1]}),
        ("Exp", ["g"], ["h"], {}),
        ("Conv", ["h", "w4"], ["y"], {}),
    ]
    shapes = [(24, 3, 3, 3), (12, 24, 3, 3), (24, 12, 1, 1), (20, 24, 2, 2), (5, 20, 1, 1)]
    return nodes, [1, 3, 54, 66], [1, 5, 27, 33], _weights(*shapes)


def _gate():
    """Depthwise, then squeeze-and-excitation, as MobileNetV3 has it; batch 2."""
    nodes = [
        ("Conv", ["x", "w0"], ["a"], {**SAME, "group": 20}),
        ("HardSwish", ["a"], ["b"], {}),
        ("GlobalAveragePool", ["b"], ["c"], {}),
        ("Conv", ["c", "w1"], ["d"], {}),
        ("Relu", ["d"], ["e"], {}),
        ("Conv", ["e", "w2"], ["f"], {}),
        ("HardSigmoid", ["f"], ["g"], {"alpha": 0.2, "beta": 0.5}),
        ("Mul", ["b", "g"], ["h"], {}),
        ("Conv", ["h", "w3"], ["i"], {}),
        ("Flatten", ["i"], ["y"], {}),
    ]
    shapes = [(20, 1, 3, 3), (6, 20, 1, 1), (20, 6, 1, 1), (10, 20, 1, 1)]
    return nodes, [2, 20, 29, 31], [2, 8990], _weights(*shapes)


def _pyramid():
    """Upsampling, parts that end within blocks, transposed convolution, poolings of all kinds."""
    nodes = [
        ("Conv", ["x", "w0"], ["a"], SAME),
        ("MaxPool", ["a"], ["b"], {"kernel_shape": [3, 3], "strides": [2, 2], **SAME}),
        ("AveragePool", ["a"], ["c"], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("Add", ["b", "c"], ["d"], {}),
        ("Conv", ["d", "w1"], ["e"], {}),
        ("Resize", ["e", "", "scales"], ["f"], {
            "mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor",
        }),
        ("Concat", ["a", "f", "a"], ["g"], {"axis": 1}),
        ("Conv", ["g", "w2"], ["h"], SAME),
        ("ConvTranspose", ["h", "w3"], ["i"], {"strides": [2, 2], "pads": [1, 1, 0, 0]}),
        ("Sigmoid", ["i"], ["y"], {}),
    ]  # fmt: skip
    weights = _weights((24, 4, 3, 3), (12, 24, 1, 1), (9, 60, 3, 3), (9, 3, 3, 3))
    return nodes, [1, 4, 36, 36], [1, 3, 72, 72], {**weights, "scales": np.array([1, 1, 2, 2], np.float32)}


def _segmentation():
    """Grouped and dilated convolutions, a linear resize, and a maximum over the image."""
    nodes = [
        ("Conv", ["x", "w0"], ["a"], {"pads": [2, 2, 2, 2], "dilations": [2, 2]}),
        ("Conv", ["a", "w1"], ["b"], {**SAME, "group": 4}),
        ("LeakyRelu", ["b"], ["c"], {"alpha": 0.1}),
        ("Conv", ["c", "w2"], ["d"], {}),
        ("Resize", ["d", "", "scales"], ["e"], {"mode": "linear"}),
        ("ReduceMax", ["e"], ["f"], {"axes": [2, 3], "keepdims": 1}),
        ("Sub", ["e", "f"], ["y"], {}),
    ]
    weights = _weights((32, 6, 3, 3), (24, 8, 3, 3), (12, 24, 1, 1))
    return nodes, [1, 6, 20, 23], [1, 12, 80, 46], {**weights, "scales": np.array([1, 1, 4, 2], np.float32)}


NETWORKS = {"odd channels": _odd_channels, "gate": _gate, "pyramid": _pyramid, "segmentation": _segmentation}


def _imported(folder, network) -> tuple[ImportedModel, object]:
    nodes, shape, result, weights = NETWORKS[network]()
    inputs, outputs = {"x": ("float32", shape)}, {"y": ("float32", result)}
    path = save_model(folder / "model.onnx", nodes, inputs, outputs, weights)
    model = import_model(path, {})
    assert isinstance(model, ImportedModel), model
    return model, path


@pytest.mark.parametrize("network", NETWORKS)
def test_a_laid_out_network_answers_as_the_baseline(network, tmp_path):
    model, path = _imported(tmp_path, network)
    shape = model.inputs[0].shape
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    profile = profile_model(model, HOST, inputs=[x], rounds=2)
    (want,) = baseline(path, {"x": x}, ["y"])
    np.testing.assert_allclose(profile.outputs[0], want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("target", [HOST, AVX2, NEON], ids=["host", "avx2", "neon"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_plan_is_never_worse_than_plain(network, target, tmp_path):
    model, _ = _imported(tmp_path, network)
    plan = plan_layouts(canonicalize(model.mod)["main"], target)
    assert plan.blocked
    assert plan.cost_ns < plan.plain_ns


@pytest.mark.parametrize("network", NETWORKS)
def test_layouts_change_at_the_ends_only(network, tmp_path):
    model, _ = _imported(tmp_path, network)
    text = run_phases(model.mod, GRAPH_PHASES, Compilation(HOST, Choices()), None)["main"].script()
    assert not re.findall(r"R\.nn\.(?:conv|max|avg|adaptive)|R\.concat|R\.image|R\.mean", text)
    changes = re.findall(r"R\.layout_transform\((\w+)|(?:to_blocks|to_plain)\w*, \((\w+)", text)
    inputs = {name for pair in changes for name in pair if name and not name.startswith("w")}
    assert len(inputs) <= 2, text  # the input's and the output's


def test_operators_without_a_blocked_neighbour_stay_plain(tmp_path):
    nodes = [("Mul", ["x", "x"], ["a"], {}), ("Relu", ["a"], ["y"], {})]
    shape = ("float32", [1, 16, 8, 8])
    path = save_model(tmp_path / "model.onnx", nodes, {"x": shape}, {"y": shape}, {})
    plan = plan_layouts(canonicalize(import_model(path, {}).mod)["main"], HOST)
    assert not plan.blocked
    assert plan.cost_ns == plan.plain_ns


def test_a_profile_tells_every_call(tmp_path):
    model, _ = _imported(tmp_path, "gate")
    profile = profile_model(model, HOST, rounds=3)
    kernels = [call for call in profile.calls if call.kernel is not None]
    assert {call.kernel.workload.op for call in kernels} == {"depthwise_conv2d", "global_pool", "conv2d"}
    assert all(call.kernel is not None or call.function is not None for call in profile.calls)
    assert all(len(call.times_us) == 3 and call.microseconds > 0 for call in profile.calls)
    starts = [call.start_us for call in profile.calls]
    assert starts == sorted(starts)
    assert profile.total_us > 0
    assert profile.overhead_us > 0
