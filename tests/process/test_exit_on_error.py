"""With --exit-on-error a server whose first models do not load ends, and says which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import models


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to end by itself."""
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    command = [sys.executable, "-m", "hone", "serve", *ports, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("mode", [(), ("--model-control-mode=poll",)])
def test_a_bad_model_ends_the_server(repository: Path, mode: tuple[str, ...]) -> None:
    models.write_model(repository, "good", models.identity())
    models.write_model(repository, "bad", b"garbage")
    ended = serve("--model-repository", str(repository), "--exit-on-error", *mode)
    assert ended.returncode == 1, ended.stderr
    assert "these models failed to load: bad" in ended.stderr
    assert "model bad: load failed for model 'bad'" in ended.stderr, "the reason too"
    assert "Traceback" not in ended.stderr


def test_a_name_that_is_nowhere_ends_the_server(repository: Path) -> None:
    flags = ("--model-control-mode=explicit", "--load-model=absent", "--exit-on-error=true")
    ended = serve("--model-repository", str(repository), *flags)
    assert ended.returncode == 1, ended.stderr
    assert "absent" in ended.stderr


def test_a_repository_that_is_no_folder(tmp_path: Path) -> None:
    ended = serve("--model-repository", str(tmp_path / "absent"))
    assert ended.returncode in (1, 2)
    assert f"'{tmp_path / 'absent'}' is not a folder" in ended.stderr
    assert "Traceback" not in ended.stderr
