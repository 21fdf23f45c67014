"""NVIDIA's load generator drives the server over both protocols: it reads metadata, config and statistics first.

Where its library libb64 is missing, `PerfAnalyzer.prepare` fails by naming the Debian package, and so do these tests.
"""

import pytest

from benchmarks.perf_analyzer import PerfAnalyzer
from tests import models
from tests.running import run_server


@pytest.fixture(scope="module")
def tool():
    return PerfAnalyzer.prepare()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    root = tmp_path_factory.mktemp("load")
    models.write_model(root, "batching", models.add_sub(), config="max_batch_size: 8")
    models.write_model(root, "plain", models.identity(dims=(1, 16)))
    with run_server(root) as running:
        yield running


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("model", ["batching", "plain"])
def test_smoke(tool, server, protocol, model):
    port = server.http_port if protocol == "http" else server.grpc_port
    result = tool.run(f"127.0.0.1:{port}", protocol, model, 2, {}, window_seconds=0.25)
    assert result.throughput > 0 and result.p50_us > 0
    status, document = server.get(f"/v2/models/{model}/stats")
    (statistics,) = document["model_stats"]
    assert status == 200 and statistics["inference_stats"]["success"]["count"] > 0
    assert statistics["inference_stats"]["fail"]["count"] == 0
