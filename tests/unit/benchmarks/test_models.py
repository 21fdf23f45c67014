import numpy as np
import onnx
import onnxruntime as ort
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from benchmarks.models import add_identity, add_real_model, find_real_models, read_real_model
from benchmarks.processes import BenchmarkError
from hone.protos import config_pb


def save_model(path, inputs):
    nodes = [helper.make_node("Identity", [inputs[0][0]], ["y"])]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    graph = helper.make_graph(nodes, "g", infos, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph), path)


def read_config(repository, name):
    return text_format.Parse((repository / name / "config.pbtxt").read_text(), config_pb.ModelConfig())


def test_identity_runs_on_onnxruntime_at_any_length(tmp_path):
    add_identity(tmp_path, "same", num_versions=2)
    session = ort.InferenceSession(tmp_path / "same" / "2" / "model.onnx")
    for length in (0, 1, 1000):
        array = np.arange(length, dtype=np.float32)
        assert np.array_equal(session.run(None, {"IN": array})[0], array)


def test_identity_serves_all_versions_without_batching(tmp_path):
    add_identity(tmp_path, "same", num_versions=3)
    config = read_config(tmp_path, "same")
    assert sorted(folder.name for folder in (tmp_path / "same").iterdir() if folder.is_dir()) == ["1", "2", "3"]
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert config.version_policy.HasField("all")


def test_real_model_is_described_without_its_batch(tmp_path):
    save_model(tmp_path / "m.onnx", [("image", ["n", 3, "h", "w"])])
    model = read_real_model("net", tmp_path / "m.onnx", {1: 48, 2: 192})
    assert (model.input_name, model.shape, model.num_elements) == ("image", (3, 48, 192), 27_648)


@pytest.mark.parametrize("inputs", [[("a", ["n", 3]), ("b", ["n", 3])], [("a", ["n", "h"])]])
def test_real_model_with_several_inputs_or_open_sizes_is_refused(tmp_path, inputs):
    save_model(tmp_path / "m.onnx", inputs)
    with pytest.raises(BenchmarkError, match=r"m\.onnx"):
        read_real_model("net", tmp_path / "m.onnx", {})


def test_real_models_that_are_missing_are_named_with_what_brings_them(tmp_path):
    save_model(tmp_path / "model_repo" / "resnet50" / "1" / "model.onnx", [("image", ["n", 3, 8, 8])])
    found, missing = find_real_models(tmp_path)
    assert [model.title for model in found] == ["resnet50"]
    assert len(missing) == 1
    assert "make real-models" in missing[0]


def test_real_model_is_served_with_and_without_batching(tmp_path):
    save_model(tmp_path / "m.onnx", [("image", ["n", 3])])
    model = read_real_model("net", tmp_path / "m.onnx", {})
    for batching in (True, False):
        name = f"net_{batching}"
        add_real_model(tmp_path, name, model, batching=batching)
        config = read_config(tmp_path, name)
        assert config.HasField("dynamic_batching") is batching
        assert config.max_batch_size == (8 if batching else 1)
