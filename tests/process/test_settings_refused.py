"""A setting that cannot be used: exit code 2, one line that names it, where it came from and what was meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def serve(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hone", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


@pytest.mark.parametrize(
    ("flags", "environment", "told"),
    [
        (("--http-prot=1",), {}, ("--http-prot",)),
        (("--http-port=eight",), {}, ("--http-port", "eight")),
        (("--http-port=70000",), {}, ("--http-port", "70000", "65535")),
        (("--strict-readiness=perhaps",), {}, ("--strict-readiness", "perhaps")),
        (("--model-control-mode=sometimes",), {}, ("--model-control-mode", "poll")),
        (("--http-header-forward-pattern=(",), {}, ("--http-header-forward-pattern", "regular expression")),
        (("--grpc-use-ssl",), {}, ("grpc_server_cert",)),
        (("--allow-http=false", "--allow-grpc=false"), {}, ("nothing to serve",)),
        (("--http-port",), {}, ("--http-port", "expected one argument")),
        (("models",), {}, ("models",)),
        ((), {"HONE_HTTP_PROT": "1"}, ("HONE_HTTP_PROT", "did you mean 'HONE_HTTP_PORT'?")),
        ((), {"HONE_HTTP_PORT": "eight"}, ("HONE_HTTP_PORT", "eight")),
        ((), {"HONE_CONFIG": "/no/such/file.toml"}, ("/no/such/file.toml",)),
    ],
)
def test_refused(flags: tuple[str, ...], environment: dict[str, str], told: tuple[str, ...]) -> None:
    refused = serve(*flags, **environment)
    assert refused.returncode == 2, refused.stderr
    for text in told:
        assert text in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""


def test_an_unknown_flag_comes_with_the_nearest(tmp_path: Path) -> None:
    refused = serve("--http-prot=1")
    assert refused.returncode == 2
    assert "did you mean '--http-port'?" in refused.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("http_prot = 1", ("unknown setting 'http_prot'", "did you mean 'http_port'?")),
        ("http_port = ", ("hone.toml",)),
        ('http_port = "eight"', ("http_port", "hone.toml", "eight")),
        ("[http]\nport = 1", ("http", "hone.toml")),
        ("model_repository = 1", ("model_repository", "hone.toml")),
        ("http_port = 1\nhttp_port = 2", ("hone.toml",)),
        ("\x00", ("hone.toml",)),
    ],
)
def test_refused_in_a_file(tmp_path: Path, content: str, told: tuple[str, ...]) -> None:
    file = tmp_path / "hone.toml"
    file.write_text(content, encoding="utf-8")
    refused = serve("--config", str(file))
    assert refused.returncode == 2, refused.stderr
    for text in told:
        assert text in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_repository_that_is_no_folder(tmp_path: Path) -> None:
    refused = serve("--model-repository", str(tmp_path / "absent"), "--http-port=0", "--grpc-port=0")
    assert refused.returncode in (1, 2)
    assert f"'{tmp_path / 'absent'}' is not a folder" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_certificates_that_do_not_belong_together(tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    certificate.write_text("no certificate", encoding="utf-8")
    key.write_text("no key", encoding="utf-8")
    flags = ("--grpc-use-ssl", f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}")
    ports = ("--http-port=0", "--grpc-port=0", "--metrics-port=0", "--model-repository", str(tmp_path))
    refused = serve(*flags, *ports)
    assert refused.returncode in (1, 2), refused.stderr
    assert "grpc_server_cert" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_settings_from_all_places(tmp_path: Path) -> None:
    """Flags win over variables, variables over the file: seen by which value is the bad one."""
    (tmp_path / "hone.toml").write_text('http_port = "from the file"', encoding="utf-8")
    config = ("--config", str(tmp_path / "hone.toml"))
    assert "from the file" in serve(*config).stderr
    assert "from a variable" in serve(*config, HONE_HTTP_PORT="from a variable").stderr
    assert "from a flag" in serve(*config, "--http-port=from a flag", HONE_HTTP_PORT="from a variable").stderr


def test_help() -> None:
    shown = serve("--help", COLUMNS="80")
    assert shown.returncode == 0
    assert shown.stderr == ""
    assert all(len(line) <= 80 for line in shown.stdout.splitlines()), "fits a terminal of 80 columns"
    for flag in ("--model-repository", "--strict-readiness", "--tuning", "--config"):
        assert flag in shown.stdout


def test_version() -> None:
    command = [sys.executable, "-m", "hone", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (shown.returncode, shown.stdout) == (0, "hone 0.1.0\n")
