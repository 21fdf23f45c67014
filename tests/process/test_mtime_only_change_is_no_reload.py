"""Touching a file, or writing what it holds already, reloads nothing."""

from __future__ import annotations

import os
from pathlib import Path

from tests import models
from tests.process.support import POLL, ROW, let_polls_pass, num_loads
from tests.running import run_server


def test_touched_and_rewritten_files(repository: Path) -> None:
    folder = models.write_model(repository, "m", models.identity(), config="max_batch_size: 2")
    with run_server(repository, *POLL) as server:
        assert server.infer("m", ROW)[0] == 200
        os.utime(folder / "1" / "model.onnx")
        os.utime(folder / "config.pbtxt")
        let_polls_pass(server, repository, "first")
        models.write_model(repository, "m", models.identity(), config="max_batch_size: 2")
        let_polls_pass(server, repository, "second")
        assert num_loads(server, "m") == 1
        statistics = server.get("/v2/models/m/stats")[1]["model_stats"][0]
        assert statistics["inference_count"] == 1, "nothing began anew"
