"""New content counts, whatever the file's times and size say."""

from __future__ import annotations

import os
from pathlib import Path

from tests import models
from tests.process.support import POLL, answers
from tests.running import run_server, wait_until


def test_same_size_and_same_modification_time(repository: Path) -> None:
    file = models.write_model(repository, "m", models.scale(2.0)) / "1" / "model.onnx"
    with run_server(repository, *POLL) as server:
        assert answers(server, "m", 2.0)
        before = file.stat()
        with file.open("r+b") as opened:
            opened.write(models.scale(3.0))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = file.stat()
        assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
        wait_until(lambda: answers(server, "m", 3.0), "the new content answers")


def test_a_changed_configuration(repository: Path) -> None:
    folder = models.write_model(repository, "m", models.scale(2.0), config="max_batch_size: 2")
    with run_server(repository, *POLL) as server:
        assert server.get("/v2/models/m/config")[1]["max_batch_size"] == 2
        (folder / "config.pbtxt").write_text("max_batch_size: 3", encoding="utf-8")
        wait_until(lambda: server.get("/v2/models/m/config")[1]["max_batch_size"] == 3, "the new configuration holds")
        (folder / "config.pbtxt").unlink()
        wait_until(lambda: server.get("/v2/models/m/config")[1]["max_batch_size"] == 4, "and then the default")
        assert answers(server, "m", 2.0)
