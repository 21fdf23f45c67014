"""Layers that stay in float32: a product that bfloat16 ruins is found, and a stricter goal follows where it must."""

from __future__ import annotations

import math
import time

import numpy as np
import onnxruntime as ort
import pytest

from hone.compiler.onnx_import import ImportedModel, import_model
from hone.compiler.target import CpuTarget
from hone.compiler.templates.cpp.bf16 import missing_features
from hone.specialization import Signature
from hone.tuning.inputs import InputSet
from hone.tuning.lowering import KeptLayer, Lowering, find_lowering
from hone.tuning.sensitivity import OutputError
from hone.tuning.trial import Evidence
from hone.types import TensorSpec
from tests.unit.engines.tvm_artifacts import save_model

HOST = CpuTarget.detect(num_threads=1)
_SIZE, _NUM_LAYERS, _BAD = 32, 4, 2

pytestmark = pytest.mark.skipif(bool(missing_features(HOST)), reason=f"this CPU has no {missing_features(HOST)}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four products; the third one's large weights cancel, and what is left of them bfloat16 rounds away."""
    rng = np.random.default_rng(2)
    nodes, weights = [], {}
    for layer in range(_NUM_LAYERS):
        weight = rng.standard_normal((_SIZE, _SIZE)) / math.sqrt(_SIZE)
        if layer == _BAD:
            weight[1::2] = weight[::2] * 0.9 - 30  # beside the large ones of its neighbour
            weight[::2] += 30
        weights[f"w{layer}"] = weight.astype(np.float32)
        # Neighbouring values alike: so that the large weights cancel.
        if layer == _BAD:
            nodes.append(("MatMul", [f"v{layer}", "alike"], [f"a{layer}"], {}))
        source = f"a{layer}" if layer == _BAD else f"v{layer}"
        nodes.append(("MatMul", [source, f"w{layer}"], [f"v{layer + 1}"], {}))
    weights["alike"] = np.kron(np.eye(_SIZE // 2), np.ones((2, 2)) / 2).astype(np.float32)
    path = tmp_path_factory.mktemp("lowering") / "model.onnx"
    shape = [5, _SIZE]
    return save_model(path, nodes, {"v0": ("float32", shape)}, {f"v{_NUM_LAYERS}": ("float32", shape)}, weights)


@pytest.fixture(scope="module")
def error_of(model):
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(3).standard_normal((5, _SIZE)).astype(np.float32)
    evidence = Evidence((InputSet("made up", {"v0": x}),), (session.run(None, {"v0": x}),), None)
    specs = (TensorSpec(f"v{_NUM_LAYERS}", "FP32", (5, _SIZE)),)
    return OutputError(evidence, specs, Signature.of([("v0", "FP32", (5, _SIZE))]), "bf16", None)


class Attempts:
    def __init__(self, *shares) -> None:
        self.shares = list(shares)
        self.asked: list[Lowering] = []

    def __call__(self, lowering: Lowering) -> float | None:
        self.asked.append(lowering)
        return self.shares.pop(0)


def found(model, error_of, attempt, *, seconds=300.0):
    imported = import_model(model, {})
    assert isinstance(imported, ImportedModel)
    return find_lowering(
        imported,
        HOST,
        error_of,
        attempt,
        whole=7.0,
        deadline=time.monotonic() + seconds,
        num_builders=1,
        tell=lambda share, stage, **details: None,
    )


def test_the_layer_that_does_the_harm_is_kept(model, error_of):
    attempt = Attempts(0.7)
    lowering = found(model, error_of, attempt)
    assert lowering is not None
    [kept] = lowering.kept
    assert "matmul" in kept.what
    assert kept.effect > 1.0
    assert lowering.layers == {3}, "the product that is alike comes before it"
    assert (lowering.num_layers, lowering.whole, lowering.error) == (5, 7.0, 0.7)
    assert attempt.asked[0].layers == lowering.layers
    assert "kept in f32: 1 of 5 layers: 3 (matmul" in lowering.note
    assert "off by 7 times what is allowed" in lowering.note


def test_more_are_kept_where_the_engine_is_too_far_off(model, error_of):
    attempt = Attempts(1.5, 0.9)
    lowering = found(model, error_of, attempt)
    assert lowering is not None
    assert lowering.error == 0.9
    first, second = attempt.asked
    assert first.layers < second.layers == lowering.layers, "the same set is not compiled again"


@pytest.mark.parametrize("shares", [(None,), (1.01, 1.02, 1.03)], ids=str)
def test_nothing_is_found_where_no_attempt_passes(model, error_of, shares):
    attempt = Attempts(*shares)
    assert found(model, error_of, attempt) is None
    assert len(attempt.asked) == len(shares)


def test_nothing_is_found_without_time(model, error_of):
    assert found(model, error_of, Attempts(), seconds=0.0) is None


def test_what_a_manifest_says_is_read_back():
    lowering = Lowering("bf16", 9, 1.7, 0.9, (KeptLayer(0, "first", 1.25), KeptLayer(8, "last", 0.5)))
    assert Lowering.from_json(lowering.to_json()) == lowering
    many = Lowering("bf16", 9, 1.7, 0.9, tuple(KeptLayer(i, f"layer {i}", i / 10) for i in range(9)))
    assert "8 (layer 8: 0.8 alone), 7" in many.note
    assert "and 3 more" in many.note
