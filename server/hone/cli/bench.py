"""`hone bench MODEL`: latency and throughput of a model on a running server, its baseline and tuned side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from hone.cli.client import add_server_arguments, server_of
from hone.errors import HoneError, InvalidRequest, NotFound, Restricted

if TYPE_CHECKING:
    from hone.cli.bench_subject import Subject
    from hone.cli.load import Load, Measured

_MAX_CLIENTS = 256
_FREE_CLIENTS = 64
"""Connections of an open loop: it is open only as long as one is free."""
_WARM_UP_SECONDS = 0.5


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure a model, its baseline and tuned side by side",
        description="Send the same request again and again, and tell throughput and latency. Where the model runs"
        " tuned, its baseline is measured beside it: each request says which engine it is for, and nobody else's"
        " requests are touched (--engine current measures what serves).",
    )
    parser.add_argument("model", help="name of the model")
    add_server_arguments(parser)
    parser.add_argument("--model-version", default="", help="version of the model (default: the newest)")
    parser.add_argument("--engine", choices=("both", "current"), default="both", help="(default: %(default)s)")
    parser.add_argument(
        "--clients", type=_numbers(int), default=(), metavar="N[,N]", help="closed loop of N clients (default: 1)"
    )
    parser.add_argument(
        "--rate", type=_numbers(float), default=(), metavar="R[,R]", help="open loop: R requests a second, at random"
    )
    parser.add_argument("--duration", type=float, default=3.0, metavar="SECS", help="of each run (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="runs of each load, pooled (default: 2)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows of a request (default: 1)")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="INPUT:DIMxDIM", help="sizes of an input that leaves some open"
    )
    parser.add_argument(
        "--input", action="append", default=[], metavar="INPUT=FILE", help="a picture, .npy or .json instead of noise"
    )
    parser.add_argument("--csv", metavar="FILE", help="write a row for each load and engine ('-': standard output)")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from hone.cli.bench_report import output, print_report, write_csv
    from hone.cli.bench_subject import Subject
    from hone.cli.load import Load

    _check(arguments)
    server = server_of(arguments)
    loads = [Load(clients) for clients in arguments.clients]
    loads += [Load(_FREE_CLIENTS, rate) for rate in arguments.rate]
    subject = Subject.read(server, arguments)
    told = bench(subject, loads or [Load(1)], arguments.duration, arguments.rounds, both=arguments.engine == "both")
    if arguments.csv:
        with output(arguments.csv) as file:
            write_csv(told, file)
    if arguments.json:
        print(json.dumps(told))
    elif arguments.csv != "-":
        print_report(told)
    failed = [line for line in told["results"] if line["num_errors"] or not line["num_requests"]]
    for line in failed:
        print(f"hone bench: {line['engine']}, {line['load']}: {line['num_errors']} error(s), the first: "
              f"{line['first_error'] or 'no request was answered'}", file=sys.stderr)  # fmt: skip
    return 1 if failed else 0


def _check(arguments: argparse.Namespace) -> None:
    for flag, value, least, most in (
        ("--duration", arguments.duration, 0.05, 3600.0),
        ("--rounds", arguments.rounds, 1, 1000),
        ("--batch", arguments.batch, 1, 1 << 20),
        *(("--clients", number, 1, _MAX_CLIENTS) for number in arguments.clients),
        *(("--rate", number, 0.01, 1e6) for number in arguments.rate),
    ):
        if not least <= value <= most:
            raise InvalidRequest(f"{flag}: expected {least:g} to {most:g}, found {value:g}")


def bench(subject: Subject, loads: Sequence[Load], seconds: float, rounds: int, *, both: bool) -> dict[str, Any]:
    """Measure every load on each engine; the order turns with each round, so that a machine that gets slower or faster
    meanwhile favours nobody. Raises HoneError."""
    from hone.cli.load import Measured, measure

    sides, note = _sides(subject, both=both)
    measured: dict[tuple[Load, str], Measured] = {(load, side): Measured() for load, side in product(loads, sides)}
    for number in range(rounds):
        for side in sides if number % 2 else tuple(reversed(sides)):
            request = subject.requests[side]
            for load in loads:
                measure(subject.server, request, load, min(_WARM_UP_SECONDS, seconds / 4), seed=-1 - number & 0xFFFF)
                measured[load, side].add(measure(subject.server, request, load, seconds, seed=number))
    return {
        "model": subject.model,
        "version": subject.version,
        "url": subject.server.place,
        "signature": subject.signature,
        "engines": list(sides),
        "note": note,
        "results": [_line(load, side, measured[load, side]) for load, side in product(loads, sides)],
    }


def _line(load: Load, side: str, measured: Measured) -> dict[str, Any]:
    return {
        "load": load.text,
        "loop": "closed" if load.rate is None else "open",
        "clients": load.clients,
        "rate": load.rate,
        "engine": side,
        **measured.summary(),
        "first_error": measured.first_error,
    }


def _sides(subject: Subject, *, both: bool) -> tuple[tuple[str, ...], str]:
    """The engines to measure; and where that is only the one that serves now, why. Raises HoneError for a request that
    the server refuses whatever the engine."""
    from hone.cli.bench_subject import BASELINE, CURRENT, TUNED

    plain = subject.ask(CURRENT)
    if plain.status != 200:
        raise HoneError(f"the server answered {plain.status}: {plain.error}")
    if not both:
        return (CURRENT,), f"measured as it serves now (--engine {CURRENT})"
    tuned = subject.ask(TUNED)
    if tuned.status == 200 and tuned.engine == "tvm":
        return (BASELINE, TUNED), ""
    return (CURRENT,), f"measured as it serves now: {_why_alone(subject, tuned.status, tuned.engine, tuned.error)}"


def _why_alone(subject: Subject, status: int, engine: str, error: str) -> str:
    if status == 200 and not engine:
        return "this server is older, and lets no request choose its engine"
    if status == 200:
        return f"the tuned engine left this input to {engine}"
    if status == 403:
        return "the engine can be chosen with the key of 'tuning' only (--key HEADER=VALUE)"
    if status == 503:
        return f"{subject.signature} does not run tuned ({_reason(subject)})"
    raise HoneError(f"the server answered {status}: {error}")


def _reason(subject: Subject) -> str:
    """Why a signature is not tuned, as far as the server tells."""
    try:
        status = subject.server.tuning(subject.model, subject.version)
    except (Restricted, NotFound):
        return "why is behind a key that was not given"
    found = [one for one in status["buckets"] if one["signature"] == subject.signature]
    # One for each kind of device: it is the one that does not run tuned that has a reason.
    bucket = min(found, key=lambda one: bool(one["engine"] == "tvm"), default=None)
    return str((bucket and (bucket["reason"] or bucket["outcome"])) or f"its tuning is {status['state']}")


def _numbers(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> tuple[float, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected {'whole ' if kind is int else ''}numbers separated by commas, found '{text}'"
            ) from None

    return parse
