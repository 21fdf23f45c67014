"""What the commands need of a running server: JSON over one HTTP connection a call, with keys of restricted APIs."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from hone.cli.settings import CLIENT_VARIABLES
from hone.errors import HoneError, InvalidRequest, NotFound, Restricted, Unavailable

DEFAULT_URL = "127.0.0.1:8000"
#: Stand in for `--url` and `--key`, one key only. A flag can be read by everybody on the machine, a variable cannot.
URL_VARIABLE, KEY_VARIABLE = CLIENT_VARIABLES
DEFAULT_PORT = 8000
TIMEOUT_SECONDS = 60.0
_EXPECTED_URL = "expected host:port, such as 127.0.0.1:8000 or [::1]:8000"
_EXPECTED_KEY = "expected HEADER=VALUE, or HEADER=@FILE for a value out of a file"
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """`--url` and `--key`; `server_of` reads them."""
    parser.add_argument(
        "--url", default=None, help=f"host:port of the server's HTTP (default: ${URL_VARIABLE}, else {DEFAULT_URL})"
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="HEADER=VALUE",
        help="key of a restricted API; HEADER=@FILE reads the value from a file; may be repeated"
        f" (default: ${KEY_VARIABLE})",
    )


def server_of(arguments: argparse.Namespace) -> Server:
    """Raises InvalidRequest for an address or a key that cannot be one."""
    url = os.environ.get(URL_VARIABLE, DEFAULT_URL) if arguments.url is None else arguments.url
    host, port = parse_url(url)
    keys = arguments.key or ([os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else [])
    return Server(host, port, dict(parse_key(text) for text in keys))


def parse_url(url: str) -> tuple[str, int]:
    """`host:port`, with or without `http://` in front. Raises InvalidRequest."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port = parts.hostname, parts.port
    except ValueError as problem:
        raise InvalidRequest(f"--url {url}: {problem}; {_EXPECTED_URL}") from problem
    if parts.scheme not in ("", "http"):
        raise InvalidRequest(f"--url {url}: {parts.scheme} is not spoken here; {_EXPECTED_URL}")
    if not host or not re.fullmatch(r"[\w.:-]+", host, re.ASCII) or parts.path.strip("/") or parts.query:
        raise InvalidRequest(f"--url {url}: {_EXPECTED_URL}")
    return host, DEFAULT_PORT if port is None else port


def parse_key(text: str) -> tuple[str, str]:
    """Header and value. Raises InvalidRequest, which never tells the value, and OSError for a file."""
    header, equals, value = text.partition("=")
    if not equals or not _HEADER.fullmatch(header) or not value:
        raise InvalidRequest(f"--key: {_EXPECTED_KEY}")
    if value.startswith("@"):
        value = Path(value[1:]).read_text(encoding="utf-8").strip()
    if not value or not value.isprintable() or not value.isascii():
        raise InvalidRequest(f"--key {header}: expected a value of printable ASCII characters")
    return header, value


def model_path(model: str, version: str = "") -> str:
    """Address of a model or of one version of it."""
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


@dataclass(frozen=True, slots=True)
class Server:
    """One server's HTTP port. Every call takes a connection of its own, so that a restarted server is found again."""

    host: str
    port: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def place(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The answer's document. Raises Unavailable where nobody answers, NotFound, Restricted, or HoneError with the
        server's own words."""
        status, text = self._exchange(method, path, None if body is None else json.dumps(body).encode())
        try:
            answer = json.loads(text)
        except ValueError as problem:
            raise HoneError(
                f"{self.place} answered {status} with something that is not JSON: expected hone's HTTP port"
                " (--http-port), found another server or another port of it"
            ) from problem
        if status != 200:
            raise _refusal(status, answer, self.headers)
        return answer

    def _exchange(self, method: str, path: str, payload: bytes | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_SECONDS)
        headers = {**self.headers, **({"Content-Type": "application/json"} if payload else {})}
        try:
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as problem:
            raise self.unreachable(problem) from problem
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        """A connection for a client of its own. Raises Unavailable."""
        try:
            connection = socket.create_connection((self.host, self.port), timeout=TIMEOUT_SECONDS)
        except OSError as problem:
            raise self.unreachable(problem) from problem
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def unreachable(self, problem: Exception) -> Unavailable:
        what = str(problem) or type(problem).__name__
        return Unavailable(
            f"no server at {self.place}: {what}; start one with 'hone serve', or name another with --url"
        )

    # --- what several commands ask

    def index(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = self.call("POST", "/v2/repository/index", {})
        return lines

    def statistics(self, model: str = "") -> list[dict[str, Any]]:
        path = f"{model_path(model)}/stats" if model else "/v2/models/stats"
        found: list[dict[str, Any]] = self.call("GET", path)["model_stats"]
        return found

    def tuning(self, model: str, version: str = "") -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"{model_path(model, version)}/tuning")
        return found

    def act(self, model: str, version: str, action: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("POST", f"{model_path(model, version)}/tuning", {"action": action})
        return found


def _refusal(status: int, answer: Any, keys: Mapping[str, str]) -> HoneError:
    told = str(answer.get("error", answer)) if isinstance(answer, dict) else str(answer)
    message = f"the server answered {status}: {told}"
    if status == 403:
        given = f"the key given for {', '.join(keys)} does not open it" if keys else "no key was given"
        return Restricted(f"{message}; {given} (--key HEADER=VALUE)")
    if status == 404:
        return NotFound(message)
    return HoneError(message)


def known_models(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names in the repository's index, each once."""
    return list(dict.fromkeys(str(line["name"]) for line in lines))
