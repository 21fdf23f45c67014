"""Real models through the whole server, against ONNX Runtime called directly."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.bare.v2 import INPUT_NAME, MODEL_NAME
from benchmarks.bench import Bench, bare_server, hone_server
from benchmarks.identity import PROTOCOLS
from benchmarks.models import RealModel, add_real_model, find_real_models
from benchmarks.perf_analyzer import Result
from benchmarks.processes import run_json
from benchmarks.report import Row, at_least, at_most

#: What the server may add to ONNX Runtime and the bare handler, with one client.
ADDED_US: Final = 150.0
MIN_SHARE: Final = 0.95


def measure(bench: Bench) -> list[Row]:
    models, missing = find_real_models()
    with contextlib.ExitStack() as stack:
        repository = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-repository-")))
        for index, model in enumerate(models):
            add_real_model(repository, f"model{index}", model, batching=False)
            add_real_model(repository, f"model{index}_batching", model, batching=True)
        hone, _ = stack.enter_context(hone_server("hone", repository))
        bare = {
            "http": stack.enter_context(bare_server("http_asgi", "http")),
            "grpc": stack.enter_context(bare_server("grpc_aio", "grpc")),
        }
        measurements = []
        for index, model in enumerate(models):
            shapes = {model.input_name: model.shape}
            measurements.append((f"{model.title} direct", _direct(model)))
            for protocol in PROTOCOLS:
                prefix = f"{model.title} {protocol}"
                floor = bench.load(bare[protocol], protocol, MODEL_NAME, 1, {INPUT_NAME: (model.num_elements,)})
                measurements.append((f"{prefix} bare one client", floor))
                for batching in ("", "_batching"):
                    name = f"model{index}{batching}"
                    if not batching:
                        one = bench.load(hone, protocol, name, 1, shapes)
                        measurements.append((f"{prefix} hone one client", one))
                    four = bench.load(hone, protocol, name, 4, shapes)
                    measurements.append((f"{prefix} hone four clients{batching.replace('_', ' ')}", four))
            measurements.append((f"{model.title} direct, its defaults", _direct(model, "--defaults")))
        bench.run_rounds(measurements)
    table = [row for model in models for row in rows(bench, model)]
    return table + [Row(line, "not measured", "") for line in missing]


def _direct(model: RealModel, *flags: str) -> Callable[[], Result]:
    sizes = ",".join(str(size) for size in (1, *model.shape))
    command = [sys.executable, "-m", "benchmarks.direct", *flags, "time", str(model.path), model.input_name, sizes]

    def measure_once() -> Result:
        return Result(**run_json(command))

    return measure_once


def rows(bench: Bench, model: RealModel) -> list[Row]:
    direct_p50, direct_rate = bench.p50_us(f"{model.title} direct"), bench.throughput(f"{model.title} direct")
    table = []
    for protocol in PROTOCOLS:
        prefix = f"{model.title} {protocol}"
        floor = bench.p50_us(f"{prefix} bare one client")
        one = bench.p50_us(f"{prefix} hone one client")
        limit = direct_p50 + floor + ADDED_US
        how = f"direct {direct_p50:,.0f} + bare {floor:,.0f} + {ADDED_US:.0f} us"
        table.append(at_most(f"{prefix}, one client, p50", "us", one, limit, how))
        four = bench.throughput(f"{prefix} hone four clients")
        batching = bench.throughput(f"{prefix} hone four clients batching")
        table.append(at_least(f"{prefix}, four clients", "/s", four, direct_rate, "direct", MIN_SHARE))
        table.append(at_least(f"{prefix}, four clients, batching", "/s", batching, direct_rate, "direct", MIN_SHARE))
        table.append(at_least(f"{prefix}, batching or not", "/s", batching, four, "without batching", 1.0))
    defaults = bench.throughput(f"{model.title} direct, its defaults")
    table.append(at_least(f"{model.title} direct", "/s", direct_rate, defaults, "direct with its defaults", None))
    return table
