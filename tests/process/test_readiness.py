"""What ready means: strict or not, before, during and after loading, with and without models."""

from __future__ import annotations

from pathlib import Path

import pytest
import tritonclient.grpc as triton

from tests import models
from tests.process.support import EVERYTHING, EXPLICIT, POLL, is_serving
from tests.running import RunningServer, run_server, wait_until


def health(server: RunningServer) -> tuple[int, int]:
    """Statuses of live and ready over HTTP, after checking that gRPC says the same."""
    live, ready = (server.get(f"/v2/health/{what}")[0] for what in ("live", "ready"))
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        assert (client.is_server_live(), client.is_server_ready()) == (live == 200, ready == 200)
    return live, ready


def started(server: RunningServer) -> None:
    wait_until(lambda: "ready in " in server.log, "the first load ends")


def test_strict_by_default(repository: Path) -> None:
    models.write_model(repository, "good", models.identity())
    models.write_model(repository, "bad", b"garbage")
    with run_server(repository, *EVERYTHING, ready=False) as server:
        started(server)
        assert health(server) == (200, 503)
        assert server.get("/v2/models/good/ready")[0] == 200
        assert server.get("/v2/models/bad/ready")[0] != 200
        assert server.post("/v2/repository/models/bad/unload")[0] == 200
        assert health(server) == (200, 200), "a model unloaded on purpose does not count"
        assert server.post("/v2/repository/models/bad/load")[0] == 400
        assert health(server) == (200, 503)
        models.write_model(repository, "bad", models.identity())
        assert server.post("/v2/repository/models/bad/load")[0] == 200
        assert health(server) == (200, 200)


def test_a_model_that_is_half_up(repository: Path) -> None:
    """One of two versions failed at the first load: nothing served before, so this is no roll-out gone wrong."""
    models.write_model(repository, "m", models.identity(), config="version_policy { all { } }")
    models.write_model(repository, "m", b"garbage", version=2)
    with run_server(repository, *EVERYTHING, ready=False) as server:
        started(server)
        assert server.get("/v2/models/m/versions/1/ready")[0] == 200
        assert health(server) == (200, 503)
        models.write_model(repository, "m", models.identity(), version=2)
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert health(server) == (200, 200)
        models.write_model(repository, "m", b"garbage", version=3)
        assert server.post("/v2/repository/models/m/load")[0] == 400
        assert health(server) == (200, 200), "now it served before, and goes on"


def test_not_strict(repository: Path) -> None:
    models.write_model(repository, "good", models.identity())
    models.write_model(repository, "bad", b"garbage")
    with run_server(repository, *EVERYTHING, "--strict-readiness=false") as server:
        started(server)
        assert health(server) == (200, 200)
        assert server.get("/v2/models/bad/ready")[0] != 200


def test_loading_one_more_model_does_not_take_the_server_out_of_service(repository: Path) -> None:
    models.write_model(repository, "first", models.identity())
    with run_server(repository, *POLL) as server:
        models.write_model(repository, "second", models.identity())
        seen = set()

        def loaded() -> bool:
            seen.add(server.get("/v2/health/ready")[0])
            return is_serving(server, "second")

        wait_until(loaded, "the second model is served")
        assert seen == {200}


def test_a_load_of_a_name_that_is_nowhere_changes_nothing(repository: Path) -> None:
    models.write_model(repository, "m", models.identity())
    with run_server(repository, *EVERYTHING) as server:
        assert server.post("/v2/repository/models/nowhere/load")[0] == 500
        assert health(server) == (200, 200)
        assert {name for name, _ in server.index()} == {"m"}


def test_live_and_not_ready_while_the_first_models_load(repository: Path) -> None:
    warmup = (
        'max_batch_size: 1 model_warmup [{ name: "w" batch_size: 1 count: 1 inputs {'
        ' key: "IN" value { data_type: TYPE_FP32 dims: [4] zero_data: true } } }]'
    )
    models.write_model(repository, "slow", models.slow(1_500_000), config=warmup)
    with run_server(repository, *EVERYTHING, ready=False) as server:
        assert health(server) == (200, 503)
        assert server.index()["slow", "1"][0] == "LOADING"
        assert server.get("/v2/models/slow/ready")[0] != 200
        assert server.infer("slow", [[1.0, 2.0, 3.0, 4.0]])[0] == 503
        server.wait_ready()
        assert server.get("/v2/models/slow/ready")[0] == 200


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_an_empty_repository_is_ready(repository: Path, mode: str) -> None:
    with run_server(repository, f"--model-control-mode={mode}") as server:
        assert health(server) == (200, 200)
        assert server.index() == {}


def test_unless_a_model_is_required(repository: Path) -> None:
    with run_server(repository, *EXPLICIT, "--ready-requires-model", ready=False) as server:
        started(server)
        assert health(server) == (200, 503)
        models.write_model(repository, "m", models.identity())
        assert health(server) == (200, 503), "on disk is not enough"
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert health(server) == (200, 200)
        assert server.post("/v2/repository/models/m/unload")[0] == 200
        assert health(server) == (200, 503)


def test_a_required_model_that_polling_finds(repository: Path) -> None:
    with run_server(repository, *POLL, "--ready-requires-model=true", ready=False) as server:
        started(server)
        assert health(server) == (200, 503)
        models.write_model(repository, "m", models.identity())
        wait_until(lambda: server.get("/v2/health/ready")[0] == 200, "ready with its first model")
        assert health(server) == (200, 200)
