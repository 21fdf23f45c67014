"""`hone explain` on a model that was never tuned: all of it, with the templates' first guesses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace

import onnx
import pytest
from onnx import helper, parser

from hone.cli.explain import subject_of
from hone.cli.explain_report import headline, print_explanation
from hone.config import Settings
from hone.errors import ConfigError

MODEL = """
<ir_version: 8, opset_import: ["": 17]>
net (float[batch, 8, 6, 6] x) => (float[batch, 4] y) {
    a = Conv<pads = [1, 1, 1, 1], kernel_shape = [3, 3]>(x, w)
    b = Relu(a)
    c = GlobalAveragePool(b)
    d = Flatten(c)
    y = MatMul(d, v)
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("repository")
    folder = root / "net" / "1"
    folder.mkdir(parents=True)
    model = parser.parse_model(MODEL)
    for name, dims in (("w", [16, 8, 3, 3]), ("v", [16, 4])):
        size = 1
        for dim in dims:
            size *= dim
        values = [((i * 7) % 13 - 6) / 20 for i in range(size)]
        model.graph.initializer.append(helper.make_tensor(name, onnx.TensorProto.FLOAT, dims, values))
    onnx.save(model, folder / "model.onnx")
    (root / "net" / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 4\n')
    return root


def explain(repository, tmp_path, *arguments):
    command = [sys.executable, "-m", "hone", "explain", "net", "--model-repository", str(repository)]
    command += ["--kernels-cache", str(tmp_path / "cache"), "--rounds", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_json_and_trace_tell_both_sides(repository, tmp_path):
    trace = tmp_path / "trace.json"
    ran = explain(repository, tmp_path, "--batch", "2", "--json", "--trace", str(trace))
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["signature"] == "x:FP32[2,8,6,6]"
    assert told["gpus"] == []
    assert any(group["template"].startswith("cpu.conv2d") for group in told["tuned"]["groups"])
    assert sum(group["share"] for group in told["tuned"]["groups"]) == pytest.approx(1.0)
    assert any(node["op"] == "Conv" for node in told["baseline"]["nodes"])
    assert any(layer["what"] == "convolution 16x8x3x3 to 72 pixels" for layer in told["layers"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}


def test_a_model_that_is_not_there_is_told(repository, tmp_path):
    command = [sys.executable, "-m", "hone", "explain", "absent", "--model-repository", str(repository)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert "absent" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_no_batch_is_refused(repository, tmp_path):
    ran = explain(repository, tmp_path, "--batch", "0")
    assert ran.returncode == 1
    assert "expected 1 or more" in ran.stderr


TOLD = {
    "model": "net",
    "version": "1",
    "signature": "x:FP32[1,4]",
    "precision": "f32",
    "roofline": {"gflops": 100.0, "gflops_bf16": 200.0, "num_threads": 2},
    "lowering": None,
    "tuned": {"microseconds": 30.0, "overhead_microseconds": 1.0, "groups": [], "in_place": []},
    "baseline": {"microseconds": 20.0, "nodes": [{"op": "Gemm", "share": 1.0}]},
    "layers": [{"what": "product of depth 4", "tuned_us": 30.0, "baseline_us": 20.0, "lost": True}],
}


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [
        (None, "not tuned here"),
        ({"engine": "tvm", "speedup": 1.5}, "promoted, 1.50 times"),
        ({"engine": "onnxruntime", "reason": "it is slower", "outcome": "refused"}, "not promoted: it is slower"),
    ],
)
def test_the_first_line_tells_whether_it_was_promoted_and_why_not(bucket, expected):
    assert expected in headline({**TOLD, "bucket": bucket})


def test_what_lost_is_named(capsys):
    print_explanation({**TOLD, "bucket": None})
    assert "Lost to the baseline: product of depth 4 (+10.0 us)" in capsys.readouterr().out


KEPT = {
    "artifact": "a" * 64,
    "device": "NVIDIA A100, sm_80",
    "precision": "f16",
    "serves": False,
    "current": True,
    "plain": False,
    "tuned_us": 50.0,
    "baseline_us": 100.0,
    "measured_us": 20.0,
    "rest_us": 30.0,
    "rest_share": 0.6,
    "groups": [
        {
            "what": "matmul 16x64 x 64x64 +relu",
            "note": "padded from matmul 16x63 x 63x64",
            "template": "cutlass.gemm2x",
            "parameters": {"slices": 1, "swizzle": 2},
            "num_calls": 3,
            "microseconds": 20.0,
            "share": 0.4,
            "gflops": 1234.5,
            "of_roofline": 0.25,
        },
        {
            "what": "softmax",
            "note": "",
            "template": "generalreduction",
            "parameters": {},
            "num_calls": 1,
            "microseconds": None,
            "share": None,
            "gflops": None,
            "of_roofline": None,
        },
    ],
}


def printed(capsys, **fields):
    told = {name: TOLD[name] for name in ("model", "version", "signature")}
    print_explanation({**told, "bucket": None, "gpus": [{**KEPT, **fields}]})
    return " ".join(capsys.readouterr().out.split())


def test_what_is_kept_for_a_gpu_says_that_its_times_are_the_searchs(capsys):
    text = printed(capsys)
    assert "x:FP32[1,4] at f16 on NVIDIA A100, sm_80: it is kept, and does not serve here." in text
    assert "When the gate measured it there: 0.050 ms tuned, 0.100 ms on its baseline." in text
    assert "Times below are those of the search, each call alone; nothing was run for this." in text
    for part in (
        "(padded from matmul 16x63 x 63x64)",
        "slices=1 swizzle=2",
        "40.0%",
        "1234",
        "25%",
        "generalreduction",
    ):
        assert part in text
    assert "what is between calls: 0.030 ms (60.0%)" in text


def test_where_a_module_for_a_gpu_comes_from_is_told(capsys):
    text = printed(capsys, serves=True, current=False, plain=True, device=None, tuned_us=None, baseline_us=None)
    assert (
        "on a GPU that the cache does not name, made with plain schedules and without a search: it serves here" in text
    )
    assert "another version of hone made it" in text
    assert "gate" not in text


def test_a_module_for_a_gpu_that_nobody_made_is_told(repository, tmp_path):
    ran = explain(repository, tmp_path, "--device", "gpu")
    assert ran.returncode == 1
    assert "the kernels cache keeps no module for a GPU at x:FP32[1,8,6,6]" in ran.stderr
    assert "'--device cpu' profiles its module for CPUs" in ran.stderr


@pytest.fixture
def subject(repository, tmp_path):
    """What is explained of the model with this instance group on a machine with so many GPUs."""
    shutil.copytree(repository / "net", tmp_path / "models" / "net")
    config = tmp_path / "models" / "net" / "config.pbtxt"
    plain = config.read_text()

    def of(group, num_gpus, device=None):
        config.write_text(plain + (f"instance_group {{ {group} }}\n" if group else ""))
        settings = Settings(model_repository=(tmp_path / "models",), allow_gpu_metrics=False)
        return subject_of(settings, Namespace(model="net", device=device, batch=2), num_gpus)

    return of


@pytest.mark.parametrize(
    ("group", "num_gpus", "device", "profiles", "runs_here"),
    [
        ("", 0, None, True, True),
        ("", 1, None, False, True),
        ("", 1, "cpu", True, True),
        ("", 0, "gpu", False, False),
        ("kind: KIND_CPU", 1, None, True, True),
        ("kind: KIND_CPU", 1, "gpu", False, True),
        ("kind: KIND_GPU gpus: [1]", 2, None, False, True),
        ("kind: KIND_GPU gpus: [1]", 0, None, False, False),
        ("kind: KIND_GPU", 0, "gpu", False, False),
    ],
)
def test_what_is_explained_is_what_instances_run_on_unless_asked_otherwise(
    subject, group, num_gpus, device, profiles, runs_here
):
    found = subject(group, num_gpus, device)
    assert (found.signature.text, found.profiles, found.runs_here) == ("x:FP32[2,8,6,6]", profiles, runs_here)


def test_what_is_wrong_for_other_reasons_than_gpus_is_still_told(subject):
    with pytest.raises(ConfigError, match="KIND_GPU"):
        subject("kind: KIND_GPU", 0, "cpu")
    with pytest.raises(ConfigError, match="count"):
        subject("kind: KIND_CPU count: -1", 0)
