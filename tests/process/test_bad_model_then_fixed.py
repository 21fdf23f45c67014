"""A bad model hurts no other, does not stop polling, says why, and is picked up once it is fixed."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests import models
from tests.process.support import POLL, answers, is_serving, let_polls_pass, num_loads
from tests.running import run_server, wait_until

BAD = {
    "garbage": (b"this is not ONNX", None, "1"),
    "half": (models.scale(4.0)[:60], None, "1"),
    "config": (models.scale(4.0), "max_batch_size: minus one", ""),
    "wrong": (models.scale(4.0), 'input [{ name: "OTHER" data_type: TYPE_FP32 dims: [4] }]', ""),
    "empty": (None, None, ""),
}


def write_bad(repository: Path, name: str) -> None:
    content, config, _ = BAD[name]
    if content is None:
        (repository / name / "1").mkdir(parents=True)
    else:
        models.write_model(repository, name, content, config=config)


def fix(repository: Path, name: str) -> None:
    (repository / name / "config.pbtxt").unlink(missing_ok=True)
    models.write_model(repository, name, models.scale(4.0))


def reasons(index: dict[tuple[str, str], tuple[str, str]], model: str) -> list[str]:
    return [reason for (name, _), (state, reason) in index.items() if name == model and state == "UNAVAILABLE"]


def test_bad_at_the_start(repository: Path) -> None:
    models.write_model(repository, "good", models.scale(2.0))
    for name in BAD:
        write_bad(repository, name)
    with run_server(repository, *POLL, ready=False) as server:
        wait_until(lambda: is_serving(server, "good"), "the good model serves")
        let_polls_pass(server, repository)
        index = server.index()
        assert answers(server, "good", 2.0)
        for name in BAD:
            assert len(reasons(index, name)) == 1, index
            assert reasons(index, name)[0], f"{name}: the index says why"
            assert str(repository) not in reasons(index, name)[0], "and names no path of the server"
            assert server.get("/v2/health/ready")[0] == 503
            fix(repository, name)
            wait_until(functools.partial(answers, server, name, 4.0), f"{name} is picked up once it is fixed")
            assert not reasons(server.index(), name)
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200, "ready again")
        let_polls_pass(server, repository, "second")
        assert num_loads(server, "good") == 1


@pytest.mark.parametrize("name", BAD)
def test_bad_later(repository: Path, name: str) -> None:
    models.write_model(repository, "good", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        write_bad(repository, name)
        wait_until(lambda: reasons(server.index(), name), "the index says why", seconds=20)
        let_polls_pass(server, repository, "first")
        num_warnings = server.log.count(f"model {name}:")
        let_polls_pass(server, repository, "second")
        assert server.log.count(f"model {name}:") == num_warnings, "tried again only when its files change"
        assert answers(server, "good", 2.0)
        fix(repository, name)
        wait_until(lambda: answers(server, name, 4.0), "picked up once it is fixed")
        let_polls_pass(server, repository, "third")
        assert num_loads(server, "good") == 1
