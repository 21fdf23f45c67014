"""Concatenations are written in place: right numbers, no copies, and a memory plan in which nothing is overwritten."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tvm import relax

from hone.compiler.choices import Choices
from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.phases.concats import ALIGNMENT, num_bytes
from hone.compiler.phases.graph import operator_of
from hone.compiler.phases.memory import plan_memory
from hone.compiler.phases.place import Placement, stacks_runs
from hone.compiler.phases.types import tensor_type
from hone.compiler.pipeline import PHASES, Compilation, run_phases
from hone.compiler.profile import Profile, profile_model, random_inputs
from hone.compiler.target import CpuTarget
from hone.compiler.workload import TensorType, Workload
from hone.engines.tvm_runtime import TvmRuntime
from tests.unit.engines.tvm_artifacts import baseline, compile_to, load, save_model

HOST = CpuTarget.detect(num_threads=1)
LANES = HOST.lanes


class Network:
    """Nodes with random weights, in the order in which they are asked for."""

    def __init__(self, shape, seed=0) -> None:
        self.shape, self.nodes, self.weights = shape, [], {}
        self.channels = {"x": shape[1]}
        self._rng = np.random.default_rng(seed)

    def op(self, name, *inputs, channels=None, **attributes):
        out = f"v{len(self.nodes)}"
        self.nodes.append((name, list(inputs), [out], attributes))
        self.channels[out] = self.channels[inputs[0]] if channels is None else channels
        return out

    def weight(self, *shape):
        name = f"w{len(self.weights)}"
        self.weights[name] = (self._rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        return name

    def conv(self, data, channels, size=1):
        weight = self.weight(channels, self.channels[data], size, size)
        return self.op("Relu", self.op("Conv", data, weight, channels=channels, pads=[size // 2] * 4))

    def concat(self, *parts):
        return self.op("Concat", *parts, channels=sum(self.channels[part] for part in parts), axis=1)

    def save(self, path, *outputs):
        """Outputs are of shapes that the importer works out."""
        return save_model(path, self.nodes, {"x": ("float32", self.shape)},
                          dict.fromkeys(outputs, ("float32", None)), self.weights)  # fmt: skip


@dataclass
class Compiled:
    placements: list[Placement]
    profile: Profile

    @property
    def copies(self):
        """Calls that concatenate, or that copy a part."""
        kernels = [call for call in self.profile.calls if call.kernel and call.kernel.workload.op == "stack_channels"]
        return kernels + [call for call in self.profile.calls if re.search("concat|copy_part", call.name)]


def check(path) -> Compiled:
    """Compile, compare with ONNX Runtime, and check the plan of memory."""
    TvmRuntime.load(1)
    model = import_model(path, {})
    assert isinstance(model, ImportedModel), model
    compilation = Compilation(HOST, Choices(), parameters=tuple(model.params))
    module = run_phases(model.mod, PHASES, compilation, None)
    planned = run_the_plan(module["main"])
    copying = Compilation(HOST, Choices(), parameters=tuple(model.params))
    phases = (*PHASES[:-2], ("6 plan memory", lambda mod, _: plan_memory(mod)))
    without = run_the_plan(run_phases(model.mod, phases, copying, None)["main"])
    wholes = sum(num_bytes(TensorType(told.shape, "float32")) for told in compilation.placements)
    assert planned <= without + wholes  # whatever else happens to share storage
    inputs = random_inputs(model)
    profile = profile_model(model, HOST, inputs=inputs, rounds=1)
    wanted = baseline(path, {spec.name: array for spec, array in zip(model.inputs, inputs, strict=True)}, None)
    for got, right in zip(profile.outputs, wanted, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)
    return Compiled(compilation.placements, profile)


def run_the_plan(main) -> int:
    """Follow who wrote each byte of planned storage: a tensor is read as it was written, and a whole never changes.

    Returns the bytes of all storage.
    """
    storages: dict[Any, np.ndarray] = {}
    places: dict[Any, np.ndarray] = {}
    writers: dict[Any, int] = {}
    seen: dict[Any, np.ndarray] = {}

    def read(var, at):
        written_by = places[var]
        if var in writers:
            assert (written_by == writers[var]).all(), f"{var} is overwritten before call {at} reads it"
        else:
            assert written_by.min() > 0, f"call {at} reads bytes of {var} that nobody wrote"
            before = seen.setdefault(var, written_by.copy())
            assert (written_by == before).all(), f"{var} changes before call {at} reads it"

    aliases: dict[Any, Any] = {}
    for at, binding in enumerate((b for block in main.body.blocks for b in block.bindings), start=1):
        var, value = binding.var, binding.value
        name = operator_of(value) or str(getattr(getattr(value, "op", None), "global_symbol", ""))
        if name == "relax.vm.alloc_storage":
            storages[var] = np.zeros(int(value.args[0].values[0]), np.int64)
        elif name == "relax.vm.alloc_tensor":
            tensor, offset = tensor_type(var), int(value.args[1].value)
            size = num_bytes(tensor)
            assert offset + size <= storages[value.args[0]].size
            assert offset % ALIGNMENT == 0
            places[var] = storages[value.args[0]][offset : offset + size]
        elif name == "vm.builtin.reshape" or isinstance(value, relax.Var):
            source = value if isinstance(value, relax.Var) else value.args[0]
            aliases[var] = aliases.get(source, source)
        elif isinstance(value, relax.Call) and not name.startswith(("relax.vm.kill", "relax.null", "vm.builtin")):
            callee = str(getattr(value.op, "name_hint", name))
            arguments = [aliases.get(arg, arg) for arg in value.args if isinstance(arg, relax.Var)]
            arguments = [arg for arg in arguments if arg in places]
            if callee.startswith("hone_settle"):
                continue
            assert arguments, f"{value} writes to nothing"
            *operands, destination = arguments
            for operand in operands:
                read(operand, at)
            assert destination not in writers, f"{destination} is written twice"
            writers[destination] = at
            places[destination][:] = at
    returned = main.body.body
    for var in [returned] if isinstance(returned, relax.Var) else []:
        if aliases.get(var, var) in places:
            read(aliases.get(var, var), "return")
    return sum(storage.size for storage in storages.values())


def test_parts_of_one_image_are_written_in_place(tmp_path):
    net = Network([1, LANES, 6, 5])
    squeezed = net.conv("x", LANES)
    both = net.concat(net.conv(squeezed, LANES), net.conv(squeezed, 2 * LANES, 3))
    compiled = check(net.save(tmp_path / "fire.onnx", net.conv(both, LANES)))
    assert [(told.num_in_place, told.num_copied) for told in compiled.placements] == [(2, 0)]
    assert compiled.placements[0].bytes_in_place == 4 * 3 * LANES * 30
    assert not compiled.copies


def test_nested_concatenations_lie_in_the_outermost(tmp_path):
    net = Network([1, LANES, 4, 4])
    a, b, c = (net.conv("x", LANES) for _ in range(3))
    inner = net.concat(a, b)
    net_out = net.conv(net.concat(c, inner, net.conv(inner, LANES)), LANES)
    compiled = check(net.save(tmp_path / "nested.onnx", net_out))
    assert [told.num_in_place for told in compiled.placements] == [2, 3]
    assert not compiled.copies


def test_a_dense_block_is_one_storage_with_views(tmp_path):
    net = Network([1, LANES, 4, 4])
    features = [net.conv("x", LANES)]
    for _ in range(4):
        whole = net.concat(*features) if len(features) > 1 else features[0]
        features.append(net.conv(whole, LANES))
    compiled = check(net.save(tmp_path / "dense.onnx", net.conv(net.concat(*features), LANES)))
    assert [told.num_in_place for told in compiled.placements] == [2, 3, 4, 5]
    assert not compiled.copies


def test_branches_of_an_inception_block_with_one_that_is_used_again(tmp_path):
    net = Network([1, LANES, 6, 6])
    a = net.conv("x", LANES)
    pooled = net.op("MaxPool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    whole = net.concat(a, net.conv(net.conv("x", LANES), 2 * LANES, 3), net.conv(pooled, LANES), net.conv(a, LANES))
    compiled = check(net.save(tmp_path / "inception.onnx", net.op("Add", net.conv(whole, LANES), a)))
    assert [(told.num_in_place, told.num_copied) for told in compiled.placements] == [(4, 0)]
    assert not compiled.copies


def test_a_skip_connection_lives_in_the_decoders_storage(tmp_path):
    net = Network([1, LANES, 8, 8])
    skip = net.conv("x", LANES, 3)
    low = net.conv(net.op("MaxPool", skip, kernel_shape=[2, 2], strides=[2, 2]), LANES)
    up = net.op("ConvTranspose", low, net.weight(LANES, LANES, 2, 2), kernel_shape=[2, 2], strides=[2, 2])
    compiled = check(net.save(tmp_path / "unet.onnx", net.conv(net.concat(skip, up), LANES)))
    assert [(told.num_in_place, told.num_copied) for told in compiled.placements] == [(2, 0)]
    assert not compiled.copies


def test_an_input_and_a_part_that_occurs_twice_are_copied(tmp_path):
    net = Network([1, 64, 64])
    a = net.op("Softmax", "x", axis=-1)
    whole = net.op("Concat", a, "x", a, channels=192, axis=1)
    compiled = check(net.save(tmp_path / "twice.onnx", whole))
    for told in compiled.placements:  # in place only as far as that saves more than it costs
        assert (told.num_in_place, told.num_copied) == (1, 2)
    assert len(compiled.copies) in (1, 2)


def test_outputs_of_the_model_stay_tensors_of_their_own(tmp_path):
    net = Network([1, LANES, 4, 4])
    a, b = net.conv("x", LANES), net.conv("x", LANES)
    path = net.save(tmp_path / "outputs.onnx", a, net.conv(net.concat(a, b), LANES))
    check(path)
    x = np.random.default_rng(0).random((1, LANES, 4, 4), np.float32)
    engine = load(compile_to(tmp_path / "compiled", path), TvmRuntime.load(1)).instantiate()
    first = engine.run({"x": x}, [a])
    kept = np.array(first[a] if isinstance(first, dict) else first[0])
    engine.run({"x": x + 1}, [a])
    np.testing.assert_array_equal(first[a] if isinstance(first, dict) else first[0], kept)


def test_a_returned_concatenation_is_written_in_place_by_machine_code_too(tmp_path):
    net = Network([1, 64, 32])
    whole = net.op("Concat", net.op("Softmax", "x", axis=-1), net.op("Softmax", "x", axis=1), channels=128, axis=1)
    path = net.save(tmp_path / "returned.onnx", whole)
    assert [told.num_in_place for told in check(path).placements] == [2]
    engine = load(compile_to(tmp_path / "compiled", path), TvmRuntime.load(1)).instantiate()
    kept = []
    for seed in range(3):
        x = np.random.default_rng(seed).random((1, 64, 32), np.float32)
        kept.append((x, engine.run({"x": x}, [whole])))
    for x, got in kept:  # answers of earlier runs are not written to again
        (right,) = baseline(path, {"x": x}, None)
        np.testing.assert_allclose(got[whole] if isinstance(got, dict) else got[0], right, rtol=1e-5, atol=1e-6)


def test_of_several_images_parts_are_no_runs(tmp_path):
    net = Network([2, LANES, 4, 4])
    whole = net.concat(net.conv("x", LANES), net.conv("x", LANES, 3))
    assert not check(net.save(tmp_path / "batch.onnx", net.conv(whole, LANES))).placements


@pytest.mark.parametrize(
    ("channels", "factors", "batch", "runs"),
    [((16, 32), (1, 1), 1, True), ((16, 24), (1, 1), 1, True), ((24, 16), (1, 1), 1, False),
     ((16, 16), (1, 2), 1, False), ((16, 16), (1, 1), 2, False)],
)  # fmt: skip
def test_which_stacks_are_runs(channels, factors, batch, runs):
    def blocked(count):
        return TensorType((batch, -(-count // 16), 4, 4, 16), "float32")

    inputs = tuple(blocked(count) for count in channels)
    workload = Workload(
        "stack_channels", inputs, blocked(sum(channels)), (("channels", channels), ("factors", factors))
    )
    assert stacks_runs(workload) is runs


def test_what_begins_unaligned_is_not_copied_in_place(tmp_path):
    """A kernel takes its destination for aligned: the second part's would begin 48 bytes off, and fault."""
    net = Network([1, 16, 100], 3)
    first = net.op("Softmax", "x", axis=2)
    net.weights["starts"], net.weights["ends"] = np.array([0], np.int64), np.array([11], np.int64)
    net.weights["axes"] = np.array([1], np.int64)
    few = net.op("Softmax", net.op("Slice", first, "starts", "ends", "axes", channels=11), axis=2)
    check(net.save(tmp_path / "unaligned.onnx", net.concat(few, net.op("Tanh", first))))


