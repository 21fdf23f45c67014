"""`make bench-cpu`: its models are of use for comparing outputs, and its figures are what they say."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from benchmarks import cpu_transformers
from benchmarks.cpu import Results, format_rows, geometric_means, row_of
from benchmarks.cpu_convnets import mobilenet_v3_large, repvgg_a0, repvgg_a0_train
from benchmarks.cpu_models import MODELS, find_model
from benchmarks.cpu_transformers import bert_base, vit_s16
from benchmarks.cpu_tuning import Tuned, _add
from benchmarks.ops import OPERATORS
from benchmarks.processes import BenchmarkError

MODEL = find_model("resnet50")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cpu_transformers, "_BERT_LAYERS", 2)
    monkeypatch.setattr(cpu_transformers, "VOCABULARY", 100)
    monkeypatch.setattr(cpu_transformers, "_VIT_LAYERS", 2)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (mobilenet_v3_large, "mobilenet_v3_large"),
        (repvgg_a0, "repvgg_a0"),
        (bert_base, "bert_base"),
        (vit_s16, "vit_s16"),
    ],
)
@pytest.mark.usefixtures("small")
def test_built_models_have_outputs_near_one_that_depend_on_their_inputs(build, name):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    session = ort.InferenceSession(build().SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {
        key: value % 100 if value.dtype == np.int64 else value for key, value in find_model(name).values(2).items()
    }
    assert {one.name for one in session.get_inputs()} == set(values)
    for output in session.run(None, values):
        deviation = np.sqrt(np.mean(np.square(output)))
        assert 0.1 < deviation < 10
        assert np.abs(output[0] - output[1]).mean() > 0.05 * deviation


@pytest.mark.parametrize("build", [repvgg_a0, repvgg_a0_train])
def test_convolutional_nets_keep_their_values_near_one_in_every_layer(build):
    model = build()
    names = [node.output[0] for node in model.graph.node if node.op_type == "Relu"]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(names, find_model("repvgg_a0").values(1))
    assert len(found) == 22
    for values in found:
        assert 0.3 < np.sqrt(np.mean(np.square(values))) < 3


@pytest.mark.usefixtures("small")
def test_the_same_recipe_gives_the_same_model():
    assert vit_s16().SerializeToString() == vit_s16().SerializeToString()


def test_there_are_ten_models_and_an_unknown_one_is_told_with_the_known():
    assert len(MODELS) == 10
    with pytest.raises(BenchmarkError, match=r"known are .*resnet50"):
        find_model("alexnet")


def test_operators_are_those_of_the_paper():
    assert [one.name for one in OPERATORS] == [*(f"C{i}" for i in range(1, 13)), *(f"D{i}" for i in range(1, 10))]
    (c1,) = (one for one in OPERATORS if one.name == "C1")
    assert c1.operations == 2 * 112 * 112 * 64 * 3 * 49
    (d2,) = (one for one in OPERATORS if one.name == "D2")
    assert d2.operations == 2 * 56 * 56 * 64 * 9


def tuned(precision: str, artifacts: dict[int, str]) -> Tuned:
    reasons = {batch: "it is slower" for batch in (1, 8) if batch not in artifacts}
    return Tuned("resnet50", precision, "tuned", 10.0, 5.0, artifacts, reasons)


TAKEN = {
    "onnxruntime": [20e6, 22e6],
    "openvino_f32": [10e6, 11e6],
    "openvino_bf16": [5e6, 5.5e6],
    "hone_f32": [8e6, 8.8e6],
}


def test_a_model_that_was_not_promoted_counts_with_its_baseline_and_its_reason():
    row = row_of(MODEL, 1, TAKEN, {"f32": tuned("f32", {1: "a"}), "bf16": tuned("bf16", {})})
    assert row["speedup"]["f32_vs_onnxruntime"] == pytest.approx(2.5)
    assert row["speedup"]["f32_vs_openvino"] == pytest.approx(1.25)
    assert row["speedup"]["bf16_vs_onnxruntime"] == 1.0
    assert row["speedup"]["bf16_vs_openvino"] == pytest.approx(0.25)
    assert row["ms"]["hone_bf16"] == row["ms"]["onnxruntime"]
    assert row["reasons"] == {"hone_bf16": "it is slower"}
    table = format_rows([row])
    assert "* ResNet-50, batch 1, hone_bf16: it is slower" in table
    assert "21.000*" in table


def test_a_precision_that_was_not_asked_for_has_no_figures():
    row = row_of(MODEL, 1, TAKEN, {"f32": tuned("f32", {1: "a"})})
    assert "hone_bf16" not in row["ms"]
    assert set(row["speedup"]) == {"f32_vs_onnxruntime", "f32_vs_openvino"}
    assert format_rows([row])


def test_the_mean_is_geometric_and_of_one_batch():
    rows = [
        {"batch": 1, "speedup": {"f32_vs_onnxruntime": 4.0}},
        {"batch": 1, "speedup": {"f32_vs_onnxruntime": 1.0}},
        {"batch": 8, "speedup": {"f32_vs_onnxruntime": 100.0}},
    ]
    assert geometric_means(rows, 1) == {"f32_vs_onnxruntime": 2.0}
    assert math.isclose(geometric_means(rows, 8)["f32_vs_onnxruntime"], 100.0)


def test_a_run_goes_on_where_another_ended(tmp_path):
    path = tmp_path / "cpu.json"
    first = Results(path, resume=False, about={})
    outcome = tuned("f32", {1: "a", 8: "b"})
    first.tuned["resnet50 f32"] = outcome.to_json()
    first.add(MODEL, [row_of(MODEL, batch, TAKEN, {"f32": outcome}) for batch in (1, 8)])
    second = Results(path, resume=True, about={})
    assert second.has(MODEL, ["f32"])
    assert not second.has(MODEL, ["f32", "bf16"])
    assert Tuned.from_json(second.tuned["resnet50 f32"]) == outcome
    assert not Results(path, resume=False, about={}).has(MODEL, ["f32"])


def test_noise_is_told_from_a_refusal():
    refused = tuned("f32", {})
    assert not refused.is_undecided
    unsure = Tuned(**{**refused.to_json(), "gate": {1: {"provisional": True}}})
    assert unsure.is_undecided
    assert unsure.after(refused).seconds == 20.0


def test_only_the_batches_asked_for_are_tuned(tmp_path):
    from hone.repository import ModelRepository
    from hone.tuning.served import accelerator_parameters

    path = tmp_path / "model.onnx"
    path.write_bytes(b"not read here")
    name = _add(tmp_path / "repository", find_model("open_nsfw"), path, "bf16", (1, 8))
    repository = ModelRepository((tmp_path / "repository",))
    definition = repository.read(name)
    repository.close()
    assert definition.config.max_batch_size == 0
    parameters = accelerator_parameters(definition.config)
    assert parameters == {"precision": "bf16", "signatures": "input:0:1x224x224x3; input:0:8x224x224x3"}


def test_a_table_of_nothing_is_a_heading():
    assert format_rows([]).startswith("model")
