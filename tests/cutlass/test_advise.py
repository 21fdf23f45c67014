"""Advice about models: what it finds, what it says of its figures, and the command that tells it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hone.cli.main import main
from hone.compiler.cuda.advice import advise, deepened, without_step
from hone.compiler.cuda.pipeline import cuda_paddings, cuda_workloads
from hone.compiler.cuda_target import CudaTarget, preset_named
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.workload import Operand, Step, TensorType, Workload
from hone.kernels import DecisionKey, DeviceKey, KernelsCache
from hone.kernels.gpu_key import Gpu
from hone.kernels.keys import Toolchain
from tests.cutlass import models
from tests.cutlass.running_twins import choices_of, imported
from tests.fake_gpu import TARGET, FillingKernels, device_key, parts_of


def test_advice_names_sizes_activations_and_layers(tmp_path):
    target = CudaTarget.preset("a100")
    told = advise(imported(models.odd_channels(tmp_path)), target, choices_of("f16"))
    assert [one.sizes for one in told.unaligned][:2] == [(3, 20), (20, 20)]
    assert all(one.padded_sizes[0] % 8 == 0 for one in told.unaligned)
    assert {cost.source for one in told.unaligned for cost in (one.unpadded, one.padded, one.wider)} == {"modelled"}
    assert [one.copies_data for one in told.unaligned][:2] == [True, False]
    assert {one.activation for one in told.activations} == {"relu"}
    assert told.deepen
    assert all(one.fused.microseconds < one.with_kernel_of_its_own.microseconds for one in told.deepen)
    pairs = advise(imported(models.back_to_back(tmp_path)), target, choices_of("f16")).pairs
    assert len(pairs) == 2


def test_advice_prefers_what_was_measured(tmp_path):
    source, target = imported(models.odd_channels(tmp_path)), CudaTarget.preset("a100")
    padded = cuda_paddings(source, target, choices_of("f16"))[1].padded
    told = advise(source, target, choices_of("f16"), lambda one: 12.5 if one == padded else None)
    known = told.unaligned[1]
    assert (known.wider.source, known.wider.microseconds) == ("measured", 12.5)
    assert known.unpadded.source == "modelled"


def test_a_deeper_layer_is_a_pair_that_kernels_take(tmp_path):
    source, target = imported(models.back_to_back(tmp_path)), CudaTarget.preset("a100")
    wanted = cuda_workloads(source, target, choices_of("f16"))
    first = next(one for one in wanted.counts if one.op == "conv2d")
    fused, pointwise = deepened(first)
    assert fused.output == pointwise.output == first.output
    assert any(template.matches(fused, target) for template in CUTLASS_TEMPLATES)


# --- the command ---


def told(capsys, *arguments):
    assert main(["advise", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_tells_an_onnx_file(tmp_path, capsys):
    model = models.odd_channels(tmp_path)
    found = told(capsys, model.path, "--device", "a100", "--batch", 4)
    assert found["shapes"] == {"image": [4, 3, 16, 16]}
    assert (found["device"], found["precision"]) == ("a100", "f16")
    assert found["unaligned"][0]["sizes"] == [3, 20]
    assert main(["advise", str(model.path), "--device", "a100"]) == 0
    text = capsys.readouterr().out
    assert "Sizes that are not read at full width" in text
    assert "(modelled)" in text


def test_the_command_uses_decisions_of_such_a_gpu(tmp_path, capsys):
    model = models.odd_channels(tmp_path)
    padded = cuda_paddings(imported(model), CudaTarget.preset("a100"), choices_of("f16"))[1].padded
    cache = KernelsCache(tmp_path / "cache")
    device = DeviceKey({"kind": "cuda", "name": "NVIDIA A100-SXM4-80GB", "architecture": "sm_80"})
    cache.describe(device)
    key = DecisionKey(padded.fields(), "0" * 64, "f16", device.digest, Toolchain(*["none"] * 6))
    ranking = json.dumps({"ranking": [{"ns": 9000.0}, {"ns": 8000.0}]}).encode()
    cache.publish("decisions", key.digest, device.digest, {"ranking.json": ranking}, {"key": key.fields})
    cache.close()
    arguments = (model.path, "--batch", 2, "--kernels-cache", tmp_path / "cache", "--device")
    wider = told(capsys, *arguments, "a100")["unaligned"][1]["wider"]
    assert wider == {"microseconds": 8.0, "source": "measured"}
    assert told(capsys, *arguments, "h100")["unaligned"][1]["wider"]["source"] == "modelled"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--device", "abacus"], "expected one of t4, a100"),
        (["--device", "t4", "--precision", "bf16"], "sm_80"),
        (["--batch", "0"], "expected 1 or more"),
        (["--shape", "picture:1x3x16x16"], "no input 'picture'"),
        (["--shape", "image:1xAx16"], "found '1xAx16'"),
    ],
)
def test_the_command_refuses(arguments, part, tmp_path, capsys):
    model = models.odd_channels(tmp_path)
    assert main(["advise", str(model.path), *arguments]) == 1
    assert part in capsys.readouterr().err


# --- measuring ---


@pytest.fixture
def here(monkeypatch, tmp_path):
    """This machine has a GPU, whose timings come from a table."""
    table = {"default_ns": 30_000.0}
    key = device_key()
    found = (Gpu(0, "GPU-1", key),)
    monkeypatch.setattr("hone.tuning.gpus.look_for_gpus", lambda: (found, ""))

    def open_fake(spec, cache, device):
        assert device == key
        parts = parts_of(table, cache)
        return replace(parts, kernels=FillingKernels(cache, parts.device))

    monkeypatch.setattr("hone.tuning.gpu_measure.open_gpu", open_fake)
    monkeypatch.setattr("hone.tuning.gpu_parts.target_of", lambda device: TARGET)
    return table


def test_a_gpu_that_is_here_measures_what_the_advice_rests_on(here, tmp_path, capsys):
    path = models.odd_channels(tmp_path).path
    cache = tmp_path / "cache"
    before = told(capsys, path, "--kernels-cache", cache)
    assert {row["unpadded"]["source"] for row in before["unaligned"]} == {"modelled"}
    arguments = (path, "--kernels-cache", cache, "--measure", 100)
    found = told(capsys, *arguments)
    costs = [row[name] for row in found["unaligned"] for name in ("unpadded", "wider")]
    costs += [row[name] for row in found["activations"] for name in ("cost", "without")]
    costs += [row[name] for row in found["deepen"] for name in ("alone", "fused")]
    assert costs
    assert {cost["source"] for cost in costs} == {"measured"}
    assert {cost["microseconds"] for cost in costs} == {30.0}
    assert {(row["extra_ratio"], row["source"], row["is_free"]) for row in found["activations"]} == {
        (0.0, "measured", True)
    }
    here["default_ns"] = 90_000.0
    assert told(capsys, *arguments) == found, "what is known is not measured again"


def test_a_kernel_that_breaks_the_gpu_ends_the_measuring_and_not_the_advice(here, tmp_path, capsys):
    here["breaks_at"] = 2
    path = models.odd_channels(tmp_path).path
    assert main(["advise", str(path), "--kernels-cache", str(tmp_path / "cache"), "--measure", "100"]) == 0
    said = capsys.readouterr()
    assert "not all could be measured" in said.err
    assert "broke the GPU's context" in said.err
    assert "(modelled)" in said.out


def test_measuring_needs_a_gpu_of_that_kind(here, tmp_path, capsys):
    path = str(models.odd_channels(tmp_path).path)
    assert main(["advise", path, "--device", "t4", "--measure", "1"]) == 1
    assert "this machine has no GPU of kind 't4'" in capsys.readouterr().err
    assert main(["advise", path, "--measure", "-1"]) == 1
    assert "expected a number of seconds" in capsys.readouterr().err


def test_a_step_is_taken_out_and_the_others_follow():
    value, vector = TensorType((8, 8), "float16"), TensorType((8,), "float16")
    steps = (
        Step("add", (Operand("value", 0), Operand("input", 2))),
        Step("sigmoid", (Operand("value", 1),)),
        Step("multiply", (Operand("value", 1), Operand("value", 2))),
        Step("relu", (Operand("value", 3),)),
    )
    workload = Workload("matmul", (value, value, vector), value, (), steps)
    assert without_step(workload, 1).epilogue == (
        steps[0],
        Step("multiply", (Operand("value", 1), Operand("value", 1))),
        Step("relu", (Operand("value", 2),)),
    )
    assert without_step(workload, 3).epilogue == steps[:3]


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_names_of_cards_are_not_guessed(name, preset):
    found = preset_named(name)
    assert (found.name if found else None) == preset
