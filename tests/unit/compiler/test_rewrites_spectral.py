"""Fourier transforms as matrix products give what numpy says, and what ONNX Runtime does."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites import rewrite, spectral
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run

RNG = np.random.default_rng(5)


def rewritten(proto, inputs, tmp_path):
    graph = graph_of(proto, inputs, tmp_path)
    assert rewrite(graph)
    assert not operators(graph) & {"DFT", "STFT"}
    return run(graph.attached(), inputs)


def joined(values):
    return np.stack([values.real, values.imag], -1)


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("axis", [1, 2, -2])
@pytest.mark.parametrize("length", [None, 4, 9])
def test_dft_of_any_axis_and_length(opset, parts, axis, length, tmp_path):
    given = RNG.normal(size=(2, 6, 5, parts)).astype(np.float32)
    inputs = ["x", "n" if length else "", "axis" if opset == 20 else ""]
    proto = model(
        f"g (float[a, b, c, d] x) => (float[e, f, h, i] y) {{"
        f" y = DFT {'' if opset == 20 else f'<axis = {axis}>'} ({', '.join(inputs).rstrip(', ')}) }}",
        ({"n": np.array(length)} if length else {}) | ({"axis": np.array(axis)} if opset == 20 else {}),
        opset=opset,
    )
    [found] = rewritten(proto, {"x": given}, tmp_path)
    values = given[..., 0] + (1j * given[..., 1] if parts == 2 else 0)
    place = axis % 4
    assert_same([found], [joined(np.fft.fft(values, length, axis=place)).astype(np.float32)], tolerance=1e-5)


@pytest.mark.parametrize("length", [8, 9])
def test_one_sided_and_inverse(length, tmp_path):
    given = RNG.normal(size=(3, length, 2)).astype(np.float32)
    text = "g (float[a, b, c] x) => (float[e, f, h] y) {{ y = DFT <inverse = {}, onesided = {}> (x, n, axis) }}"
    weights = {"n": np.array(length), "axis": np.array(1)}
    proto = model(text.format(1, 0), weights, opset=20)
    expected = np.fft.ifft(given[..., 0] + 1j * given[..., 1], axis=1)
    assert_same(rewritten(proto, {"x": given}, tmp_path), [joined(expected).astype(np.float32)])
    real = given[..., :1]
    spectrum = joined(np.fft.rfft(real[..., 0], axis=1)).astype(np.float32)
    assert_same(rewritten(model(text.format(0, 1), weights, opset=20), {"x": real}, tmp_path), [spectrum])
    back = rewritten(model(text.format(1, 1), weights, opset=20), {"x": spectrum}, tmp_path)
    assert_same(back, [real])


@pytest.mark.parametrize("window", [True, False])
@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("step", [3, 8])
def test_stft(window, onesided, step, tmp_path):
    signal = RNG.normal(size=(2, 61, 1)).astype(np.float32)
    shape = RNG.random(16).astype(np.float32)
    proto = model(
        "g (float[a, b, c] x) => (float[d, e, f, h] y) {"
        f" y = STFT <onesided = {onesided}> (x, step, {'window' if window else ''}, n) }}",
        {"step": np.array(step), "n": np.array(16)} | ({"window": shape} if window else {}),
    )
    found = rewritten(proto, {"x": signal}, tmp_path)
    frames = np.lib.stride_tricks.sliding_window_view(signal[..., 0], 16, axis=1)[:, ::step]
    frames = frames * (shape if window else 1)
    spectra = np.fft.rfft(frames) if onesided else np.fft.fft(frames)
    assert_same(found, [joined(spectra).astype(np.float32)], tolerance=2e-5)
    assert_same(found, run(proto, {"x": signal}), tolerance=1e-4)


@pytest.mark.parametrize("window", [True, False])
def test_stft_of_a_signal_without_a_dimension_for_its_parts(window, tmp_path):
    signal = RNG.normal(size=(2, 61)).astype(np.float32)
    proto = model(
        "g (float[a, b] x) => (float[d, e, f, h] y) {" + f" y = STFT (x, step, {'window' if window else ''}, n) }}",
        {"step": np.array(8), "n": np.array(16)} | ({"window": np.full(16, 0.5, np.float32)} if window else {}),
    )
    found = rewritten(proto, {"x": signal}, tmp_path)
    frames = np.lib.stride_tricks.sliding_window_view(signal, 16, axis=1)[:, ::8] * (0.5 if window else 1)
    assert_same(found, [joined(np.fft.rfft(frames)).astype(np.float32)], tolerance=2e-5)


def test_frames_without_end_are_no_table(tmp_path, monkeypatch):
    proto = model(
        "g (float[a, b, c] x) => (float[d, e, f, h] y) { y = STFT (x, step, , n) }",
        {"step": np.array(1), "n": np.array(16)},
    )
    inputs = {"x": np.zeros((1, 47, 1), np.float32)}
    monkeypatch.setattr(spectral, "_MAX_TABLE_ITEMS", 32 * 16)
    assert rewrite(graph_of(proto, inputs, tmp_path))
    monkeypatch.setattr(spectral, "_MAX_TABLE_ITEMS", 32 * 16 - 1)
    assert not rewrite(graph_of(proto, inputs, tmp_path))


def test_a_length_that_a_run_brings_is_left_alone(tmp_path):
    proto = model("g (float[a, b, c] x, int64 n) => (float[e, f, h] y) { y = DFT <axis = 1> (x, n) }")
    inputs = {"x": np.zeros((1, 8, 1), np.float32), "n": np.array(8)}
    assert not rewrite(graph_of(proto, inputs, tmp_path))
