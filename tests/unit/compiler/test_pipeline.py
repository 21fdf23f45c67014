"""The whole pipeline: models match ONNX Runtime, and what each phase promises can be seen in what it leaves."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax

from hone.compiler.choices import Choices
from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.pipeline import PHASES, compile_model, template_workloads
from hone.compiler.target import CpuTarget
from hone.compiler.templates.base import KERNEL_PREFIX
from hone.compiler.templates.registry import templates_for
from hone.engines.tvm_runtime import TvmRuntime
from tests.unit.engines.tvm_artifacts import baseline, compile_to, load, save_model, small_network

HOST = CpuTarget.detect(num_threads=1)


def imported(path) -> ImportedModel:
    model = import_model(path, {})
    assert isinstance(model, ImportedModel), model
    return model


def dumps(path, target=HOST, choices=None):
    """Name of phase -> module after it."""
    kept = {}
    compiled = compile_model(imported(path), target, choices, dump=kept.setdefault)
    return compiled, kept


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return small_network(tmp_path_factory.mktemp("pipeline") / "model.onnx")


@pytest.fixture(scope="module")
def compiled_network(network):
    return dumps(network)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """Sixteen element-wise operators."""
    operators = ["Mul", "Add", "Relu", "Sub", "Mul", "Add", "Abs", "Tanh", "Mul", "Add", "Sigmoid", "Neg", "Add", "Mul",
                 "Abs", "Add"]  # fmt: skip
    nodes, weights, last = [], {}, "x"
    for at, operator in enumerate(operators):
        inputs = [last]
        if operator in ("Mul", "Add", "Sub"):
            weights[f"c{at}"] = np.array(0.9 + at / 10, np.float32)
            inputs.append(f"c{at}")
        last = "y" if at == len(operators) - 1 else f"v{at}"
        nodes.append((operator, inputs, [last], {}))
    path = tmp_path_factory.mktemp("chain") / "model.onnx"
    shape = ("float32", [1, 3, 32, 40])
    return save_model(path, nodes, {"x": shape}, {"y": shape}, weights)


def test_phases_are_numbered_in_order():
    assert [name.split()[0] for name, _ in PHASES] == [str(n) for n in range(1, len(PHASES) + 1)]


def test_every_phase_can_be_dumped(compiled_network):
    compiled, kept = compiled_network
    assert list(kept) == [name for name, _ in PHASES]
    assert all(isinstance(mod, tvm.IRModule) for mod in kept.values())
    assert set(compiled.phase_seconds) == {*kept, "8 build"}


def test_layouts_are_blocked_between_convolutions(compiled_network):
    text = compiled_network[1]["2 layout"]["main"].script()
    block = HOST.lanes
    assert text.count(f'\\"out_layout\\": \\"NCHW{block}c\\"') == 2
    assert f'\\"data_layout\\": \\"NCHW{block}c\\"' in text


def test_layouts_change_at_the_ends_only(tmp_path):
    """Residuals, pooling, concatenation and broadcasts stay in blocks: one change behind the last of them."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((16, 16, 3, 3)).astype(np.float32) for i in range(3)}
    weights["scale"] = rng.standard_normal((16, 1, 1)).astype(np.float32)
    weights["w3"] = rng.standard_normal((16, 32, 1, 1)).astype(np.float32)
    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        ("Conv", ["x", "w0"], ["a"], same),
        ("Conv", ["a", "w1"], ["b"], same),
        ("Add", ["a", "b"], ["c"], {}),
        ("MaxPool", ["c"], ["d"], {"kernel_shape": [3, 3], **same}),
        ("Concat", ["c", "d"], ["e"], {"axis": 1}),
        ("Conv", ["e", "w3"], ["f"], {}),
        ("Mul", ["f", "scale"], ["g"], {}),
        ("Sigmoid", ["g"], ["h"], {}),
        ("Conv", ["h", "w2"], ["y"], same),
    ]
    shape = ("float32", [1, 16, 8, 8])
    text = dumps(save_model(tmp_path / "model.onnx", nodes, {"x": shape}, {"y": shape}, weights))[1]["4 fuse"][
        "main"
    ].script()
    assert len(re.findall(r"call_tir\([\w.]*te_layout_transform", text)) == 2  # the input's and the output's


