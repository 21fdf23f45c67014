"""The demo model `resnet50`: built once, whole, and giving answers that depend on the picture."""

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format

from hone.protos import config_pb

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("resnet50", ROOT / "examples" / "models" / "resnet50.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def built(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository") / "resnet50"
    script.publish(script.build("recipe-a"), folder)
    return folder


def test_structure_is_resnet50(built):
    model = onnx.load(built / "1" / "model.onnx")
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("Conv") == operators.count("BatchNormalization") == 53
    assert operators.count("Add") == 16
    num_weights = sum(
        np.prod(tensor.dims) for tensor in model.graph.initializer if not tensor.name.endswith((".mean", ".var"))
    )
    assert num_weights == 25_557_032  # as published for this net
    onnx.checker.check_model(model, full_check=True)


def test_config_agrees_with_the_graph(built):
    config = text_format.Parse((built / "config.pbtxt").read_text(), config_pb.ModelConfig())
    session = onnxruntime.InferenceSession(built / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    (declared_input,), (declared_output,) = config.input, config.output
    assert (config.name, config.max_batch_size) == ("resnet50", 8)
    assert session.get_inputs()[0].name == declared_input.name
    assert session.get_inputs()[0].shape == ["batch", *declared_input.dims]
    assert session.get_outputs()[0].name == declared_output.name
    assert session.get_outputs()[0].shape == ["batch", *declared_output.dims]


def test_answers_are_finite_and_depend_on_the_picture(built):
    session = onnxruntime.InferenceSession(built / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    ramp = np.broadcast_to(np.linspace(-2, 2, 224, dtype=np.float32), (3, 224, 224))
    images = np.stack([rng.standard_normal((3, 224, 224), np.float32), np.ones((3, 224, 224), np.float32), ramp])
    (logits,) = session.run(["logits"], {"image": images})
    assert np.isfinite(logits).all() and np.abs(logits).max() < 1e4
    assert (logits.std(axis=1) > 0.1).all()
    assert len(set(logits.argmax(axis=1))) > 1


def test_built_only_when_missing_or_from_another_recipe(script, built):
    assert script.is_built(built, "recipe-a")
    assert not script.is_built(built, "recipe-b")
    config = built / "config.pbtxt"
    config.write_text(config.read_text() + "# changed\n")
    assert not script.is_built(built, "recipe-a")
    script.publish(onnx.load(built / "1" / "model.onnx"), built)
    assert script.is_built(built, "recipe-a")


def test_a_failed_build_leaves_what_was_there(script, built, monkeypatch):
    before = (built / "1" / "model.onnx").stat()

    class FullDisk:
        def SerializeToString(self):
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        script.publish(FullDisk(), built)
    assert (built / "1" / "model.onnx").stat() == before
    assert [entry.name for entry in built.parent.iterdir()] == ["resnet50"]
