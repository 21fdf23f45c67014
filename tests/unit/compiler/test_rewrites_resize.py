"""Resizes by matrices give what ONNX Runtime's Resize gives."""

from __future__ import annotations

import numpy as np
import pytest

from hone.compiler.rewrites import rewrite
from tests.unit.compiler.graphs import assert_same, graph_of, model, operators, run

X = np.random.default_rng(41).normal(size=(2, 3, 7, 10)).astype(np.float32)


def resize(attributes, *, scales=None, sizes=None, opset=19):
    inputs = ", , scales" if scales else ", , , sizes"
    given = {"scales": np.array(scales, np.float32)} if scales else {"sizes": np.array(sizes, np.int64)}
    return model(
        f"g (float[n, c, h, w] x) => (float[n, c, a, b] y) {{ y = Resize <{attributes}> (x{inputs}) }}",
        given,
        opset=opset,
    )


@pytest.mark.parametrize(
    "attributes, scales, sizes",
    [
        ('mode = "linear"', [1, 1, 0.6, 0.65], None),
        ('mode = "linear"', [1, 1, 2.3, 1.7], None),
        ('mode = "cubic"', [1, 1, 0.8, 0.45], None),
        ('mode = "cubic", exclude_outside = 1', [1, 1, 0.8, 1.3], None),
        ('mode = "linear", antialias = 1', [1, 1, 0.6, 0.6], None),
        ('mode = "cubic", antialias = 1', None, [2, 3, 4, 5]),
        ('mode = "linear", coordinate_transformation_mode = "align_corners"', [1, 1, 0.6, 0.6], None),
        ('mode = "linear", coordinate_transformation_mode = "align_corners"', None, [2, 3, 1, 5]),
        ('mode = "linear", coordinate_transformation_mode = "asymmetric"', [1, 1, 0.7, 1.4], None),
        ('mode = "linear", coordinate_transformation_mode = "half_pixel_symmetric"', [1, 1, 0.6, 0.6], None),
        ('mode = "nearest"', [1, 1, 0.6, 2.6], None),
        ('mode = "nearest", nearest_mode = "ceil"', [1, 1, 0.6, 2.6], None),
        ('mode = "linear"', [1, 1.5, 1.3, 1], None),
        ('mode = "nearest", keep_aspect_ratio_policy = "not_larger", axes = [2, 3]', None, [14, 25]),
        ('mode = "linear", axes = [3, 2]', None, [15, 14]),
        ('mode = "nearest", keep_aspect_ratio_policy = "not_smaller", axes = [2, 3]', None, [3, 7]),
        ('mode = "cubic", keep_aspect_ratio_policy = "not_smaller", axes = [3, 2]', None, [3, 4]),
        ('mode = "linear", keep_aspect_ratio_policy = "not_larger"', None, [2, 3, 11, 17]),
    ],
)
def test_resize(attributes, scales, sizes, tmp_path):
    proto = resize(attributes, scales=scales, sizes=sizes)
    graph = graph_of(proto, {"x": X}, tmp_path)
    assert rewrite(graph)
    assert "Resize" not in operators(graph)
    assert_same(run(graph.attached(), {"x": X}), run(proto, {"x": X}), tolerance=1e-4)


@pytest.mark.parametrize("scales", [[1, 1, 2, 2], [1, 1, 2, 0.5]])
def test_what_the_importer_does_well_stays(scales, tmp_path):
    proto = resize('mode = "linear"', scales=scales)
    assert not rewrite(graph_of(proto, {"x": X}, tmp_path))


CROP = 'coordinate_transformation_mode = "tf_crop_and_resize"'


@pytest.mark.parametrize(
    "attributes, region, sizes",
    [
        ('mode = "linear", axes = [2, 3]', [0.4, 0.6, 0.6, 0.8], [3, 4]),
        ('mode = "linear", axes = [3, 2]', [0.4, 0.6, 0.6, 0.8], [3, 4]),
        ('mode = "linear", axes = [2, 3], extrapolation_value = 10.0', [0.4, -0.6, 1.2, 1.7], [5, 6]),
        ('mode = "linear", axes = [2, 3]', [0.25, 0.0, 0.75, 1.0], [7, 10]),
        ('mode = "linear", axes = [2, 3]', [0.9, 0.0, 0.1, 1.0], [4, 1]),
        ('mode = "nearest", axes = [2, 3], extrapolation_value = -3.5', [-0.3, 0.2, 0.9, 1.4], [5, 12]),
        ('mode = "cubic", axes = [2, 3], extrapolation_value = 2.0', [-0.3, 0.2, 0.9, 1.4], [5, 12]),
        ('mode = "linear", extrapolation_value = 1.0', [0, 0, -0.3, 0.2, 1, 1, 0.9, 1.4], [2, 3, 5, 12]),
    ],
)
def test_a_part_of_the_image(attributes, region, sizes, tmp_path):
    proto = model(
        f"g (float[n, c, h, w] x) => (float[n, c, a, b] y) {{ y = Resize <{attributes}, {CROP}> (x, roi, , sizes) }}",
        {"roi": np.array(region, np.float32), "sizes": np.array(sizes, np.int64)},
        opset=19,
    )
    graph = graph_of(proto, {"x": X}, tmp_path)
    assert rewrite(graph)
    assert "Resize" not in operators(graph)
    assert_same(run(graph.attached(), {"x": X}), run(proto, {"x": X}), tolerance=1e-4)


def test_a_part_that_a_request_names_stays(tmp_path):
    proto = model(
        f'g (float[n, c, h, w] x, float[4] roi) => (float[n, c, a, b] y) {{ y = Resize <mode = "linear", {CROP}, '
        "axes = [2, 3]> (x, roi, , sizes) }",
        {"sizes": np.array([3, 4], np.int64)},
        opset=19,
    )
    graph = graph_of(proto, {"x": X, "roi": np.zeros(4, np.float32)}, tmp_path)
    assert not rewrite(graph)
