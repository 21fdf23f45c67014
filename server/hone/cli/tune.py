"""`hone tune MODEL`: tune ahead of time, without a server, and leave the result in the kernels cache."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.config import Settings

_DONE = ("tuned", "baseline", "unsupported", "failed", "off")
_TICK_SECONDS = 0.25


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="tune models ahead of time",
        description="Compile, check and measure a model here, and keep what was learned in the kernels cache.",
    )
    parser.add_argument("model", nargs="+", help="name of a model in the repository")
    parser.add_argument("--model-repository", type=Path, default=Path("model_repo"), help="(default: %(default)s)")
    parser.add_argument("--kernels-cache", type=Path, default=Path("kernels_cache"), help="(default: %(default)s)")
    parser.add_argument("--budget-secs", type=float, default=1200.0, help="seconds a model (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = Settings(
        model_repository=(arguments.model_repository,),
        kernels_cache=arguments.kernels_cache,
        tuning="on",
        tuning_budget_secs=arguments.budget_secs,
        tuning_pause=False,
        tuning_cpu_share=1.0,
        allow_cpu_metrics=False,
        allow_gpu_metrics=False,
    )
    told = asyncio.run(tune(settings, arguments.model, show_progress if sys.stderr.isatty() else print_progress))
    if arguments.json:
        print(json.dumps(told))
    else:
        print_outcome(told)
    return 0 if all(one["state"] in ("tuned", "baseline") for one in told) else 1


async def tune(settings: Settings, models: list[str], show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Load the models as the server does, tune them in turn, and return their last status. Raises HoneError."""
    from prometheus_client import CollectorRegistry

    from hone.engines.onnxruntime import configure_thread_pool
    from hone.metrics import Metrics
    from hone.repository import ModelRepository
    from hone.serving.executor import Completions
    from hone.serving.lifecycle import ModelLifecycle
    from hone.serving.registry import ModelRegistry
    from hone.tuning.assembly import BackgroundTuning

    configure_thread_pool(settings.intra_op_threads or len(os.sched_getaffinity(0)))
    registry = ModelRegistry()
    tuning = BackgroundTuning(settings, registry)
    metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False, allow_gpu_metrics=False)
    completions = Completions(asyncio.get_running_loop())
    repository = ModelRepository(settings.model_repository)
    lifecycle = ModelLifecycle(repository, registry, metrics, completions, num_threads=1, observers=tuning.observers)
    try:
        for model in models:
            await lifecycle.load(model)
        tuning.start()
        outcomes = []
        for model in models:
            status = tuning.status(model)
            while status["state"] not in _DONE:
                show(status)
                await asyncio.sleep(_TICK_SECONDS)
                status = tuning.status(model)
            outcomes.append(status)
        return outcomes
    finally:
        await asyncio.to_thread(tuning.stop, 10.0)
        await lifecycle.close(5.0)
        completions.close()
        repository.close()
        metrics.close()


def show_progress(status: dict[str, Any]) -> None:
    """One line on the terminal that stays current."""
    text = f"{status['model']} {status['progress']:6.1%}  {status['reason']}"
    print(f"\r\x1b[K{text[:150]}", end="", file=sys.stderr, flush=True)


class _Lines:
    """Progress where there is no terminal: a line when something else is done."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, status: dict[str, Any]) -> None:
        text = f"{status['model']}: {status['reason'].partition(':')[0]}"
        if text != self._last and status["reason"]:
            self._last = text
            print(text, file=sys.stderr, flush=True)


print_progress = _Lines()


def print_outcome(told: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    for status in told:
        reason = f": {status['reason']}" if status["reason"] else ""
        table = Table(title=f"{status['model']} version {status['version']} is {status['state']}{reason}")
        for column in ("signature", "engine", "baseline ms", "tuned ms", "speed-up", "max error", "why"):
            table.add_column(column)
        for bucket in status["buckets"]:
            table.add_row(
                bucket["signature"],
                "tvm" if bucket["outcome"] == "passed" else "onnxruntime",
                _shown(bucket["baseline_ms"]),
                _shown(bucket["tuned_ms"]),
                _shown(bucket["speedup"]),
                _shown(bucket["max_error"]),
                bucket["reason"] or bucket["outcome"],
            )
        console.print(table)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
