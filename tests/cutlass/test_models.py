"""Whole models through the compiler for GPUs: all but the launch of a kernel is run, and must match ONNX Runtime.

First with kernels in numpy, in every precision: what calls kernels is right. Then with the kernels' host twins, from
exported artifacts, by the engine that serves: so is what is called. At last real CUDA modules are built.
"""

from __future__ import annotations

import pytest

from hone.compiler.choices import Choices
from hone.compiler.cuda.export import export_cuda_artifact
from hone.compiler.cuda.partition import takers
from hone.compiler.cuda.pipeline import compile_cuda_model, cuda_workloads
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.templates.cutlass.toolchain import find_toolchain
from hone.engines.tvm_artifact import MODULE_FILE
from tests.cutlass import models
from tests.cutlass.reference_kernels import everything, run_registered
from tests.cutlass.running_twins import TOLERANCES, TWIN, assert_near, choices_of, imported, run_twins

PRECISIONS = ("f32", "tf32", "f16", "bf16")


def run_in_numpy(model, choices: Choices):
    source = imported(model)
    compiled = compile_cuda_model(source, TWIN, choices, templates=everything())
    names = [spec.name for spec in source.inputs]
    outputs = run_registered(compiled, source.params.values(), [model.inputs[name] for name in names])
    if source.guarded:
        *outputs, guard = outputs
        assert guard == 1
    return compiled, outputs


def ops(compiled) -> list[str]:
    return [call.workload.op for call in compiled.kernels for _ in range(call.num_calls)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["odd_channels", "back_to_back"])
def test_convolutional_nets_in_every_precision(name, precision, tmp_path):
    model = getattr(models, name)(tmp_path)
    compiled, outputs = run_in_numpy(model, choices_of(precision))
    assert "conv2d" in ops(compiled)
    assert_near(outputs, model.outputs, TOLERANCES[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_transformer_in_every_precision(precision, tmp_path, monkeypatch):
    model = models.bert_block(tmp_path, monkeypatch)
    compiled, outputs = run_in_numpy(model, choices_of(precision))
    assert ops(compiled).count("matmul") == 7
    assert ops(compiled).count("attention") == 1
    assert_near(outputs, model.outputs, TOLERANCES[precision])


def test_a_pair_that_is_chosen_is_one_kernel(tmp_path):
    model = models.back_to_back(tmp_path)
    wanted = cuda_workloads(imported(model), TWIN, choices_of("f16"), templates=everything())
    by_op = {pair.fused.op: pair for pair in wanted.pairs}
    assert set(by_op) == {"conv2d_conv2d", "matmul_matmul"}
    reference = everything()[0]
    chosen = {pair.fused.digest: reference.candidates(pair.fused, TWIN)[1] for pair in wanted.pairs}
    compiled, outputs = run_in_numpy(model, choices_of("f16", kernels=chosen))
    assert ops(compiled) == ["conv2d", "conv2d_conv2d", "matmul_matmul"]
    assert compiled.kernels[1].candidate["tile"] == 2
    assert_near(outputs, model.outputs, TOLERANCES["f16"])
    assert ops(run_in_numpy(model, choices_of("f16"))[0]) == ["conv2d", "conv2d", "matmul", "matmul", "matmul"]


def test_quantized_layers_multiply_integers(tmp_path):
    model = models.quantized(tmp_path)
    compiled, outputs = run_in_numpy(model, choices_of("int8"))
    first, second = (call.workload for call in compiled.kernels)
    assert [tensor.dtype for tensor in first.inputs[:2]] == ["int8", "int8"]
    assert first.output.dtype == "int8"  # what the next layer's data is rounded to is part of this kernel
    assert [step.op for step in first.epilogue][-2:] == ["round", "clip"]
    assert second.output.dtype == "float32"
    # A rounded value may fall on the other side in float32 arithmetic of another order: one step of one input.
    assert_near(outputs, model.outputs, 2e-3)


# --- host twins ---


@pytest.mark.parametrize("name", ["resnet18", "repvgg", "odd_channels", "back_to_back"])
def test_convolutional_nets_with_twins(name, tmp_path, twin_cache):
    model = getattr(models, name)(tmp_path)
    compiled, outputs = run_twins(model, choices_of("f16"), twin_cache, tmp_path)
    assert compiled.kernels
    assert_near(outputs, model.outputs, TOLERANCES["f16"])


def test_pairs_with_twins(tmp_path, twin_cache):
    model = models.back_to_back(tmp_path)
    wanted = cuda_workloads(imported(model), TWIN, choices_of("f16"))
    chosen = {
        pair.fused.digest: takers(pair.fused, TWIN, CUTLASS_TEMPLATES)[0].candidates(pair.fused, TWIN)[0]
        for pair in wanted.pairs
    }
    compiled, outputs = run_twins(model, choices_of("f16", kernels=chosen), twin_cache, tmp_path)
    assert ops(compiled) == ["conv2d", "conv2d_conv2d", "matmul_matmul"]
    assert_near(outputs, model.outputs, TOLERANCES["f16"])


def test_quantized_layers_with_twins(tmp_path, twin_cache):
    """Integers in, sums in int32, scales as operands, rounded to int8 for the next layer."""
    model = models.quantized(tmp_path)
    compiled, outputs = run_twins(model, choices_of("int8"), twin_cache, tmp_path)
    assert [call.workload.output.dtype for call in compiled.kernels] == ["int8", "float32"]
    assert_near(outputs, model.outputs, 2e-3)


def test_a_transformer_with_twins(tmp_path, twin_cache, monkeypatch):
    model = models.bert_block(tmp_path, monkeypatch)
    compiled, outputs = run_twins(model, choices_of("f16"), twin_cache, tmp_path)
    assert ops(compiled).count("matmul") >= 7
    assert_near(outputs, model.outputs, TOLERANCES["f16"])


# --- CUDA modules ---


@pytest.mark.parametrize("device", ["a100", "h100"])
def test_a_cuda_module_is_complete(device, tmp_path):
    model = models.odd_channels(tmp_path)
    source, target, dumped = imported(model), CudaTarget.preset(device), {}
    compiled = compile_cuda_model(source, target, choices_of("f16"), lambda name, mod: dumped.update({name: mod}))
    assert compiled.kernels
    artifact = export_cuda_artifact(compiled, source, "derived", tmp_path, find_toolchain())
    assert artifact.manifest["target"]["arch"] == target.arch
    assert artifact.manifest["kernels"] == [call.digest for call in compiled.kernels]
    assert {"nvcc", "cutlass", "tvm"} <= set(artifact.manifest["toolchain"])
    code = artifact.files[MODULE_FILE].read_bytes()
    assert code.startswith(b"\x7fELF")
    for call in compiled.kernels:
        assert call.name.encode() in code
    captured = next(
        func for var, func in dumped["9 plan memory"].functions.items() if var.name_hint == "main_cuda_graph_capture"
    )
    assert all(call.name in captured.script() for call in compiled.kernels)