def test_convolutions_are_kernels_with_their_epilogues(compiled_network):
    compiled, kept = compiled_network
    text = kept["3 partition"]["main"].script()
    assert "nn.conv2d" not in text and "nn.relu" not in text
    assert len(re.findall(KERNEL_PREFIX + "[0-9a-f]{64}", text)) == sum(call.num_calls for call in compiled.kernels)
    told = [(call.workload.op, [step.op for step in call.workload.epilogue]) for call in compiled.kernels]
    assert told[:2] == [("conv2d", ["add", "relu"])] * 2
    assert {("global_pool", ()), ("matmul", ("add",))} <= {(op, tuple(steps)) for op, steps in told}


def test_weights_are_prepared_outside_of_main(compiled_network):
    compiled, kept = compiled_network
    mod = kept["4 fuse"]
    main, transform = mod["main"].script(), mod["main_transform_params"].script()
    assert "pack" in transform
    assert "layout_transform" not in main  # one image's channels are the same memory in blocks and plain
    assert len(mod["main"].params) == 2  # the input, and the prepared weights together
    assert len(compiled.packed) == len(mod["main"].params[1].ty.fields) == len(set(compiled.packed))


def test_weights_are_not_in_the_code(network, tmp_path):
    folder = compile_to(tmp_path / "artifact", network)
    weight = next(iter(imported(network).params.values()))
    assert weight.tobytes()[:64] not in (folder / "module.so").read_bytes()


def test_a_chain_becomes_one_function(chain):
    compiled, kept = dumps(chain)
    functions = [f for f in kept["5 schedule"].functions.values() if not isinstance(f, relax.Function)]
    assert len(functions) == 1
    assert len(compiled.functions) == 1 and compiled.functions[0].rule == "element-wise"


def test_memory_is_planned_and_shared(chain, tmp_path):
    """Eight layers that alternate between two buffers at most: storage does not grow with the depth."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((64, 64)).astype(np.float32) for i in range(8)}
    nodes = [("MatMul", ["x" if i == 0 else f"v{i}", f"w{i}"], ["y" if i == 7 else f"v{i + 1}"], {}) for i in range(8)]
    shape = ("float32", [4, 64])
    path = save_model(tmp_path / "model.onnx", nodes, {"x": shape}, {"y": shape}, weights)
    text = dumps(path)[1]["7 plan memory"]["main"].script()
    assert text.count("alloc_tensor") == 8
    assert text.count("alloc_storage") <= 3


def test_reshapes_are_views(tmp_path):
    shape = ("float32", [4, 24])
    path = save_model(
        tmp_path / "model.onnx",
        [("Relu", ["x"], ["r"], {}), ("Reshape", ["r", "s"], ["t"], {}), ("Softmax", ["t"], ["y"], {"axis": -1})],
        {"x": shape},
        {"y": ("float32", [8, 12])},
        {"s": np.array([8, 12], np.int64)},
    )
    assert "vm.builtin.reshape" in dumps(path)[1]["7 plan memory"]["main"].script()


def test_choices_decide_which_kernel_is_called(network):
    model = imported(network)
    workloads = template_workloads(model, HOST)
    assert {workload.op for workload in workloads} >= {"conv2d", "global_pool", "matmul"}
    chosen = {}
    for workload in workloads:
        candidates = templates_for(workload, HOST)[0].candidates(workload, HOST)
        if len(candidates) > 1:
            chosen[workload.digest] = candidates[1]
    assert len(chosen) >= 3
    plain, tuned = compile_model(model, HOST), compile_model(model, HOST, Choices(kernels=chosen))
    assert {call.workload for call in tuned.kernels} == {call.workload for call in plain.kernels} == set(workloads)
    free = [call for call in tuned.kernels if call.workload.digest in chosen]
    assert {call.candidate for call in free} == set(chosen.values())
    assert not {call.digest for call in free} & {call.digest for call in plain.kernels}


def test_equal_workloads_share_a_kernel(tmp_path):
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal((16, 16, 3, 3)).astype(np.float32) for i in range(3)}
    nodes = [
        ("Conv", ["x" if i == 0 else f"v{i}", f"w{i}"], ["y" if i == 2 else f"v{i + 1}"], {"pads": [1, 1, 1, 1]})
        for i in range(3)
    ]
    shape = ("float32", [1, 16, 8, 8])
    compiled, _ = dumps(save_model(tmp_path / "model.onnx", nodes, {"x": shape}, {"y": shape}, weights))
    assert [call.num_calls for call in compiled.kernels] == [3]


def network_with(nodes, inputs, outputs, weights):
    return nodes, inputs, outputs, weights


def _residual(rng):
    conv = {"pads": [1, 1, 1, 1]}
    return network_with(
        [
            ("Conv", ["x", "w0"], ["c0"], conv),
            ("Relu", ["c0"], ["r0"], {}),
            ("Conv", ["r0", "w1", "b1"], ["c1"], conv),
            ("Add", ["c1", "c0"], ["s"], {}),
            ("Relu", ["s"], ["y"], {}),
        ],
        {"x": ("float32", [2, 16, 9, 9])},
        {"y": ("float32", [2, 16, 9, 9]), "c0": ("float32", [2, 16, 9, 9])},
        {
            "w0": rng.standard_normal((16, 16, 3, 3)) / 12,
            "w1": rng.standard_normal((16, 16, 3, 3)) / 12,
            "b1": rng.standard_normal(16),
        },
    )


def _value_used_twice(rng):
    """What the convolution gives is needed inside and outside of its epilogue."""
    return network_with(
        [
            ("Conv", ["x", "w"], ["c"], {}),
            ("Sigmoid", ["c"], ["s"], {}),
            ("Mul", ["c", "s"], ["m"], {}),
            ("GlobalAveragePool", ["c"], ["p"], {}),
            ("Add", ["m", "p"], ["y"], {}),
        ],
        {"x": ("float32", [1, 16, 6, 6])},
        {"y": ("float32", [1, 32, 6, 6])},
        {"w": rng.standard_normal((32, 16, 1, 1)) / 4},
    )


def _operand_that_depends_on_the_group(rng):
    """The residual is computed from the convolution's own result: it cannot be an input of the same kernel."""
    return network_with(
        [
            ("Conv", ["x", "w"], ["c"], {}),
            ("Relu", ["c"], ["r"], {}),
            ("Transpose", ["r"], ["t"], {"perm": [0, 1, 3, 2]}),
            ("Add", ["r", "t"], ["y"], {}),
        ],
        {"x": ("float32", [1, 16, 6, 6])},
        {"y": ("float32", [1, 16, 6, 6])},
        {"w": rng.standard_normal((16, 16, 1, 1)) / 4},
    )


