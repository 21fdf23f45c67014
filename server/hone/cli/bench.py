"""`hone bench MODEL`: latency and throughput of a model on a running server, its baseline and tuned side by side."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from hone.cli.client import Server, add_server_arguments, model_path, server_of
from hone.cli.infer import read_input
from hone.errors import HoneError, InvalidRequest, NotFound, Restricted, Unavailable
from hone.specialization import Signature
from hone.types import BYTES, NUMPY_DTYPES, Array, Shape

if TYPE_CHECKING:
    from hone.cli.load import Load, Measured

BASELINE, TUNED, CURRENT = "baseline", "tuned", "current"
_SWITCH_SECONDS = 60.0
_LOOK_SECONDS = 0.1
_MAX_CLIENTS = 256
_FREE_CLIENTS = 64
"""Connections of an open loop: it is open only as long as one is free."""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure a model, its baseline and tuned side by side",
        description="Send the same request again and again, and tell throughput and latency. Where the model runs"
        " tuned, its baseline is measured beside it: the server is told to pin the baseline meanwhile, for everybody"
        " that asks it, and to go back after (--engine current leaves it alone).",
    )
    parser.add_argument("model", help="name of the model")
    add_server_arguments(parser)
    parser.add_argument("--model-version", default="", help="version of the model (default: the newest)")
    parser.add_argument("--engine", choices=("both", CURRENT), default="both", help="(default: %(default)s)")
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
    from hone.cli.load import Load

    _check(arguments)
    server = server_of(arguments)
    loads = [Load(clients) for clients in arguments.clients]
    loads += [Load(_FREE_CLIENTS, rate) for rate in arguments.rate]
    subject = Subject.read(server, arguments)
    told = bench(subject, loads or [Load(1)], arguments.duration, arguments.rounds, both=arguments.engine == "both")
    if arguments.csv:
        with _output(arguments.csv) as file:
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


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked of whom: a whole HTTP request, and the signature that its tensors make."""

    server: Server
    model: str
    version: str
    signature: str
    request: bytes

    @classmethod
    def read(cls, server: Server, arguments: argparse.Namespace) -> Subject:
        """Raises HoneError: the model is not there, an input leaves sizes open, a file does not fit."""
        from hone.cli.load import encode_request

        path = model_path(arguments.model, arguments.model_version)
        metadata = server.call("GET", path)
        batching = server.call("GET", f"{path}/config").get("max_batch_size", 0) > 0
        if not batching and arguments.batch != 1:
            raise InvalidRequest(
                f"--batch: model '{arguments.model}' does not batch, expected 1, found {arguments.batch}"
            )
        arrays = _arrays(metadata, arguments, batching=batching)
        tensors, payloads = [], []
        for spec in metadata["inputs"]:
            array = arrays[spec["name"]]
            payload = _wire_bytes(array, spec["datatype"])
            payloads.append(payload)
            tensors.append(
                {
                    "name": spec["name"],
                    "datatype": spec["datatype"],
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": len(payload)},
                }
            )
        document = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
        signature = Signature.of((t["name"], t["datatype"], tuple(t["shape"])) for t in tensors).text
        request = encode_request(f"{path}/infer", server, document, b"".join(payloads))
        return cls(server, arguments.model, arguments.model_version, signature, request)

    def probe(self) -> None:
        """One request, before many. Raises HoneError where the server refuses it."""
        from hone.cli.load import Connection

        connection = Connection(self.server)
        try:
            status, body = connection.exchange(self.request)
        finally:
            connection.close()
        if status != 200:
            raise HoneError(f"the server answered {status}: {body[:1000].decode('utf-8', 'replace')}")