@pytest.mark.parametrize("seed", range(16))
def test_random_graphs(tmp_path, seed):
    """Concatenations of whatever there is, of each other, of inputs, aligned and not; outputs among them."""
    rng = np.random.default_rng(seed)
    width = (16, 10, 7)[seed % 3]  # runs that begin aligned, now and then, hardly ever
    net = Network([1, 16, width], seed)
    values = ["x"]
    for _ in range(int(rng.integers(6, 14))):
        kind = rng.choice(["concat", "concat", "unary", "softmax", "add", "reshape"])
        some = [values[int(at)] for at in rng.integers(0, len(values), int(rng.integers(2, 5)))]
        if kind == "concat" and sum(net.channels[v] for v in some) <= 512:
            values.append(net.concat(*some))
        elif kind == "softmax":
            values.append(net.op("Softmax", some[0], axis=int(rng.integers(1, 3))))
        elif kind == "add":
            values.append(net.op("Add", some[0], net.op("Softmax", some[0], axis=1)))
        elif kind == "reshape":
            flat = net.op("Flatten", net.op("Tanh", some[0]), axis=1)
            net.weights[f"s{len(net.nodes)}"] = np.array([1, net.channels[some[0]], width], np.int64)
            values.append(net.op("Reshape", flat, f"s{len(net.nodes)}"))
        else:
            values.append(net.op(str(rng.choice(["Tanh", "Sigmoid", "Abs"])), some[0]))
    outputs = {values[-1], *(v for v in values[1:-1] if rng.random() < 0.15)}
    check(net.save(tmp_path / "random.onnx", *sorted(outputs)))
