"""After a thousand reloads a request meets what it met after the first: nothing accumulates on its way."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests import models
from tests.process.support import EVERYTHING, connect, floats, infer_request, read_answer
from tests.running import RunningServer, run_server

ROOT = Path(__file__).parents[2]
NUM_RELOADS = 1000
NUM_REQUESTS = 400


def request_cost(server: RunningServer, connection: socket.socket) -> float:
    """CPU seconds of the server for one request, on average."""
    message = infer_request("m", floats(1, 2, 3, 4), [1, 4])
    started = server.cpu_seconds()
    for _ in range(NUM_REQUESTS):
        connection.sendall(message)
        assert read_answer(connection).status == 200
    return (server.cpu_seconds() - started) / NUM_REQUESTS


def reload(server: RunningServer, repository: Path, connection: socket.socket, number: int) -> None:
    models.write_model(repository, "m", models.scale(float(number)))
    connection.sendall(b"POST /v2/repository/models/m/load HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n")
    assert read_answer(connection).status == 200


def test_through_the_server(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server, connect(server) as connection:
        for number in range(20):
            reload(server, repository, connection, number)
        request_cost(server, connection)
        before = request_cost(server, connection)
        num_samples, num_lines = len(server.metrics().splitlines()), len(server.index())
        for number in range(NUM_RELOADS):
            reload(server, repository, connection, number)
        request_cost(server, connection)
        after = request_cost(server, connection)
        print(f"CPU a request: {before * 1e6:.0f} us before, {after * 1e6:.0f} us after {NUM_RELOADS} reloads")
        assert len(server.metrics().splitlines()) == num_samples
        assert len(server.index()) == num_lines
        assert len(server.get("/v2/models/m/stats")[1]["model_stats"]) == 1


COUNT_OBJECTS = """
import contextlib, gc, http.client, io, os, re, signal, sys, threading, time
from pathlib import Path
from hone.cli.main import main
from tests import models

repository, shown = Path(sys.argv[1]), io.StringIO()

def drive():
    while "ready in" not in shown.getvalue():
        time.sleep(0.01)
    port = int(re.search(r"HTTP +http://127.0.0.1:([0-9]+)", shown.getvalue())[1])
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for times in (50, 50, 600):
        for number in range(times):
            models.write_model(repository, "m", models.scale(float(number)))
            connection.request("POST", "/v2/repository/models/m/load")
            response = connection.getresponse()
            response.read()
            assert response.status == 200
        counts = []
        for _ in range(20):  # what is under way in other threads comes and goes
            time.sleep(0.05)
            gc.collect()
            counts.append(len(gc.get_objects()))
        print(min(counts), file=sys.stderr)
    connection.close()
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=drive).start()
with contextlib.redirect_stdout(shown):
    flags = ["--model-control-mode=explicit", "--load-model=*", "--log-info=false"]
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    code = main(["serve", "--model-repository", str(repository), *flags, *ports])
sys.exit(code)
"""


def test_no_object_is_left_behind(repository: Path) -> None:
    """The same with the garbage collector of the server's process to ask."""
    models.write_model(repository, "m", models.scale(2.0))
    command = [sys.executable, "-c", COUNT_OBJECTS, str(repository)]
    counted = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT)
    assert counted.returncode == 0, counted.stderr
    _, before, after = (int(line) for line in counted.stderr.split())
    assert after - before < 300, "fewer than one object for two reloads"