def bench(subject: Subject, loads: Sequence[Load], seconds: float, rounds: int, *, both: bool) -> dict[str, Any]:
    """Measure every load on each engine; the order turns with each round, so that a machine that gets slower or faster
    meanwhile favours nobody. Raises HoneError."""
    from hone.cli.load import Measured, measure

    subject.probe()
    switch = Switch.read(subject) if both else None
    sides = (BASELINE, TUNED) if switch is not None and switch.is_tuned else (CURRENT,)
    measured: dict[tuple[Load, str], Measured] = {(load, side): Measured() for load, side in product(loads, sides)}
    with switch.restored() if switch is not None and len(sides) > 1 else contextlib.nullcontext():
        for number in range(rounds):
            for side in sides if number % 2 else reversed(sides):
                if switch is not None and side != CURRENT:
                    switch.turn_to(side)
                for load in loads:
                    measure(subject.server, subject.request, load, min(0.5, seconds / 4), seed=-1 - number & 0xFFFF)
                    measured[load, side].add(measure(subject.server, subject.request, load, seconds, seed=number))
    return {
        "model": subject.model,
        "version": subject.version,
        "url": subject.server.place,
        "signature": subject.signature,
        "engines": list(sides),
        "note": "" if len(sides) > 1 else _why_alone(subject, switch, both=both),
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


def _why_alone(subject: Subject, switch: Switch | None, *, both: bool) -> str:
    if not both:
        return "measured as it serves now (--engine current)"
    if switch is None:
        return "measured as it serves now: the server does not let its tuning be steered without a key"
    return f"measured as it serves now: {subject.signature} does not run tuned ({switch.reason})"


class Switch:
    """Turns a model between its baseline and its tuned engines, by the actions that operators have."""

    def __init__(self, subject: Subject, status: Mapping[str, Any]) -> None:
        self._subject = subject
        self._was_paused = status["state"] == "paused"
        self._tuned = _tuned_signatures(status)
        self._side = TUNED
        self.is_tuned = subject.signature in self._tuned
        bucket = next((one for one in status["buckets"] if one["signature"] == subject.signature), None)
        self.reason = (bucket and (bucket["reason"] or bucket["outcome"])) or f"its tuning is {status['state']}"

    @classmethod
    def read(cls, subject: Subject) -> Switch | None:
        """None where tuning is behind a key that was not given."""
        try:
            return cls(subject, subject.server.tuning(subject.model, subject.version))
        except (Restricted, NotFound):
            return None

    def turn_to(self, side: str) -> None:
        """Raises HoneError where the server does not get there."""
        if side == self._side:
            return
        if side == BASELINE:
            self._act("pin_baseline")
            self._wait(lambda tuned: not tuned, "the baseline serves")
        else:
            self._act("start")
            self._wait(lambda tuned: tuned >= self._tuned, "what was tuned serves again")
        self._side = side

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """What served before serves again when the block ends, also for SIGTERM and Ctrl-C."""

        def end(number: int, frame: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, end)
        try:
            yield
        finally:
            try:
                # A turn that was broken off half-way counts as one to the baseline.
                self._side = BASELINE if self._side != TUNED else self._side
                self._restore()
            finally:
                signal.signal(signal.SIGTERM, before)

    def _restore(self) -> None:
        try:
            self.turn_to(TUNED)
            if self._was_paused:
                self._act("pause")
        except HoneError as problem:
            raise type(problem)(
                f"'{self._subject.model}' may still be pinned to its baseline: {problem};"
                f' POST {{"action": "start"}} to {model_path(self._subject.model)}/tuning'
            ) from problem

    def _act(self, action: str) -> None:
        if action == "pin_baseline":
            self._side = BASELINE  # from here on there is something to restore, whatever happens
        self._subject.server.act(self._subject.model, self._subject.version, action)

    def _wait(self, there: Callable[[frozenset[str]], bool], what: str) -> None:
        until = time.monotonic() + _SWITCH_SECONDS
        while True:
            status = self._subject.server.tuning(self._subject.model, self._subject.version)
            if there(_tuned_signatures(status)):
                return
            if time.monotonic() > until:
                raise Unavailable(
                    f"waited {_SWITCH_SECONDS:g} s until {what}: tuning is '{status['state']}' {status['reason']}"
                )
            time.sleep(_LOOK_SECONDS)


def _tuned_signatures(status: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(bucket["signature"] for bucket in status["buckets"] if bucket["engine"] == "tvm")


# --- inputs


def _arrays(metadata: Mapping[str, Any], arguments: argparse.Namespace, *, batching: bool) -> dict[str, Array]:
    """An array for each input, batch included. Raises InvalidRequest."""
    names = [spec["name"] for spec in metadata["inputs"]]
    files = _named(arguments.input, "=", "--input", "INPUT=FILE", names)
    shapes = {
        name: _dims(text) for name, text in _named(arguments.shape, ":", "--shape", "INPUT:DIMxDIM", names).items()
    }
    generator = np.random.default_rng(0)
    arrays = {}
    for spec in metadata["inputs"]:
        name, datatype = spec["name"], spec["datatype"]
        wanted: Shape = tuple(spec["shape"][1:] if batching else spec["shape"])
        if name in files:
            array = read_input(Path(files[name]), datatype, wanted)
        else:
            array = _made_up(generator, datatype, _closed(name, wanted, shapes.get(name)))
        arrays[name] = (
            np.ascontiguousarray(np.broadcast_to(array, (arguments.batch, *array.shape))) if batching else array
        )
    return arrays


def _named(texts: Sequence[str], separator: str, flag: str, expected: str, names: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, given, value = text.partition(separator)
        if not given or not value:
            raise InvalidRequest(f"{flag} {text}: expected {expected}")
        if name not in names:
            raise InvalidRequest(f"{flag} {text}: the model has no input '{name}', it has {', '.join(names)}")
        found[name] = value
    return found


def _dims(text: str) -> Shape:
    try:
        dims = tuple(int(part) for part in text.split("x"))
    except ValueError:
        dims = ()
    if not dims or min(dims) < 1:
        raise InvalidRequest(f"--shape: expected sizes such as 3x224x224, found '{text}'")
    return dims


def _closed(name: str, wanted: Shape, given: Shape | None) -> Shape:
    """The sizes to send, without the batch. Raises InvalidRequest."""
    if given is None:
        if -1 in wanted:
            shown = "x".join("?" if size < 0 else str(size) for size in wanted)
            raise InvalidRequest(f"input '{name}' leaves sizes open ({shown}): give them with --shape {name}:{shown}")
        return wanted
    if len(given) != len(wanted) or any(want not in (-1, got) for want, got in zip(wanted, given, strict=True)):
        raise InvalidRequest(
            f"--shape {name}: expected sizes (without the batch) that fit {list(wanted)}, found {list(given)}"
        )
    return given


def _made_up(generator: np.random.Generator, datatype: str, shape: Shape) -> Array:
    """Noise that any model takes: numbers from 0 to 1, zeros and ones for integers, which may be indices."""
    if datatype == BYTES:
        return np.full(shape, b"0", object)
    dtype = NUMPY_DTYPES[datatype]
    if dtype.kind in "biu":
        return generator.integers(0, 2, shape).astype(dtype)
    return generator.random(shape).astype(dtype)


def _wire_bytes(array: Array, datatype: str) -> bytes:
    if datatype == BYTES:
        return b"".join(len(item).to_bytes(4, "little") + item for item in array.reshape(-1))
    return array.tobytes()


# --- telling


@contextlib.contextmanager
def _output(name: str) -> Iterator[TextIO]:
    if name == "-":
        yield sys.stdout
        return
    with Path(name).open("w", encoding="utf-8", newline="") as file:
        yield file


def write_csv(told: Mapping[str, Any], file: TextIO) -> None:
    fields = ["model", "signature", *(name for name in told["results"][0] if name != "first_error")]
    writer = csv.DictWriter(file, fields, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in told["results"]:
        writer.writerow({"model": told["model"], "signature": told["signature"], **line})


def print_report(told: Mapping[str, Any]) -> None:
    """A table for each load: a row for each figure, a column for each engine."""
    from hone.cli.load import QUANTILES
    from hone.cli.terminal import duration, open_console, show, table

    console = open_console()
    console.print(f"{told['model']} at {told['url']}, {told['signature']}", markup=False)
    if told["note"]:
        console.print(told["note"], markup=False)
    sides = told["engines"]
    for load in dict.fromkeys(line["load"] for line in told["results"]):
        lines = {line["engine"]: line for line in told["results"] if line["load"] == load}
        rows = []
        figures: list[tuple[str, str, Callable[[Any], str]]] = [
            ("requests/s", "requests_per_second", "{:.1f}".format),
            ("mean", "mean_us", duration),
            *((quantile, f"{quantile}_us", duration) for quantile, _ in QUANTILES),
            ("max", "max_us", duration),
            ("requests", "num_requests", str),
            ("errors", "num_errors", str),
        ]
        for title, name, shown in figures:
            values = [lines[side][name] for side in sides]
            row = [title, *(shown(value) for value in values)]
            if len(sides) > 1:
                row.append(_ratio(name, *values))
            rows.append(row)
        console.print(f"\n{lines[sides[0]]['loop']} loop, {load}", markup=False)
        columns = ("", *sides, "tuned is") if len(sides) > 1 else ("", *sides)
        show(console, table(columns, rows, right=columns[1:]))


def _ratio(name: str, baseline: float | None, tuned: float | None) -> str:
    """How many times as fast, where the figure is one of speed."""
    if not baseline or not tuned or name in ("num_requests", "num_errors"):
        return ""
    return f"{tuned / baseline:.2f}x" if name == "requests_per_second" else f"{baseline / tuned:.2f}x"


def _numbers(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> tuple[float, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected {'whole ' if kind is int else ''}numbers separated by commas, found '{text}'"
            ) from None

    return parse
