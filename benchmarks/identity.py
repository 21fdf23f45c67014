"""An identity model through the whole server, against bare handlers and the figures of peers."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.bare.v2 import INPUT_NAME, MODEL_NAME
from benchmarks.bench import Bench, bare_server, hone_server
from benchmarks.models import LARGE, SMALL, add_identity
from benchmarks.perf_analyzer import Protocol
from benchmarks.raw_client import closed_loop, encode_identity
from benchmarks.report import Row, at_least, at_most

SIZES: Final = {"64 B": SMALL, "600 KB": LARGE}
PROTOCOLS: Final[tuple[Protocol, ...]] = ("http", "grpc")
#: The least share of the bare handler's throughput.
BARS: Final = {("http", "64 B"): 0.5, ("http", "600 KB"): 0.9, ("grpc", "64 B"): 0.85, ("grpc", "600 KB"): 0.85}
#: Peers' requests/s at concurrency 4 on a machine like the one these figures were set on: 2 cores, shared with the
#: load generator. Not of this run, so they say how far, not whether; the bars are the ratios to the bare handlers.
PEERS: Final = {
    ("http", "64 B"): {"Triton": 12_999, "KServe": 2_545, "MLServer": 2_418},
    ("grpc", "64 B"): {"Triton": 8_645, "KServe": 3_041, "MLServer": 2_395},
    ("http", "600 KB"): {"Triton": 885, "KServe": 21, "MLServer": 51},
    ("grpc", "600 KB"): {"Triton": 1_076, "KServe": 890, "MLServer": 82},
}


def measure(bench: Bench) -> list[Row]:
    with contextlib.ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-repository-")))
        add_identity(repository, MODEL_NAME)
        hone, _ = stack.enter_context(hone_server("hone", repository))
        bare = {
            "http": stack.enter_context(bare_server("http_asgi", "http")),
            "grpc": stack.enter_context(bare_server("grpc_aio", "grpc")),
        }
        fastapi = stack.enter_context(bare_server("http_fastapi", "http"))
        measurements = []
        for size, num_elements in SIZES.items():
            shapes = {INPUT_NAME: (num_elements,)}
            for protocol in PROTOCOLS:
                for target, label in ((bare[protocol], "bare"), (hone, "hone")):
                    name = f"identity {label} {protocol} {size}"
                    measurements.append((name, bench.load(target, protocol, MODEL_NAME, 4, shapes)))
            name = f"identity fastapi http {size}"
            measurements.append((name, bench.load(fastapi, "http", MODEL_NAME, 4, shapes)))
        for label, json_tensors in (("binary", False), ("JSON", True)):
            body, headers = encode_identity(LARGE, json_tensors=json_tensors)
            one_client = functools.partial(
                closed_loop,
                hone.ports["http"],
                f"/v2/models/{MODEL_NAME}/infer",
                body,
                headers,
                seconds=2 * bench.window_seconds,
                server=hone.process,
            )
            measurements.append((f"identity hone http 600 KB one client {label}", one_client))
        bench.run_rounds(measurements)
    return rows(bench)


def rows(bench: Bench) -> list[Row]:
    table = []
    for protocol in PROTOCOLS:
        for size in SIZES:
            figure = f"{protocol} {size}"
            hone = bench.throughput(f"identity hone {protocol} {size}")
            bare = bench.throughput(f"identity bare {protocol} {size}")
            table.append(at_least(figure, "/s", hone, bare, "bare handler", BARS[protocol, size]))
            hone_cpu, bare_cpu = (bench.cpu_us(f"identity {label} {protocol} {size}") for label in ("hone", "bare"))
            table.append(
                Row(
                    f"{figure}, server's CPU a request",
                    f"{hone_cpu:,.0f} us",
                    f"bare handler {bare_cpu:,.0f} us",
                    hone_cpu / bare_cpu,
                )
            )
            if protocol == "http":
                fastapi = bench.throughput(f"identity fastapi http {size}")
                table.append(at_least(figure, "/s", hone, fastapi, "FastAPI route", None))
            for peer, reported in PEERS[protocol, size].items():
                bar = 2.0 if protocol == "http" and peer != "Triton" else None
                table.append(at_least(figure, "/s", hone, reported, f"{peer} (another run)", bar))
    binary, json_tensors = (f"identity hone http 600 KB one client {label}" for label in ("binary", "JSON"))
    limit = 5 * bench.p50_us(binary)
    table.append(at_most("http 600 KB as JSON, p50", "us", bench.p50_us(json_tensors), limit, "5 x binary's p50"))
    table.append(
        Row(
            "http 600 KB as JSON, server's CPU a request",
            f"{bench.cpu_us(json_tensors):,.0f} us",
            f"binary {bench.cpu_us(binary):,.0f} us",
            bench.cpu_us(json_tensors) / bench.cpu_us(binary),
        )
    )
    return table
