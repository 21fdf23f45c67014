from __future__ import annotations

import json

import numpy as np
import pytest
from onnx import TensorProto, helper

from hone.tuning.domains import NoDomain, derive_domains
from hone.tuning.inputs import Domain, draw, draw_many, narrower, pad_rows, rotation
from hone.types import NUMPY_DTYPES, TensorSpec
from tests import models

FLOATS = {"IN": Domain("FP32", (64, 32), -1.0, 1.0)}


def test_the_same_seed_draws_the_same_and_another_draws_another():
    first, again, other = draw(FLOATS, 4), draw(FLOATS, 4), draw(FLOATS, 5)
    assert np.array_equal(first.arrays["IN"], again.arrays["IN"])
    assert not np.array_equal(first.arrays["IN"], other.arrays["IN"])
    assert first.arrays["IN"].dtype == np.float32


@pytest.mark.parametrize("seed", [0, 1])
def test_floats_stay_within_their_domain_and_are_never_zero(seed):
    array = draw(FLOATS, seed).arrays["IN"]
    assert array.min() >= -1.0
    assert array.max() <= 1.0
    assert np.all(array != 0)
    assert array.std() > 0.2


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 2)])
@pytest.mark.parametrize("datatype", [d for d in NUMPY_DTYPES if d != "BYTES"])
def test_every_datatype_can_be_drawn(datatype, shape):
    for seed in (2, 3):  # spread out and bunched
        array = draw({"IN": Domain(datatype, shape, 0, 1)}, seed).arrays["IN"]
        assert isinstance(array, np.ndarray)
        assert array.dtype == NUMPY_DTYPES[datatype]
        assert array.shape == shape


def test_integers_reach_both_ends():
    array = draw({"IN": Domain("INT64", (1000,), 0, 3)}, 0).arrays["IN"]
    assert set(array.tolist()) == {0, 1, 2, 3}


def test_domains_survive_json():
    domain = Domain("INT64", (2, 3), 0, 9, "indices into Gather")
    assert Domain.from_json(json.loads(json.dumps(domain.to_json()))) == domain
    with pytest.raises(ValueError, match="datatype: expected one of"):
        Domain.from_json({**domain.to_json(), "datatype": "INT65"})


def test_rotation_leaves_the_cache_within_memory():
    small = {"IN": Domain("FP32", (16,), 0, 1)}
    assert len(rotation(small, cache_bytes=1 << 20)) == 16
    large = {"IN": Domain("FP32", (1 << 18,), 0, 1)}  # 1 MiB
    assert len(rotation(large, cache_bytes=4 << 20)) == 9
    assert len(rotation(large, cache_bytes=1 << 30, max_bytes=4 << 20)) == 4
    assert len(rotation(large, cache_bytes=1 << 30, max_bytes=1 << 20)) == 3


def test_narrower_domains_touch_integers_only():
    domains = {"I": Domain("INT64", (2,), 0, 100), "F": Domain("FP32", (2,), -1, 1)}
    assert [(d["I"].high, d["F"]) for d in narrower(domains)] == [(1.0, domains["F"]), (0.0, domains["F"])]


def test_padding_repeats_the_last_row():
    padded = pad_rows({"IN": np.array([[1, 2], [3, 4]], np.float32)}, 4)["IN"]
    assert padded.tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]


def test_sets_have_names_for_messages():
    assert [s.name for s in draw_many(FLOATS, 2, 7)] == ["synthetic inputs 7", "synthetic inputs 8"]


# --- what graphs demand


def derived(tmp_path, nodes, inputs, shapes, initializers=()):
    outputs = {nodes[-1].output[0]: ("FP32", None)}
    path = tmp_path / "model.onnx"
    path.write_bytes(models.model(nodes, inputs, outputs, initializers))
    return derive_domains(path, [TensorSpec(n, d, shapes[n]) for n, (d, _) in inputs.items()])


def floats(name, *dims):
    return helper.make_tensor(name, TensorProto.FLOAT, dims, np.zeros(dims, np.float32).tobytes(), raw=True)


def test_indices_stay_below_the_size_of_what_they_index(tmp_path):
    found = derived(
        tmp_path,
        [helper.make_node("Gather", ["table", "ids"], ["OUT"], axis=0)],
        {"ids": ("INT64", ("batch", 7))},
        {"ids": (2, 7)},
        [floats("table", 50, 4)],
    )
    assert (found["ids"].low, found["ids"].high) == (0, 49)
    assert found["ids"].shape == (2, 7)


