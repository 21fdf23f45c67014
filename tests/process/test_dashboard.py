"""The dashboard's addresses in a real server; the page itself is driven by tests/browser."""

from __future__ import annotations

import http.client
import json
import shutil
from pathlib import Path
from typing import Any

from tests import models
from tests.process.support import POLL, is_serving
from tests.running import DEADLINE_SECONDS, RunningServer, run_server, wait_until


class Events:
    """One open stream of server-sent events."""

    def __init__(self, server: RunningServer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=DEADLINE_SECONDS)
        self._connection.request("GET", "/dashboard/events")
        self._response = self._connection.getresponse()
        self.media_type = self._response.getheader("Content-Type", "")

    def next(self) -> tuple[str, Any]:
        """Name and document; ("", None) at the end of the stream."""
        name = ""
        while line := self._response.readline().decode().rstrip("\n"):
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                self._response.readline()  # the empty line behind an event
                return name, json.loads(value)
        return "", None

    def until(self, wanted: str) -> Any:
        """The first document that has this."""
        while True:
            name, told = self.next()
            assert name, f"the stream ended before it told of '{wanted}'"
            if wanted in told:
                return told[wanted]

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def test_off_means_that_nothing_is_there(repository: Path) -> None:
    with run_server(repository, "--dashboard=off") as server:
        for path in ("/", "/dashboard/app.js", "/dashboard/snapshot", "/dashboard/events"):
            assert server.get(path) == (404, {"error": "Not Found"})


def test_the_page_and_its_headers(repository: Path) -> None:
    with run_server(repository) as server:
        status, page, headers = server.call("GET", "/")
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b"<title>hone</title>" in page
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        status, again, _ = server.call("GET", "/", headers={"If-None-Match": headers["etag"]})
        assert (status, again) == (304, b"")
        for path in ("/dashboard/..%2fpage.py", "/dashboard/page.py", "/dashboard/%2e%2e/page.py"):
            assert server.call("GET", path)[0] == 404


def test_events_tell_what_comes_and_goes(repository: Path) -> None:
    with run_server(repository, *POLL) as server:
        events = Events(server)
        assert events.media_type.startswith("text/event-stream")
        assert events.next() == ("locked", {})
        assert events.next()[1]["models"] == {}
        models.write_model(repository, "one", models.identity())
        wait_until(lambda: is_serving(server, "one"), "it is loaded")
        while "stats" not in (told := events.until("models")["one"]):
            pass
        assert told["stats"]["1"]["num_successes"] == 0
        assert server.infer("one", [[1.0, 2.0, 3.0, 4.0]])[0] == 200
        told = events.until("models")["one"]["stats"]["1"]
        assert told["num_successes"] == 1
        assert told["window"]["request"]["onnxruntime"][0] == 1
        assert server.get("/dashboard/points/one")[1]["1"][-1]["request"]["onnxruntime"][0] == 1
        shutil.rmtree(repository / "one")
        assert events.until("gone") == ["one"]
        events.close()


def test_explaining_wants_a_batch_a_model_and_no_other_site(repository: Path) -> None:
    models.write_model(repository, "one", models.identity())
    with run_server(repository) as server:
        assert server.get("/dashboard/explain/one") == (200, None)
        status, told = server.get("/dashboard/explain/one?batch=0")
        assert (status, told["error"]) == (400, "batch: expected a number from 1 to 1048576, found '0'")
        assert server.get("/dashboard/explain/two")[0] == 404
        assert server.call("POST", "/dashboard/explain/one", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403


def test_an_open_stream_does_not_hold_up_the_end(repository: Path) -> None:
    with run_server(repository) as server:
        events = Events(server)
        events.until("models")
        assert server.stop() == 0
        while events.next()[0]:
            pass
        events.close()
        assert "did not end in time" not in server.log
