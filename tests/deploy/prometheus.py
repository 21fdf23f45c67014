"""Debian's own Prometheus, run against this checkout's configuration."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.running import DEADLINE_SECONDS, wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules"


def tool(name: str) -> str:
    """Path of `prometheus` or `promtool`."""
    found = shutil.which(name)
    assert found, f"{name} is not installed: `make test-deps` installs Debian's package prometheus"
    return found


class Prometheus:
    """What a test asks of a running Prometheus."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its HTTP API."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """The instant value of every series; numbers that are none (0/0) included."""
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def has_scraped(self) -> bool:
        targets = self.get("targets", state="active")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)


@contextlib.contextmanager
def run_prometheus(folder: Path, metrics_port: int) -> Iterator[Prometheus]:
    """deploy/prometheus/prometheus.yml with the target's address and a shorter interval, its rules as they are."""
    configuration = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert configuration["rule_files"] == ["rules/*.yml"]
    configuration["rule_files"] = [str(RULES / "*.yml")]
    configuration["global"] |= {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"}
    configuration["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{metrics_port}"]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [tool("prometheus"), f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    log = folder / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    prometheus = Prometheus(port)
    try:
        wait_until(lambda: process.poll() is not None or prometheus.is_ready(), "Prometheus is ready")
        assert process.poll() is None, log.read_text(errors="replace")
        yield prometheus
    finally:
        process.terminate()
        process.wait(DEADLINE_SECONDS)
