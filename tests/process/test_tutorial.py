"""docs/tutorial.md says nothing that does not work: its commands are run, in their order, against a server started by
its own command."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
SERVER_TITLE = 'title="first terminal"'


def blocks() -> list[tuple[str, str]]:
    """(what follows the fence's language, commands) of every shell block, in order."""
    return [
        (info.strip(), text) for info, text in re.findall(r"^```sh([^\n]*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    ]


def free_ports(number: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the commands name of a checkout, and nothing that they could damage. The model takes batches of one only, so
    there is one specialization to make and not four."""
    shutil.copytree(ROOT / "model_repo" / "digits", tmp_path / "model_repo" / "digits")
    config = tmp_path / "model_repo" / "digits" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 1"))
    for name in ("Makefile", "examples", "requirements", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def test_the_page_has_the_blocks_that_are_run() -> None:
    assert [info for info, _ in blocks()].count(SERVER_TITLE) == 1
    assert len(blocks()) >= 8
    assert {info for info, _ in blocks()} == {"", SERVER_TITLE}


@pytest.mark.timeout(400)
def test_every_command_works(checkout: Path) -> None:
    http, grpc, metrics = free_ports(3)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HONE_")}
    environment |= {
        "HONE_HTTP_PORT": str(http),
        "HONE_GRPC_PORT": str(grpc),
        "HONE_METRICS_PORT": str(metrics),
        "HONE_URL": f"127.0.0.1:{http}",
        "HONE_TUNING_BUDGET_SECS": "60",
        "HONE_TUNING_CPU_SHARE": "1",
    }
    server: subprocess.Popen[bytes] | None = None
    log = checkout / "server.log"
    told: dict[str, str] = {}
    try:
        for info, text in blocks():
            if info == SERVER_TITLE:
                with log.open("wb") as output:
                    server = subprocess.Popen(
                        text.split(), cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT
                    )
                wait_until(lambda: "ready in" in log.read_text(), "the server is ready")
                continue
            # Setting up is the test of others, and would change the environment that runs this one.
            script = text.replace("make setup", "make --dry-run setup >/dev/null")
            script = script.replace("--duration 1", "--duration 0.2")
            script = script.replace("127.0.0.1:8000", f"127.0.0.1:{http}")
            script = script.replace("digits_latency.py", f"digits_latency.py --url 127.0.0.1:{http}")
            ran = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=checkout, env=environment, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}\n{log.read_text()}"
            told[text] = ran.stdout
    finally:
        if server is not None:
            server.terminate()
            assert server.wait(60) == 0
    output = "\n".join(told.values())
    assert re.search(r"^ +seven +[01]\.\d+$", output, re.M)
    assert "unknown field; did you mean 'dims'?" in output
    assert "there are errors" in output
    assert (checkout / "tutorial" / "digits.csv").read_text().startswith("model,signature,load,")
    assert (checkout / "tutorial" / "latency.svg").read_text().startswith("<svg")
    [answer] = [line for line in output.splitlines() if line.startswith('{"name":"digits"')]
    assert json.loads(answer)["inputs"][0]["name"] == "image"