def _grouped_and_odd(rng):
    return network_with(
        [
            ("Conv", ["x", "dw"], ["d"], {"group": 16, "pads": [1, 1, 1, 1]}),
            ("Conv", ["d", "w"], ["c"], {}),
            ("Conv", ["c", "odd", "bias"], ["y"], {"strides": [2, 2]}),
        ],
        {"x": ("float32", [1, 16, 7, 7])},
        {"y": ("float32", [1, 5, 3, 3])},
        {
            "dw": rng.standard_normal((16, 1, 3, 3)),
            "w": rng.standard_normal((24, 16, 1, 1)) / 4,
            "odd": rng.standard_normal((5, 24, 3, 3)) / 14,
            "bias": rng.standard_normal(5),
        },
    )


def _batch_norm_and_hard_swish(rng):
    return network_with(
        [
            ("Conv", ["x", "w"], ["c"], {"pads": [2, 2, 2, 2], "strides": [2, 2]}),
            ("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"], {}),
            ("HardSwish", ["n"], ["y"], {}),
        ],
        {"x": ("float32", [1, 3, 15, 15])},
        {"y": ("float32", [1, 16, 8, 8])},
        {
            "w": rng.standard_normal((16, 3, 5, 5)) / 8,
            "scale": rng.random(16) + 0.5,
            "bias": rng.standard_normal(16),
            "mean": rng.standard_normal(16),
            "var": rng.random(16) + 0.5,
        },
    )


def _attention(rng):
    return network_with(
        [
            ("MatMul", ["x", "wq"], ["q"], {}),
            ("MatMul", ["x", "wk"], ["k"], {}),
            ("Transpose", ["k"], ["kt"], {"perm": [0, 2, 1]}),
            ("MatMul", ["q", "kt"], ["scores"], {}),
            ("Softmax", ["scores"], ["p"], {"axis": -1}),
            ("MatMul", ["p", "x"], ["o"], {}),
            ("LayerNormalization", ["o", "scale", "bias"], ["n"], {"axis": -1}),
            ("Erf", ["n"], ["y"], {}),
        ],
        {"x": ("float32", [2, 12, 32])},
        {"y": ("float32", [2, 12, 32])},
        {
            "wq": rng.standard_normal((32, 32)) / 6,
            "wk": rng.standard_normal((32, 32)) / 6,
            "scale": rng.random(32) + 0.5,
            "bias": rng.standard_normal(32),
        },
    )


