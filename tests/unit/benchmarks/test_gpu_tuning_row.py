"""The row that times tuning on another machine: its environment, what it makes of answers, and its model's settings."""

from __future__ import annotations

import json
import time
import zipfile

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import cpu_transformers
from benchmarks.gpu import bundle_tuning, table, torch_nodes
from benchmarks.gpu.journal import CRASHED, Journal
from benchmarks.gpu.tuning import tune
from hone.repository.config_text import parse_config
from hone.specialization import Signature
from hone.tuning.settings import model_tuning
from hone.types import TensorSpec

TOLD = {"name": "net", "batch": 8, "num_kernels": 5, "is_shared": True}
BUCKET = {
    "signature": "image:FP32[8,3,4,4]", "engine": "tvm", "baseline_ms": 4.0, "tuned_ms": 2.0, "speedup": 2.0,
    "outcome": "passed", "reason": "",
}  # fmt: skip
#: Stands for hone: says what it was asked, and whether it sees more than what came along.
HONE = """
import json, sys
print("asked", *sys.argv[1:], file=sys.stderr)
from importlib.util import find_spec
print("sees", [name for name in ("came_along", "numpy", "pytest") if find_spec(name)], file=sys.stderr)
{ends}
"""


@pytest.fixture
def there(tmp_path):
    """A bundle with a model, and parts of the row whose wheels are installed."""
    (tmp_path / "models" / "net").mkdir(parents=True)
    (tmp_path / "models" / "net" / "model.onnx").write_bytes(b"a model")
    (tmp_path / "tuning" / "repository" / "net" / "1").mkdir(parents=True)
    (tmp_path / "tuning" / "hone" / "hone").mkdir(parents=True)
    (tmp_path / "tuning" / "wheels").mkdir()
    info = "came_along-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "tuning" / "wheels" / "came_along-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("came_along.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: came-along\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return tmp_path


def run(there, ends, seconds=100.0):
    (there / "tuning" / "hone" / "hone" / "__main__.py").write_text(HONE.format(ends=ends), encoding="utf-8")
    journal = Journal(there / "journal.jsonl")
    tune(there, TOLD, journal, time.monotonic() + seconds)
    return journal


def test_hone_runs_with_what_came_along_alone_and_its_answer_is_told(there):
    status = {"state": "tuned", "reason": "", "buckets": [BUCKET]}
    journal = run(there, f"print('''{json.dumps([status])}''')")
    (entry,) = journal.entries("tuned")
    assert (entry["name"], entry["state"]) == ("net, 8", "tuned")
    assert "5 prebuilt kernels" in entry["told"]
    assert "by tvm: 4 ms to 2 ms, 2.00 x the baseline" in entry["told"]
    log = (there / "tuning.log").read_text()
    assert "asked tune net --json --budget-secs" in log
    assert "sees ['came_along']" in log
    assert (there / "tuning" / "repository" / "net" / "1" / "model.onnx").read_bytes() == b"a model"
    assert not list(journal.entries("failed"))


def test_what_fails_is_told(there):
    journal = run(there, "sys.exit('no card for me')")
    (entry,) = journal.entries("failed")
    assert entry["reason"] == "hone tune exited with 1: no card for me"
    status = {"state": "failed", "reason": "it hung", "buckets": []}
    journal = run(there, f"print('''{json.dumps([status])}''')")
    assert [one["reason"] for one in journal.entries("failed")][1:] == ["failed: it hung"]


def test_what_cannot_be_installed_is_told(there):
    (there / "tuning" / "wheels" / "broken-1.0-py3-none-any.whl").write_bytes(b"no wheel")
    (entry,) = run(there, "").entries("failed")
    assert entry["reason"].startswith("it could not be installed: ")


def test_the_models_settings_are_those_of_a_gpu():
    text = bundle_tuning._CONFIG.format(name="net", signature="image:8x3x4x4")
    config = parse_config(text.encode(), "net")
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    settings = model_tuning(dict(accelerator.parameters), [TensorSpec("image", "FP32", (-1, 3, 4, 4))], "on")
    assert (accelerator.name, settings.precision) == ("tvm", "f16")
    assert settings.signatures == (Signature.of([("image", "FP32", (8, 3, 4, 4))]),)


def test_a_net_that_is_not_known_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"--tuning vgg17:8: expected NAME:BATCH, with one of resnet50, "):
        bundle_tuning.add_tuning(tmp_path, "vgg17:8", None, None, limit=1, python="312", models=tmp_path)


def test_a_journal_that_broke_off_is_read_as_far_as_it_goes(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.add("row", "one", us=1.0)
    journal.add(CRASHED, "two", reason="hung")
    with journal.path.open("a") as file:
        file.write('{"kind": "row", "na')
    assert [entry["name"] for entry in journal.entries()] == ["one", "two"]
    assert journal.by_name("row")["one"]["us"] == 1.0


def test_models_are_compared_with_the_faster_of_pytorchs():
    models = {"net, 8": {"ms": {"ours": 1.0, "graph": 2.0, "compile": 4.0}, "error": 1e-3, "torch_error": 2e-3}}
    head, line, mean = table.models_table(models)
    assert "PyTorch" in head
    assert "2.00" in line
    assert "geometric mean, B7 against the faster of PyTorch's: 2.00 (1 rows)" in mean
    assert table.models_table({}) == []


def test_graphs_are_written_as_pytorch_models_are(monkeypatch):
    monkeypatch.setattr(cpu_transformers, "_BERT_LAYERS", 2)
    monkeypatch.setattr(cpu_transformers, "VOCABULARY", 50)
    graph = cpu_transformers.bert_base().graph
    told = torch_nodes.graph_nodes(graph)
    ops = [node["op"] for node in told["nodes"]]
    assert (ops.count("Linear"), ops.count("SDPA"), ops.count("Gelu")) == (12, 2, 2)
    assert not {"MatMul", "Softmax", "Erf"} & set(ops)
    made, constant = {name for node in told["nodes"] for name in node["outputs"]}, set(told["initializers"])
    given = {one.name for one in graph.input}
    assert all(name in made | constant | given for node in told["nodes"] for name in node["inputs"])
    assert set(told["outputs"]) <= made
    (scale,) = {node["attributes"]["scale"] for node in told["nodes"] if node["op"] == "SDPA"}
    assert scale == pytest.approx(1 / 8)


def test_a_value_that_others_read_is_not_fused_away():
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    bias = numpy_helper.from_array(np.ones(4, np.float32), "b")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    x, y, m = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xym")
    graph = helper.make_graph(nodes, "g", [x], [y, m], [weight, bias])
    assert [node["op"] for node in torch_nodes.graph_nodes(graph)["nodes"]] == ["MatMul", "Add"]
    graph = helper.make_graph(nodes, "g", [x], [y], [weight, bias])
    assert [node["op"] for node in torch_nodes.graph_nodes(graph)["nodes"]] == ["Linear"]
