"""The commands that ask a running server, against a real one: what they print, into a pipe and as JSON, and what they
say when it does not go."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hone.cli.main import main
from tests import models
from tests.process.support import POLL, ROW
from tests.running import RunningServer, run_server, wait_until

SECRET = "correct-horse-battery"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    models.write_model(folder, "scale", models.scale(2.0))
    models.write_model(folder, "free", models.identity(dims=("batch", "length")))
    models.write_model(folder, "broken", b"nonsense")
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Statistics, tuning and the index are behind keys; tuning looks into an empty cache, and builds nothing."""
    keys = f"tuning,statistics:admin-key={SECRET}"
    cache = tmp_path_factory.mktemp("cache")
    flags = (*POLL, "--strict-readiness=false", "--tuning=cache", f"--kernels-cache={cache}")
    with run_server(repository, *flags, environment={"HONE_HTTP_RESTRICTED_API": keys}) as running:
        wait_until(lambda: ("scale", "1") in running.index(), "the models are loaded")
        yield running


@pytest.fixture
def call(server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """A command with the server's key: exit code, output, errors."""
    monkeypatch.setenv("HONE_URL", f"127.0.0.1:{server.http_port}")
    monkeypatch.setenv("HONE_KEY", f"admin-key={SECRET}")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


def test_status(call: Call) -> None:
    code, out, _ = call("status")
    assert code == 0
    lines = {line.split()[0]: line.split() for line in out.splitlines()[1:]}
    assert list(lines) == ["model", "broken", "free", "scale"]
    assert lines["scale"][1:4] == ["1", "READY", "onnxruntime"]
    assert "UNAVAILABLE" in lines["broken"]
    assert "\x1b" not in out
    code, out, _ = call("status", "--json")
    assert code == 0
    told = json.loads(out)
    assert {one["name"]: one["state"] for one in told["models"]} == {
        "broken": "UNAVAILABLE", "free": "READY", "scale": "READY",
    }  # fmt: skip


def test_status_of_one_model(call: Call) -> None:
    code, out, _ = call("status", "scale", "--wait")
    assert code == 0
    assert out.startswith("scale version 1 is baseline\n")
    assert "it is not in the cache" in out
    code, out, _ = call("status", "broken")
    assert code == 1, "scripts see that it is not ready"
    assert "UNAVAILABLE" in out


def test_waiting_for_what_does_not_come(call: Call) -> None:
    code, out, err = call("status", "broken", "--wait", "0.01")
    assert (code, out) == (1, "")
    assert "'broken' has not settled within 0.01 s: UNAVAILABLE" in err
    assert "does not know it" in call("status", "absent", "--wait", "0.01")[2]
    assert "expected a model to wait for" in call("status", "--wait")[2]


def test_top_counts_what_happens_while_it_looks(call: Call, server: RunningServer) -> None:
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            server.infer("scale", ROW)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        code, out, _ = call("top", "--json", "--count=2", "--interval=0.5")
    finally:
        ended.set()
        asking.join()
    assert code == 0
    looks = [json.loads(line) for line in out.splitlines()]
    assert len(looks) == 2
    for look in looks:
        busiest, other = look["models"]
        assert (busiest["name"], other["name"]) == ("scale", "free")
        assert busiest["requests_per_second"] > 0
        assert busiest["request_us"] >= busiest["compute_us"] > 0
        assert busiest["engine"] == "onnxruntime"
        assert (other["requests_per_second"], other["request_us"]) == (0.0, None)


def test_top_into_a_pipe_prints_one_table(call: Call) -> None:
    code, out, _ = call("top", "--interval=0.05", "--sort=name")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["model", "free", "scale"]
    assert "\x1b" not in out
    for wrong in ("--interval=0", "--count=-1"):
        assert "expected" in call("top", wrong)[2]


def test_bench(call: Call) -> None:
    code, out, _ = call("bench", "scale", "--duration=0.1", "--clients=2", "--rate=50")
    assert code == 0
    assert "IN:FP32[1,4] does not run tuned (it is not in the cache, and tuning is 'cache')" in out
    assert "closed loop, 2 clients" in out
    assert "open loop, 50 requests/s" in out
    code, out, _ = call("bench", "free", "--duration=0.1", "--shape=IN:3", "--batch=2", "--json")
    assert code == 0
    assert json.loads(out)["signature"] == "IN:FP32[2,3]"
    code, _, err = call("bench", "free", "--duration=0.1")
    assert code == 1
    assert "leaves sizes open (?): give them with --shape IN:?" in err
    code, _, err = call("bench", "scale", "--batch=999")
    assert code == 1
    assert "batch-size must be <=" in err


def test_steering(call: Call, server: RunningServer) -> None:
    code, out, _ = call("tune", "scale", "--action=pin_baseline", "--json")
    assert code == 0
    [told] = json.loads(out)
    assert (told["state"], told["reason"]) == ("baseline", "pinned to the baseline")
    code, out, _ = call("tune", "scale", "--action=start")
    assert code == 0
    assert out.startswith("scale version 1 is baseline\n")


@pytest.mark.parametrize(
    "command",
    [("status", "absent"), ("bench", "absent"), ("tune", "absent", "--action=start")],
    ids=lambda command: command[0],
)
def test_a_model_that_is_not_there(call: Call, command: tuple[str, ...]) -> None:
    code, out, err = call(*command)
    assert (code, out) == (1, "")
    assert err.startswith(f"hone {command[0]}: ")
    assert "absent" in err


def test_a_model_that_is_not_there_is_told_with_those_that_are(call: Call) -> None:
    assert "knows no model 'absent', it has broken, free, scale" in call("status", "absent")[2]


@pytest.mark.parametrize("key", ["", "wrong"])
def test_without_the_right_key(call: Call, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.delenv("HONE_KEY")
    flags = ("--key", f"admin-key={key}") if key else ()
    reason = "the key given for admin-key does not open it" if key else "no key was given"
    for command in (("top", "--count=1"), ("tune", "scale", "--action=start")):
        code, out, err = call(*command, *flags)
        assert (code, out) == (1, "")
        assert "403" in err
        assert reason in err
        assert SECRET not in err
    code, out, _ = call("status", "--json", *flags)
    assert code == 0, "what is open is told"
    assert all(one["tuning"] is None for one in json.loads(out)["models"])
    code, out, _ = call("bench", "scale", "--duration=0.05", *flags)
    assert code == 0
    assert "the engine can be chosen with the key of 'tuning' only" in out


def test_ctrl_c_ends_top_without_a_word(server: RunningServer) -> None:
    flags = ("--json", "--interval=0.05", "--count=1000000", f"--key=admin-key={SECRET}")
    command = [sys.executable, "-m", "hone", "top", f"--url=127.0.0.1:{server.http_port}", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