def _squeeze_and_excite(rng):
    """A gate over channels, made from the mean of the picture and broadcast over it."""
    return network_with(
        [
            ("Conv", ["x", "w"], ["c"], {"pads": [1, 1, 1, 1]}),
            ("ReduceMean", ["c"], ["m"], {"axes": [2, 3], "keepdims": 1}),
            ("Conv", ["m", "w1"], ["d"], {}),
            ("Relu", ["d"], ["r"], {}),
            ("Conv", ["r", "w2", "b2"], ["e"], {}),
            ("Sigmoid", ["e"], ["gate"], {}),
            ("Mul", ["c", "gate"], ["g"], {}),
            ("Add", ["g", "map"], ["y"], {}),
        ],
        {"x": ("float32", [2, 16, 7, 7])},
        {"y": ("float32", [2, 32, 7, 7])},
        {
            "w": rng.standard_normal((32, 16, 3, 3)) / 12,
            "w1": rng.standard_normal((16, 32, 1, 1)) / 6,
            "w2": rng.standard_normal((32, 16, 1, 1)) / 4,
            "b2": rng.standard_normal(32),
            "map": rng.standard_normal((1, 1, 7, 7)),
        },
    )


def _branches(rng):
    """Pooling and concatenation in blocks; a resize and a transposed convolution that have none."""
    return network_with(
        [
            ("Conv", ["x", "w"], ["c"], {"pads": [1, 1, 1, 1]}),
            ("MaxPool", ["c"], ["p"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
            ("AveragePool", ["c"], ["a"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
            ("Concat", ["c", "p", "a"], ["k"], {"axis": 1}),
            ("Conv", ["k", "w1"], ["d"], {}),
            ("Resize", ["d", "", "scales"], ["r"], {"mode": "nearest"}),
            ("Conv", ["r", "w2"], ["e"], {"strides": [2, 2]}),
            ("ConvTranspose", ["e", "w3"], ["t"], {"strides": [2, 2]}),
            ("Sub", ["one", "t"], ["y"], {}),
        ],
        {"x": ("float32", [1, 3, 8, 8])},
        {"y": ("float32", [1, 4, 16, 16])},
        {
            "w": rng.standard_normal((16, 3, 3, 3)) / 5,
            "w1": rng.standard_normal((32, 48, 1, 1)) / 7,
            "w2": rng.standard_normal((16, 32, 1, 1)) / 6,
            "w3": rng.standard_normal((16, 4, 2, 2)) / 8,
            "scales": np.array([1, 1, 2, 2]),
            "one": np.ones(1),
        },
    )


@pytest.mark.parametrize(
    "build",
    [
        _residual,
        _value_used_twice,
        _operand_that_depends_on_the_group,
        _grouped_and_odd,
        _batch_norm_and_hard_swish,
        _squeeze_and_excite,
        _branches,
        _attention,
    ],
    ids=lambda build: build.__name__.strip("_"),
)
def test_matches_onnx_runtime(build, tmp_path):
    nodes, inputs, outputs, weights = build(np.random.default_rng(0))
    path = save_model(
        tmp_path / "model.onnx", nodes, inputs, outputs,
        {name: array.astype(np.float32) for name, array in weights.items()},
    )  # fmt: skip
    rng = np.random.default_rng(1)
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, (_, shape) in inputs.items()}
    expected = baseline(path, feed, list(outputs))
    runtime = TvmRuntime.load(num_threads=1)
    got = load(compile_to(tmp_path / "artifact", path), runtime).instantiate().run(feed, list(outputs))
    for name, ours, theirs in zip(outputs, got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max(), err_msg=name)


def test_a_chain_matches_onnx_runtime(chain, tmp_path):
    x = np.random.default_rng(0).standard_normal((1, 3, 32, 40)).astype(np.float32)
    (expected,) = baseline(chain, {"x": x}, ["y"])
    runtime = TvmRuntime.load(num_threads=1)
    (got,) = load(compile_to(tmp_path / "artifact", chain), runtime).instantiate().run({"x": x}, ["y"])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_packing_has_the_same_name_in_every_batch_size_only_for_the_same_weights(tmp_path):
    keys = [
        compile_model(imported(small_network(tmp_path / f"{batch}{seed}.onnx", batch=batch, seed=seed)), HOST).packed
        for batch, seed in ((1, 0), (4, 0), (1, 1))
    ]
    assert set(keys[0]) == set(keys[1])
    assert not set(keys[0]) & set(keys[2])
