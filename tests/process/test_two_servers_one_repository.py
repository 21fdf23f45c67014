"""Two servers may share a repository: neither writes there, both follow it, and one's end is nothing to the other."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

from tests import models
from tests.process.support import POLL, answers
from tests.running import run_server, wait_until


def test_both_follow_and_neither_writes(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL) as first, run_server(repository, *POLL) as second:
        models.write_model(repository, "m", models.scale(3.0))
        for server in (first, second):
            wait_until(functools.partial(answers, server, "m", 3.0), "each sees the change")
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        models.write_model(repository, "m", models.scale(4.0))
        wait_until(lambda: answers(second, "m", 4.0), "the other goes on")
        found = sorted(str(path.relative_to(repository)) for path in repository.rglob("*"))
        assert found == ["m", "m/1", "m/1/model.onnx"], "nothing was written"


def test_a_repository_that_may_only_be_read(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    folders = [path for path in (repository, *repository.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        with run_server(repository, *POLL) as server:
            assert answers(server, "m", 2.0)
    finally:
        for folder in folders:
            folder.chmod(0o755)
