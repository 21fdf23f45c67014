"""Addresses and keys of a server, and what is told when it cannot be asked."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.cli.client import add_server_arguments, parse_key, parse_url, server_of
from hone.cli.main import main
from hone.cli.settings import read_settings
from hone.errors import InvalidRequest


def server(*flags: str):
    parser = argparse.ArgumentParser()
    add_server_arguments(parser)
    return server_of(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:9000", ("127.0.0.1", 9000)),
        ("localhost", ("localhost", 8000)),
        ("http://gpu-7:80/", ("gpu-7", 80)),
        ("[::1]:8000", ("::1", 8000)),
    ],
)
def test_addresses(url: str, expected: tuple[str, int]) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize("url", ["", "https://h:1", "h:x", "h:99999", "h/path", "h?q", "a b:1"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidRequest, match="expected host:port"):
        parse_url(url)


def test_keys_come_from_flags_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("from-file\n")
    assert parse_key("admin-key=a=b") == ("admin-key", "a=b")
    assert parse_key(f"admin-key=@{tmp_path / 'key'}") == ("admin-key", "from-file")
    monkeypatch.setenv("HONE_URL", "h:1")
    monkeypatch.setenv("HONE_KEY", "k=v")
    asked = server()
    assert (asked.place, asked.headers) == ("h:1", {"k": "v"})
    asked = server("--url", "[::1]:2", "--key", "x=y", "--key", "z=w")
    assert (asked.place, asked.headers) == ("[::1]:2", {"x": "y", "z": "w"})


@pytest.mark.parametrize("text", ["", "secret", "=v", "k=", "a b=secret", "k=sec\nret", "k=gehéim"])
def test_what_is_no_key_is_refused_without_telling_it(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected") as refused:
        parse_key(text)
    for secret in ("secret", "ret", "gehéim"):
        assert secret not in str(refused.value)


def test_a_key_is_not_in_what_is_printed() -> None:
    assert "secret" not in repr(server("--key", "k=secret"))


def test_the_variables_of_clients_are_no_settings_of_a_server() -> None:
    assert read_settings(argparse.Namespace(), {"HONE_URL": "h:1", "HONE_KEY": "k=v"}).http_port == 8000


COMMANDS = (["status"], ["status", "m"], ["top", "--count=1"], ["bench", "m"], ["tune", "m", "--action=start"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nobody_answers(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main([*command, "--url", f"127.0.0.1:{port}"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"hone {command[0]}: no server at 127.0.0.1:{port}: " in told.err
    assert "start one with 'hone serve', or name another with --url" in told.err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "something that is not JSON"),
        (b"SSH-2.0-OpenSSH\r\n", "no server at"),
        (b'HTTP/1.1 403 Forbidden\r\nContent-Length: 13\r\n\r\n{"error":"k"}', "403: k; no key was given (--key"),
    ],
)
def test_something_else_answers(
    command: list[str],
    answer: bytes,
    reason: str,
    answering: Callable[[bytes], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*command, "--url", f"127.0.0.1:{answering(answer)}"]) == 1
    assert reason in capsys.readouterr().err
