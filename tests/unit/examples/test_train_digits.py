"""The demo model `digits`: what is committed is good, and the script that made it does learn."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf import text_format
from PIL import Image

from hone.protos import config_pb

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "model_repo" / "digits"
PICTURES = ROOT / "examples" / "digits"


@pytest.fixture(scope="module")
def script():
    path = ROOT / "examples" / "models" / "train_digits.py"
    spec = importlib.util.spec_from_file_location("train_digits", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


@pytest.fixture(scope="module")
def session():
    return onnxruntime.InferenceSession(MODEL / "1" / "model.onnx", providers=["CPUExecutionProvider"])


def answers(session, images):
    return session.run(["probabilities"], {"image": images})[0]


def test_held_out_accuracy(script, session):
    split = script.load_split()
    probabilities = answers(session, split.held_out_images)
    assert (probabilities.argmax(axis=1) == split.held_out_labels).mean() >= 0.97
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)


def test_held_out_images_are_not_trained_on(script):
    split = script.load_split()
    trained = {image.tobytes() for image in split.train_images}
    assert len(split.held_out_labels) == 450
    assert not [image for image in split.held_out_images if image.tobytes() in trained]
    assert split.train_images.min() == 0 and split.train_images.max() == 1


def test_committed_files_are_small_and_fit_together(script):
    size = (MODEL / "1" / "model.onnx").stat().st_size
    assert size < 200_000
    model = onnx.load(MODEL / "1" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version <= 10
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]

    config = text_format.Parse((MODEL / "config.pbtxt").read_text(), config_pb.ModelConfig())
    assert (config.name, config.max_batch_size) == ("digits", 8)
    assert config.HasField("dynamic_batching")
    for declared, tensor in [(config.input, model.graph.input), (config.output, model.graph.output)]:
        assert [entry.name for entry in declared] == [entry.name for entry in tensor]
        assert declared[0].data_type == config_pb.TYPE_FP32
        assert list(declared[0].dims) == [dim.dim_value for dim in tensor[0].type.tensor_type.shape.dim][1:]
    labels = (MODEL / config.output[0].label_filename).read_text().splitlines()
    assert tuple(labels) == script.WORDS


def test_example_pictures_show_what_their_names_say(script, session):
    for digit, word in enumerate(script.WORDS):
        path = PICTURES / f"{word}.png"
        assert path.stat().st_size < 1024
        picture = Image.open(path)
        assert (picture.mode, picture.size) == ("L", (8, 8))
        pixels = np.asarray(picture, np.float32)[np.newaxis, np.newaxis] / 255
        assert answers(session, pixels).argmax() == digit
    large = Image.open(PICTURES / "seven_64x64.png")
    small = np.asarray(large.resize((8, 8), Image.Resampling.BILINEAR), np.float32)[np.newaxis, np.newaxis] / 255
    assert answers(session, small).argmax() == 7


def test_gradients_match_finite_differences(script):
    rng = np.random.default_rng(1)
    parameters = script.initial_parameters(rng, np.float64)
    for name in parameters:
        if name.endswith("bias"):  # off the kink of ReLU at zero, where empty borders would sit
            parameters[name] += rng.normal(0, 0.1, parameters[name].shape)
    images, labels = rng.random((5, 1, 8, 8)), rng.integers(0, 10, 5)
    keep = (rng.random((5, script.FEATURES)) < 0.7) / 0.7
    _, gradients = script.loss_and_gradients(parameters, images, labels, keep)
    assert gradients.keys() == parameters.keys()

    step = 1e-7  # small, as the loss has a kink wherever some ReLU or maximum changes sides within a step
    for name, values in parameters.items():
        for flat_index in rng.choice(values.size, size=min(12, values.size), replace=False):
            index = np.unravel_index(flat_index, values.shape)
            before = values[index]
            values[index] = before + step
            above, _ = script.loss_and_gradients(parameters, images, labels, keep)
            values[index] = before - step
            below, _ = script.loss_and_gradients(parameters, images, labels, keep)
            values[index] = before
            expected = (above - below) / (2 * step)
            assert gradients[name][index] == pytest.approx(expected, rel=1e-4, abs=1e-7), (name, index)


def test_graph_computes_what_was_trained(script):
    rng = np.random.default_rng(2)
    parameters = script.initial_parameters(rng)
    images = rng.random((3, 1, 8, 8), np.float32)
    exported = onnxruntime.InferenceSession(
        script.to_onnx(parameters).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    probabilities = answers(exported, images)
    for image, answer in zip(images, probabilities, strict=True):
        for label in range(10):
            loss, _ = script.loss_and_gradients(parameters, image[np.newaxis], np.array([label]))
            assert answer[label] == pytest.approx(np.exp(-loss), rel=1e-4)


def test_training_lowers_the_loss(script):
    split = script.load_split()
    untrained = script.initial_parameters(np.random.default_rng(script.SEED))
    trained = script.train(split, num_epochs=5)
    loss_before, _ = script.loss_and_gradients(untrained, split.held_out_images, split.held_out_labels)
    loss_after, _ = script.loss_and_gradients(trained, split.held_out_images, split.held_out_labels)
    assert loss_after < loss_before / 2


def test_nothing_is_written_below_the_required_accuracy(script, tmp_path, monkeypatch):
    model, pictures = tmp_path / "model", tmp_path / "pictures"
    arguments = ["--num-epochs", "1", "--required-accuracy", "1.01", "--model", str(model), "--pictures", str(pictures)]
    monkeypatch.setattr(sys, "argv", ["train_digits.py", *arguments])
    with pytest.raises(SystemExit, match="nothing was written"):
        script.main()
    assert not model.exists() and not pictures.exists()