def test_large_tables_count_without_their_data(tmp_path):
    found = derived(
        tmp_path,
        [helper.make_node("Gather", ["table", "ids"], ["OUT"], axis=1)],
        {"ids": ("INT32", (3,))},
        {"ids": (3,)},
        [floats("table", 8, 3000)],
    )
    assert found["ids"].high == 2999


def test_indices_are_found_behind_operators_that_hand_them_on(tmp_path):
    found = derived(
        tmp_path,
        [
            helper.make_node("Cast", ["ids"], ["wide"], to=TensorProto.INT64),
            helper.make_node("Unsqueeze", ["wide", "axes"], ["tall"]),
            helper.make_node("Gather", ["table", "tall"], ["OUT"]),
        ],
        {"ids": ("FP32", ("batch",))},
        {"ids": (5,)},
        [floats("table", 9, 2), helper.make_tensor("axes", TensorProto.INT64, [1], [0])],
    )
    assert (found["ids"].low, found["ids"].high) == (0, 8)


def test_the_smallest_table_bounds_shared_indices(tmp_path):
    found = derived(
        tmp_path,
        [
            helper.make_node("Gather", ["small", "ids"], ["a"]),
            helper.make_node("Gather", ["big", "ids"], ["b"]),
            helper.make_node("Add", ["a", "b"], ["OUT"]),
        ],
        {"ids": ("INT64", ("n",))},
        {"ids": (4,)},
        [floats("big", 30, 2), floats("small", 4, 2)],
    )
    assert found["ids"].high == 3


def test_indices_into_computed_values_use_their_inferred_shape(tmp_path):
    found = derived(
        tmp_path,
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("GatherElements", ["y", "ids"], ["OUT"], axis=1)],
        {"x": ("FP32", ("batch", "n")), "ids": ("INT64", ("batch", 2))},
        {"x": (1, 12), "ids": (1, 2)},
    )
    assert found["ids"].high == 11
    assert (found["x"].low, found["x"].high) == (-1.0, 1.0)


def test_lengths_of_a_recurrent_layer_are_at_most_its_steps(tmp_path):
    found = derived(
        tmp_path,
        [helper.make_node("RNN", ["x", "w", "r", "", "seq"], ["y", "OUT"], hidden_size=3)],
        {"x": ("FP32", (11, "batch", 2)), "seq": ("INT32", ("batch",))},
        {"x": (11, 4, 2), "seq": (4,)},
        [floats("w", 1, 3, 2), floats("r", 1, 3, 3)],
    )
    assert (found["seq"].low, found["seq"].high) == (1, 11)


def test_logarithms_get_positive_numbers(tmp_path):
    found = derived(tmp_path, [helper.make_node("Log", ["x"], ["OUT"])], {"x": ("FP32", (2,))}, {"x": (2,)})
    assert found["x"].low > 0


def test_booleans_masks_images_and_lengths_by_their_kind(tmp_path):
    inputs = {
        "flags": ("BOOL", (4,)),
        "attention_mask": ("INT64", (4, 9)),
        "image": ("UINT8", (4,)),
        "lengths": ("INT64", (4,)),
    }
    nodes = [helper.make_node("Cast", [name], [f"{name}_out"], to=TensorProto.FLOAT) for name in inputs]
    found = derived(tmp_path, nodes, inputs, {"flags": (4,), "attention_mask": (4, 9), "image": (4,), "lengths": (4,)})
    assert {name: (d.low, d.high) for name, d in found.items()} == {
        "flags": (0, 1),
        "attention_mask": (0, 1),
        "image": (0, 255),
        "lengths": (1, 9),
    }


def test_an_input_that_tells_a_shape_cannot_be_made_up(tmp_path):
    found = derived(
        tmp_path,
        [helper.make_node("Reshape", ["x", "shape"], ["OUT"], name="/head/Reshape")],
        {"x": ("FP32", (4,)), "shape": ("INT64", (2,))},
        {"x": (4,), "shape": (2,)},
    )
    assert isinstance(found, NoDomain)
    assert "input 'shape' tells Reshape a shape ('/head/Reshape')" in found.reason
    assert "model_warmup" in found.reason


def test_texts_cannot_be_made_up(tmp_path):
    found = derived(tmp_path, [helper.make_node("Identity", ["t"], ["OUT"])], {"t": ("BYTES", (1,))}, {"t": (1,)})
    assert isinstance(found, NoDomain)
    assert "texts" in found.reason


def test_a_file_that_is_no_model_says_so(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model\.onnx is no ONNX model"):
        derive_domains(path, [])
