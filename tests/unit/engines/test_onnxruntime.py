"""The baseline engine: every datatype, no copies, no telemetry, errors without paths."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from hone.engines.onnxruntime import OnnxRuntimeEngine
from hone.errors import EngineError, InvalidRequest
from hone.types import NUMPY_DTYPES, TensorSpec
from tests import models


def load(tmp_path, content: bytes) -> OnnxRuntimeEngine:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    return OnnxRuntimeEngine.load(path)


@pytest.mark.parametrize("datatype", [name for name in NUMPY_DTYPES if name != "BYTES"])
def test_identity_of_every_datatype(tmp_path, datatype):
    engine = load(tmp_path, models.identity(datatype, ("n", 3)))
    assert engine.inputs == (TensorSpec("IN", datatype, (-1, 3)),)
    array = (np.arange(6).reshape(2, 3) % 2).astype(NUMPY_DTYPES[datatype])
    (out,) = engine.run({"IN": array}, ["OUT"])
    assert out.dtype == array.dtype
    assert out.tolist() == array.tolist()
    assert not np.shares_memory(out, array)
    (empty,) = engine.run({"IN": array[:0]}, ["OUT"])
    assert empty.shape == (0, 3)


def test_outputs_outlive_the_engine_and_are_aligned(tmp_path):
    for datatype in ("FP32", "BF16"):
        engine = load(tmp_path, models.identity(datatype, ("n",)))
        array = np.arange(1000).astype(NUMPY_DTYPES[datatype])
        outs = [engine.run({"IN": array + i}, ["OUT"])[0] for i in range(3)]
        engine.close()
        del engine
        for i, out in enumerate(outs):
            assert out.ctypes.data % 64 == 0
            np.testing.assert_array_equal(out, (array + i).astype(out.dtype))


def test_strings_are_utf8_both_ways(tmp_path):
    engine = load(tmp_path, models.identity("BYTES", ("n", 2)))
    array = np.array([[b"plain", "höne".encode()], [b"", b"x" * 1000]], dtype=object)
    (out,) = engine.run({"IN": array}, ["OUT"])
    assert out.tolist() == array.tolist()
    with pytest.raises(InvalidRequest, match="input 'IN': element 1 is not valid UTF-8"):
        engine.run({"IN": np.array([[b"a", b"\xff"]], dtype=object)}, ["OUT"])


def test_outputs_come_in_the_order_asked_for(tmp_path):
    engine = load(tmp_path, models.add_sub())
    a, b = np.full((1, 4), 3, np.float32), np.full((1, 4), 1, np.float32)
    difference, total = engine.run({"A": a, "B": b}, ["DIFFERENCE", "SUM"])
    assert (difference == 2).all()
    assert (total == 4).all()


@pytest.mark.parametrize("content", [b"", b"not a model", models.identity()[:40]])
def test_files_that_are_no_model_are_told_without_their_path(tmp_path, content):
    with pytest.raises(EngineError) as caught:
        load(tmp_path, content)
    assert str(tmp_path) not in str(caught.value)


def test_a_failing_run_is_an_engine_error(tmp_path):
    engine = load(tmp_path, models.identity("FP32", ("n", 4)))
    with pytest.raises(EngineError, match="onnxruntime: "):
        engine.run({"IN": np.zeros((1, 5), np.float32)}, ["OUT"])


def test_bfloat16_views_keep_their_owner(tmp_path):
    engine = load(tmp_path, models.identity("BF16", ("n",)))
    (out,) = engine.run({"IN": np.ones(4096, ml_dtypes.bfloat16)}, ["OUT"])
    part = out[10:20].view(np.uint16)
    del out
    for _ in range(50):
        engine.run({"IN": np.zeros(4096, ml_dtypes.bfloat16)}, ["OUT"])
    assert (part.view(ml_dtypes.bfloat16) == 1).all()


def test_nothing_is_written_to_the_home_folder_nor_reported(tmp_path):
    """ONNX Runtime 1.32 keeps a device number and an event store in the home folder when telemetry is on."""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "import hone.engines.onnxruntime as e; e.ort.SessionOptions()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert list(tmp_path.rglob("*")) == []
