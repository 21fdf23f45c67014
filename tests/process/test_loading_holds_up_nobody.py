"""A model that takes long to load, or never comes up at all, keeps nothing else waiting."""

from __future__ import annotations

import contextlib
import http.client
import threading
from pathlib import Path

from tests import models
from tests.process.support import EVERYTHING, EXPLICIT, POLL, answers, is_known
from tests.running import RunningServer, run_server, wait_until

WARMUP = (
    'max_batch_size: 1 model_warmup [{ name: "w" batch_size: 1 count: 1 inputs {'
    ' key: "IN" value { data_type: TYPE_FP32 dims: [4] zero_data: true } } }]'
)
#: Far longer than any test may take.
ENDLESS = 2_000_000_000
AT_ONCE = "--exit-timeout-secs=0.2"


def is_loading(server: RunningServer, model: str) -> bool:
    return server.index().get((model, "1"), ("", ""))[0] == "LOADING"


def test_polling_goes_on(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *POLL, AT_ONCE) as server:
        models.write_model(repository, "endless", models.slow(ENDLESS), config=WARMUP)
        wait_until(lambda: is_loading(server, "endless"), "it loads")
        models.write_model(repository, "m", models.scale(3.0))
        models.write_model(repository, "new", models.scale(4.0))
        wait_until(lambda: answers(server, "m", 3.0), "a changed model is taken", seconds=20)
        wait_until(lambda: answers(server, "new", 4.0), "a new model is taken", seconds=20)
        assert is_loading(server, "endless")
        assert server.stop(seconds=20) == 0, server.log


def test_other_models_load_and_answer(repository: Path) -> None:
    models.write_model(repository, "endless", models.slow(ENDLESS), config=WARMUP)
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EXPLICIT, AT_ONCE) as server:
        loading = threading.Thread(target=try_to_load, args=(server, "endless"))
        loading.start()
        wait_until(lambda: is_loading(server, "endless"), "it loads")
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert answers(server, "m", 2.0)
        models.write_model(repository, "m", models.scale(3.0))
        assert server.post("/v2/repository/models/m/load")[0] == 200
        assert answers(server, "m", 3.0)
        assert server.get("/v2/health/ready")[0] == 200
        assert server.infer("endless", [[1.0, 2.0, 3.0, 4.0]])[0] == 503
        assert server.stop(seconds=20) == 0, server.log
        loading.join(30)


def test_at_the_start(repository: Path) -> None:
    models.write_model(repository, "endless", models.slow(ENDLESS), config=WARMUP)
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING, AT_ONCE, ready=False) as server:
        wait_until(lambda: answers(server, "m", 2.0), "the other model answers already")
        assert is_known(server, "endless")
        assert server.get("/v2/health/live")[0] == 200
        assert server.get("/v2/health/ready")[0] == 503
        assert server.get("/v2/models/m/ready")[0] == 200
        assert server.stop(seconds=20) == 0, server.log
        assert "Traceback" not in server.log


def try_to_load(server: RunningServer, model: str) -> None:
    """Ask for a load that the end of the server cuts off."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        server.post(f"/v2/repository/models/{model}/load")
