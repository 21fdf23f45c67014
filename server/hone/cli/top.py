"""`hone top`: what a running server is doing, model by model, anew every second or two."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hone.cli.client import Server, add_server_arguments, server_of
from hone.cli.status import best_speedup, engine_of, read_tuning, tuning_of
from hone.errors import InvalidRequest

if TYPE_CHECKING:
    from rich.console import RenderableType

SORTS = ("rate", "latency", "errors", "name")
#: Versions whose tuning is asked for anew at each look; of the others the last answer stands, in turn.
_TUNING_PER_LOOK = 32


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="watch a running server: a live table of its models",
        description="Watch a running server: requests, latencies and tuning of its models, busiest first. Ends with"
        " Ctrl-C. Where standard output is no terminal it prints one table (--count N for more).",
    )
    add_server_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECS", help="between two looks (default: 1)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="end after so many tables")
    parser.add_argument("--sort", choices=SORTS, default="rate", help="order of the rows (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print each look as one line of JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not 0.05 <= arguments.interval <= 3600:
        raise InvalidRequest(f"--interval: expected 0.05 to 3600 seconds, found {arguments.interval:g}")
    if arguments.count < 0:
        raise InvalidRequest(f"--count: expected 1 or more, found {arguments.count}")
    from hone.cli.terminal import is_terminal, open_console, show

    server = server_of(arguments)
    live = is_terminal(sys.stdout) and not arguments.json
    count = arguments.count or (0 if is_terminal(sys.stdout) else 1)
    looks = look(server, arguments.interval, count, arguments.sort)
    if arguments.json:
        for told in looks:
            print(json.dumps(told), flush=True)
    elif not live:
        console = open_console()
        for told in looks:
            show(console, picture(told))
    else:
        _live(looks)
    return 0


def _live(looks: Iterator[dict[str, Any]]) -> None:
    from rich.live import Live

    from hone.cli.terminal import open_console

    console = open_console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for told in looks:
            live.update(picture(told, max_rows=max(1, console.height - 4)), refresh=True)


def look(server: Server, interval: float, count: int, sort: str) -> Iterator[dict[str, Any]]:
    """Rates and mean latencies of each interval, `count` times (0: for ever). Raises HoneError."""
    tuning = _Tuning(server)
    before, since = _counters(server), time.monotonic()
    number = 0
    while not count or number < count:
        time.sleep(interval)
        now, at = _counters(server), time.monotonic()
        tuning.refresh(list(now))
        rows = [_row(name, now[name], before.get(name), at - since, tuning.told.get(name)) for name in now]
        yield {"time": time.time(), "url": server.place, "seconds": at - since, "models": _sorted(rows, sort)}
        before, since = now, at
        number += 1


class _Tuning:
    """How tuning stands, by model and version; with very many models a part of them anew at each look."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._next = 0
        self.told: dict[tuple[str, str], dict[str, Any] | None] = {}

    def refresh(self, places: Sequence[tuple[str, str]]) -> None:
        for gone in self.told.keys() - set(places):
            del self.told[gone]
        for number in range(min(_TUNING_PER_LOOK, len(places))):
            name, version = place = places[(self._next + number) % len(places)]
            self.told[place] = read_tuning(self._server, {"name": name, "version": version})
        self._next += _TUNING_PER_LOOK


def _counters(server: Server) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(one["name"], one["version"]): one for one in server.statistics()}


def _row(
    place: tuple[str, str],
    now: Mapping[str, Any],
    before: Mapping[str, Any] | None,
    seconds: float,
    tuning: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What happened between two looks. A version that was loaded anew in between counts from its beginning."""

    def since(part: str, field: str) -> int:
        old = 0 if before is None else int(before["inference_stats"][part].get(field, 0))
        new = int(now["inference_stats"][part].get(field, 0))
        return new - old if new >= old else new

    def mean(part: str) -> float | None:
        number = since(part, "count")
        return since(part, "ns") / number / 1_000 if number else None

    executions = now["execution_count"] - (before["execution_count"] if before else 0)
    inferences = now["inference_count"] - (before["inference_count"] if before else 0)
    return {
        "name": place[0],
        "version": place[1],
        "requests_per_second": since("success", "count") / seconds,
        "errors_per_second": since("fail", "count") / seconds,
        "mean_batch": inferences / executions if executions > 0 else None,
        "request_us": mean("success"),
        "queue_us": mean("queue"),
        "compute_us": mean("compute_infer"),
        "engine": engine_of(tuning),
        "tuning": tuning_of(tuning),
        "speedup": best_speedup(tuning),
    }


def _sorted(rows: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    def place(row: Mapping[str, Any]) -> tuple[float, str, str]:
        worth = {
            "rate": row["requests_per_second"],
            "latency": row["request_us"] or 0.0,
            "errors": row["errors_per_second"],
        }
        return (-worth.get(sort, 0.0), row["name"], row["version"])

    return sorted(rows, key=place)


def picture(told: Mapping[str, Any], max_rows: int | None = None) -> RenderableType:
    """A headline and a table; rows that do not fit are counted."""
    from rich.console import Group
    from rich.text import Text

    from hone.cli.terminal import duration, factor, table

    models = told["models"]
    shown = models if max_rows is None else models[:max_rows]
    rate = sum(row["requests_per_second"] for row in models)
    errors = sum(row["errors_per_second"] for row in models)
    at = time.strftime("%H:%M:%S", time.localtime(told["time"]))
    headline = Text(f"hone top - {at}  {told['url']}  {len(models)} model(s)  {rate:.1f} requests/s  ")
    headline.append(f"{errors:.1f} errors/s", style="red" if errors else "")
    rows = [
        (
            row["name"],
            row["version"],
            f"{row['requests_per_second']:.1f}",
            Text(f"{row['errors_per_second']:.1f}", style="red" if row["errors_per_second"] else ""),
            "-" if row["mean_batch"] is None else f"{row['mean_batch']:.1f}",
            duration(row["request_us"]),
            duration(row["queue_us"]),
            duration(row["compute_us"]),
            Text(row["engine"], style="green" if row["engine"].startswith("tvm") else ""),
            row["tuning"],
            factor(row["speedup"]),
        )
        for row in shown
    ]
    columns = (
        "model",
        "version",
        "req/s",
        "err/s",
        "batch",
        "request",
        "queue",
        "compute",
        "engine",
        "tuning",
        "speed-up",
    )
    parts: list[RenderableType] = [headline, table(columns, rows, right=(*columns[2:8], "speed-up"))]
    if len(shown) < len(models):
        parts.append(Text(f"and {len(models) - len(shown)} more", style="dim"))
    return Group(*parts)
