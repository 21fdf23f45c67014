"""Whether the cost of a request grows with the number of models, versions, reloads and series."""

from __future__ import annotations

import contextlib
import http.client
import json
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.bare.v2 import INPUT_NAME, MODEL_NAME
from benchmarks.bench import Bench, Target, hone_server, note
from benchmarks.models import SMALL, add_identity
from benchmarks.processes import BenchmarkError
from benchmarks.report import Row

NUM_MODELS: Final = 1000
NUM_VERSIONS: Final = 100
NUM_RELOADS: Final = 1000
#: A cost is called flat up to this ratio; two servers that do the same differ by up to half of it on a busy machine.
MAX_RATIO: Final = 1.1

_CASES: Final = {
    "models": f"{NUM_MODELS:,} models, each with its series",
    "versions": f"{NUM_VERSIONS} versions",
    "reloads": f"{NUM_RELOADS:,} reloads",
}


def measure(bench: Bench) -> list[Row]:
    with contextlib.ExitStack() as stack:
        repositories = {
            name: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-repository-")))
            for name in ("one", "many", "reloaded")
        }
        add_identity(repositories["one"], MODEL_NAME)
        add_identity(repositories["reloaded"], MODEL_NAME)
        names = [f"{MODEL_NAME}_{number:04}" for number in range(NUM_MODELS)]
        for name in names:
            add_identity(repositories["many"], name)
        add_identity(repositories["many"], "versions", NUM_VERSIONS)

        one, _ = stack.enter_context(hone_server("hone-one", repositories["one"]))
        many, seconds = stack.enter_context(hone_server("hone-many", repositories["many"]))
        note(f"{NUM_MODELS:,} models ready after {seconds:.1f} s")
        reloaded, _ = stack.enter_context(
            hone_server(
                "hone-reloaded",
                repositories["reloaded"],
                "--model-control-mode",
                "explicit",
                "--load-model",
                MODEL_NAME,
            )
        )
        _post_all(many, [f"/v2/models/{name}/infer" for name in names], _small_request())
        _post_all(reloaded, [f"/v2/repository/models/{MODEL_NAME}/load"] * NUM_RELOADS, {})
        note(f"{NUM_RELOADS:,} reloads done")

        shapes = {INPUT_NAME: (SMALL,)}
        cases = {
            "one": (one, MODEL_NAME),
            "models": (many, names[NUM_MODELS // 2]),
            "versions": (many, "versions"),
            "reloads": (reloaded, MODEL_NAME),
        }
        bench.run_rounds(
            [
                (f"scale http {case}", bench.load(target, "http", model, 1, shapes))
                for case, (target, model) in cases.items()
            ]
            + [
                (f"scale grpc {case}", bench.load(cases[case][0], "grpc", cases[case][1], 1, shapes))
                for case in ("one", "models")
            ]
        )
    return rows(bench)


def _small_request() -> dict[str, object]:
    return {"inputs": [{"name": INPUT_NAME, "shape": [SMALL], "datatype": "FP32", "data": [0.0] * SMALL}]}


def _post_all(target: Target, paths: list[str], content: dict[str, object]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", target.ports["http"], timeout=60)
    body = json.dumps(content)
    with contextlib.closing(connection):
        for path in paths:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != 200:
                raise BenchmarkError(f"POST {path}: expected 200, found {response.status}: {answer[:500]!r}")


def rows(bench: Bench) -> list[Row]:
    table = []
    for protocol in ("http", "grpc"):
        base = f"scale {protocol} one"
        for case, title in _CASES.items():
            name = f"scale {protocol} {case}"
            if name not in bench.samples:
                continue
            for kind, value, reference in (
                ("server's CPU a request", bench.cpu_us(name), bench.cpu_us(base)),
                ("p50", bench.p50_us(name), bench.p50_us(base)),
            ):
                ratio = value / reference
                bar, met = (f"<= {MAX_RATIO:g} x", ratio <= MAX_RATIO) if kind != "p50" else ("", None)
                measured, against = f"{value:,.0f} us", f"one model {reference:,.0f} us"
                table.append(Row(f"{protocol}, {title}, {kind}", measured, against, ratio, bar, met))
    return table
