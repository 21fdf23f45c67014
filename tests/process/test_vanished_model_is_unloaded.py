"""A model whose folder is gone stops serving and leaves the index; one that is only moved away for a moment stays."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import models
from tests.process.support import POLL, ROW, answers, is_known, let_polls_pass, num_loads, occupied, slow_model
from tests.running import run_server, wait_until


def test_folder_removed(repository: Path) -> None:
    models.write_model(repository, "stays", models.scale(3.0))
    models.write_model(repository, "goes", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        shutil.rmtree(repository / "goes")
        wait_until(lambda: not is_known(server, "goes"), "it leaves the index")
        status, answer = server.infer("goes", ROW)
        assert (status, answer["error"]) == (404, "Request for unknown model: 'goes' is not found")
        assert server.get("/v2/models/goes/ready")[0] == 404
        assert server.get("/v2/health/ready")[0] == 200
        wait_until(lambda: 'model="goes"' not in server.metrics(), "its series disappear")
        assert answers(server, "stays", 3.0)
        models.write_model(repository, "goes", models.scale(5.0))
        wait_until(lambda: answers(server, "goes", 5.0), "it comes back with its folder")
        let_polls_pass(server, repository)
        assert num_loads(server, "stays") == 1


def test_requests_in_flight_finish(repository: Path) -> None:
    slow_model(repository, iterations=500_000)
    with run_server(repository, *POLL) as server, occupied(server, "slow") as requests:
        shutil.rmtree(repository / "slow")
        wait_until(lambda: not is_known(server, "slow"), "it leaves the index")
        assert [request.result()[0] for request in requests] == [200, 200]


def test_a_broken_model_that_vanishes_is_forgotten(repository: Path) -> None:
    models.write_model(repository, "bad", b"garbage")
    with run_server(repository, *POLL, ready=False) as server:
        wait_until(lambda: is_known(server, "bad"), "it is in the index")
        assert server.get("/v2/health/ready")[0] == 503
        shutil.rmtree(repository / "bad")
        wait_until(lambda: not is_known(server, "bad"), "it leaves the index")
        assert server.get("/v2/health/ready")[0] == 200


def test_the_whole_repository_out_of_sight(repository: Path) -> None:
    """A volume that is gone for the moment is no reason to stop serving."""
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL) as server:
        away = repository.with_name("away")
        repository.rename(away)
        wait_until(lambda: "cannot list model repository" in server.log, "it is told")
        assert answers(server, "m", 2.0)
        away.rename(repository)
        let_polls_pass(server, repository)
        assert answers(server, "m", 2.0)
        assert num_loads(server, "m") == 1
