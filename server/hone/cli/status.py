"""`hone status [MODEL]`: what a running server serves, on which engine, and how tuning stands."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hone.cli.client import Server, add_server_arguments, known_models, server_of
from hone.errors import InvalidRequest, NotFound, Restricted, Unavailable

#: States of tuning in which something is still to come.
UNSETTLED = ("queued", "tuning")
_SHOWN_EVENTS = 10
_LOOK_SECONDS = 0.25


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "status",
        help="tell what a running server serves, and how tuning stands",
        description="Tell what a running server serves, on which engine, and how tuning stands. With a model, exit"
        " code 1 says that it is not ready.",
    )
    parser.add_argument("model", nargs="?", default="", help="one model, with its batch sizes and history")
    parser.add_argument(
        "--wait",
        nargs="?",
        type=float,
        const=3600.0,
        metavar="SECS",
        help="wait until the model is ready and its tuning is over, at most so long (default: an hour)",
    )
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.wait is not None and not arguments.model:
        raise InvalidRequest("--wait: expected a model to wait for, as in 'hone status MODEL --wait'")
    server = server_of(arguments)
    if arguments.wait is not None:
        with _waiting(arguments.model) as tell:
            wait_until_settled(server, arguments.model, arguments.wait, tell)
    told = read_server(server, arguments.model)
    if arguments.json:
        print(json.dumps(told))
    elif arguments.model:
        for line in told["models"]:
            _print_model(line)
    else:
        _print_server(told)
    ready = all(line["state"] == "READY" for line in told["models"])
    return 0 if ready or not arguments.model else 1


def read_server(server: Server, model: str = "") -> dict[str, Any]:
    """The server and its models, each a line of the repository's index with its `tuning` (None where the server tells
    none). Raises HoneError; NotFound names the models that there are."""
    lines = server.index()
    if model:
        names = known_models(lines)
        lines = [line for line in lines if line["name"] == model]
        if not lines:
            raise NotFound(f"{server.place} knows no model '{model}', it has {', '.join(names) or 'none'}")
    models = [
        {
            "name": line["name"],
            "version": line.get("version", ""),
            "state": line.get("state", ""),
            "reason": line.get("reason", ""),
            "tuning": read_tuning(server, line) if line.get("state") == "READY" else None,
        }
        for line in lines
    ]
    return {"server": server.call("GET", "/v2"), "url": server.place, "models": models}


def wait_until_settled(
    server: Server, model: str, seconds: float, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Until some version of the model is ready and none of those waits for tuning or is tuned. Also for a model that
    the server does not know yet. Raises Unavailable after `seconds`."""
    until = time.monotonic() + seconds
    while True:
        lines = [line for line in server.index() if line["name"] == model]
        ready = [line for line in lines if line.get("state") == "READY"]
        tunings = [read_tuning(server, line) for line in ready]
        states = [tuning["state"] if tuning else "" for tuning in tunings]
        if ready and not any(state in UNSETTLED for state in states):
            return
        if time.monotonic() > until:
            found = ", ".join([line.get("state", "UNKNOWN") + f" {line.get('reason', '')}".rstrip() for line in lines])
            raise Unavailable(
                f"'{model}' has not settled within {seconds:g} s: "
                + (f"tuning is '{', '.join(states)}'" if states else found or "the server does not know it")
            )
        tell(next((f"{tuning_of(one)}: {one['reason']}" for one in tunings if one), "not ready yet"))
        time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def _waiting(model: str) -> Iterator[Callable[[str], None]]:
    """Keeps a line on the terminal about what is waited for; anywhere else nothing is said."""
    from hone.cli.terminal import is_terminal, open_console

    if not is_terminal(sys.stderr):
        yield lambda text: None
        return
    from rich.text import Text

    with open_console(sys.stderr).status(Text(f"{model}: waiting")) as line:
        yield lambda text: line.update(Text(f"{model}: {text}"))


def read_tuning(server: Server, line: Mapping[str, Any]) -> dict[str, Any] | None:
    """None where it is behind a key that was not given, or the model has gone since."""
    try:
        return server.tuning(line["name"], line.get("version", ""))
    except (Restricted, NotFound):
        return None


def engine_of(tuning: Mapping[str, Any] | None) -> str:
    """`tvm 3/5`: signatures that run tuned, of those that were tried."""
    if tuning is None:
        return "-"
    buckets = tuning["buckets"]
    num_tuned = sum(bucket["engine"] == "tvm" for bucket in buckets)
    return f"tvm {num_tuned}/{len(buckets)}" if num_tuned else "onnxruntime"


def best_speedup(tuning: Mapping[str, Any] | None) -> float | None:
    """The largest speed-up among the signatures that run tuned."""
    found = [bucket["speedup"] for bucket in (tuning or {}).get("buckets", ()) if bucket["engine"] == "tvm"]
    return max((value for value in found if value is not None), default=None)


def tuning_of(tuning: Mapping[str, Any] | None) -> str:
    if tuning is None:
        return "-"
    told: str = tuning["state"]
    return f"{told} {tuning['progress']:.0%}" if told in ("tuning", "queued", "paused") else told


def _print_server(told: Mapping[str, Any]) -> None:
    from hone.cli.terminal import factor, open_console, show, state, table

    console = open_console()
    server = told["server"]
    console.print(f"{_named(server)} at {told['url']}: {len(told['models'])} model version(s)")
    rows = [
        (
            line["name"],
            line["version"],
            state(line["state"] or "-"),
            engine_of(line["tuning"]),
            tuning_of(line["tuning"]),
            factor(best_speedup(line["tuning"])),
            line["reason"] or (line["tuning"] or {}).get("reason", ""),
        )
        for line in told["models"]
    ]
    if rows:
        show(console, table(("model", "version", "state", "engine", "tuning", "speed-up", "reason"), rows))


def _named(server: Mapping[str, Any]) -> str:
    """hone calls itself "triton" to clients unless it was told another name: that would only make people wonder."""
    is_hone = "tuning" in server.get("extensions", ())
    name = "hone" if is_hone and server["name"] == "triton" else server["name"]
    return f"{name} {server['version']}"


def _print_model(line: Mapping[str, Any]) -> None:
    from hone.cli.terminal import open_console, show, state, table
    from hone.cli.tune import print_outcome

    console = open_console()
    if line["tuning"] is None:
        console.print(
            f"{line['name']} version {line['version'] or '-'} is", state(line["state"] or "known, not loaded")
        )
        if line["reason"]:
            console.print(f"  {line['reason']}", markup=False)
        return
    print_outcome([line["tuning"]], console=console)
    events: Sequence[Mapping[str, Any]] = line["tuning"]["history"]
    if events:
        console.print(f"\nlast of {len(events)} event(s):")
        rows = [
            (
                event["at"].replace("T", " ")[:19],
                event["event"],
                event.get("signature", ""),
                f"{event['speedup']:.2f}x" if event.get("speedup") else "",
                event.get("reason", ""),
            )
            for event in events[-_SHOWN_EVENTS:]
        ]
        columns = ("at (UTC)", "event", "signature", "speed-up", "reason")
        show(console, table(columns, rows, folded=("signature", "reason")))
