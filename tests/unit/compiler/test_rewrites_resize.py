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
