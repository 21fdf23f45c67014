"""A server that is killed leaves nothing that the next one trips over."""

from __future__ import annotations

import base64
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests import models
from tests.process.support import EVERYTHING, answers
from tests.running import run_server


def test_the_ports_are_free(repository: Path) -> None:
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        client = socket.create_connection(("127.0.0.1", server.http_port))
        assert answers(server, "m", 2.0)
        assert server.stop(signal.SIGKILL) == -signal.SIGKILL
        ports = [f"--http-port={server.http_port}", f"--grpc-port={server.grpc_port}"]
        ports.append(f"--metrics-port={server.metrics_port}")
        with run_server(repository, *EVERYTHING, *ports) as second:
            assert second.http_port == server.http_port
            assert answers(second, "m", 2.0)
        client.close()


def test_files_that_came_with_a_load_are_gone_after_the_next_start(repository: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    flags = (*EVERYTHING, "--allow-file-override=true")
    content = base64.b64encode(models.scale(3.0)).decode()
    environment = {"TMPDIR": str(temporary)}
    load = {"parameters": {"config": "{}", "file:1/model.onnx": content}}
    with run_server(repository, *flags, environment=environment) as living:
        assert living.post("/v2/repository/models/kept/load", load)[0] == 200
        with run_server(repository, *flags, environment=environment) as server:
            assert server.post("/v2/repository/models/m/load", load)[0] == 200
            server.stop(signal.SIGKILL)
        assert len(list(temporary.iterdir())) == 2
        with run_server(repository, *flags, environment=environment):
            assert len(list(temporary.iterdir())) == 1, "what the killed server left is removed"
            assert living.post("/v2/repository/models/kept/load", load)[0] == 200, "what a living one uses is not"
            assert answers(living, "kept", 3.0)
    assert list(temporary.iterdir()) == []


def test_no_process_is_left(repository: Path) -> None:
    """The server is one process; should it ever have children, they must not outlive it."""
    models.write_model(repository, "m", models.scale(2.0))
    with run_server(repository, *EVERYTHING) as server:
        answers(server, "m", 2.0)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text(encoding="ascii")
        server.stop(signal.SIGKILL)
        left = [pid for pid in children.split() if Path(f"/proc/{pid}").exists()]
        assert left == []


def test_hone_starts_without_a_home_or_a_terminal(repository: Path) -> None:
    """As under an orchestrator: no HOME, no TERM, nothing on standard input."""
    command = [sys.executable, "-m", "hone", "serve", "--model-repository", str(repository), "--exit-timeout-secs=1"]
    command += ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={}, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("ready in" in line for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                process.kill()
