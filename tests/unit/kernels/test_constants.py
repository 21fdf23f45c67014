"""Derived weights are kept once, by what they are, and come back bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hone.kernels import Entry, MissReason, constants_digest, load_constants, publish_constants


def tensors():
    generator = np.random.default_rng(1)
    return {
        "scale": generator.standard_normal((3, 5)).astype(np.float32),
        "half": generator.standard_normal(7).astype(np.float16),
        "brain": generator.standard_normal((2, 2)).astype(ml_dtypes.bfloat16),
        "index": np.arange(4, dtype=np.int64),
        "bytes": np.arange(256, dtype=np.uint8),
        "flags": np.array([True, False]),
        "scalar": np.float64(2.5).reshape(()),
        "empty": np.zeros((0, 3), np.float32),
    }


def test_they_come_back_bit_for_bit(cache):
    given = tensors()
    entry = publish_constants(cache, given)
    assert isinstance(entry, Entry)
    got = load_constants(cache.get("constants", entry.digest))
    assert set(got) == set(given)
    for name, tensor in given.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert got[name].tobytes() == tensor.tobytes()


def test_the_same_tensors_are_kept_once(cache):
    first = publish_constants(cache, tensors())
    again = publish_constants(cache, dict(reversed(tensors().items())))
    assert again.inode == first.inode
    assert len(cache.entries()) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given.update(scale=np.nextafter(given["scale"], np.float32(10))),
        lambda given: given.update(scale=given["scale"].reshape(5, 3)),
        lambda given: given.update(scale=given["scale"].view(np.int32)),
        lambda given: given.update(other=given.pop("scale")),
        lambda given: given.pop("empty"),
        lambda given: given.update(empty=np.zeros((3, 0), np.float32)),
    ],
)
def test_each_difference_changes_the_digest(change):
    given = tensors()
    before = constants_digest(given)
    change(given)
    assert constants_digest(given) != before


def test_strides_and_byte_order_do_not_matter(cache):
    plain = np.arange(12, dtype=np.float32).reshape(3, 4)
    odd = {
        "fortran": np.asfortranarray(plain),
        "big-endian": plain.astype(">f4"),
        "view": np.repeat(plain, 2, axis=1)[:, ::2],
    }
    for tensor in odd.values():
        assert constants_digest({"x": tensor}) == constants_digest({"x": plain})
        entry = publish_constants(cache, {"x": tensor})
        np.testing.assert_array_equal(load_constants(entry)["x"], plain)


@pytest.mark.parametrize("tensor", [np.array([b"x"], object), np.array(["x"])])
def test_what_the_format_has_not_is_refused_by_name(cache, tensor):
    with pytest.raises(ValueError, match="constant 'odd'"):
        publish_constants(cache, {"odd": tensor})


def test_damage_is_found(cache):
    entry = publish_constants(cache, tensors())
    path = entry.files["constants.safetensors"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert cache.get("constants", entry.digest).reason is MissReason.CORRUPT
    assert isinstance(publish_constants(cache, tensors()), Entry)


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "constants.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_constants(tmp_path)
