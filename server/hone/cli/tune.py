"""`hone tune MODEL`: tune ahead of time, without a server, and leave the result in the kernels cache."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hone.cli.client import add_server_arguments, server_of
from hone.cli.settings import made_settings
from hone.cli.status import UNSETTLED
from hone.config import Settings
from hone.errors import NotFound, Unavailable
from hone.specialization import TuningControl

if TYPE_CHECKING:
    from rich.console import Console

#: What a server can be asked to do, as `hone.tuning.tuner` has it.
ACTIONS = ("start", "retune", "pause", "cancel", "roll_back", "pin_baseline")
_FOLLOWED = ("start", "retune")
_DONE = ("tuned", "baseline", "unsupported", "failed", "off")
_TICK_SECONDS = 0.25


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="tune models ahead of time, or steer a server's tuning",
        description="Compile, check and measure a model here, and keep what was learned in the kernels cache. Or, with"
        " --action, steer the tuning of a running server.",
    )
    parser.add_argument("model", nargs="+", help="name of a model in the repository")
    parser.add_argument("--model-repository", type=Path, default=Path("model_repo"), help="(default: %(default)s)")
    parser.add_argument("--kernels-cache", type=Path, default=Path("kernels_cache"), help="(default: %(default)s)")
    parser.add_argument("--budget-secs", type=float, default=1200.0, help="seconds a model (default: %(default)g)")
    parser.add_argument("--retune", action="store_true", help="measure again what was refused, failed or passed before")
    parser.add_argument(
        "--action",
        choices=ACTIONS,
        help="tune nothing here: have the server at --url do this (start and retune are followed to their end)",
    )
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with progress() as show:
        told = steer(arguments, show) if arguments.action else _tune_here(arguments, show)
    if arguments.json:
        print(json.dumps(told))
    else:
        print_outcome(told)
    if arguments.action not in (None, *_FOLLOWED):
        return 0
    return 0 if all(one["state"] in ("tuned", "baseline") for one in told) else 1


def steer(arguments: argparse.Namespace, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Have a server act on its models, and return their status then. Raises HoneError."""
    server = server_of(arguments)
    outcomes = []
    for model in arguments.model:
        status = server.act(model, "", arguments.action)
        while arguments.action in _FOLLOWED and status["state"] in UNSETTLED:
            show(status)
            time.sleep(_TICK_SECONDS)
            status = server.tuning(model)
        outcomes.append(status)
    return outcomes


def _tune_here(arguments: argparse.Namespace, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    settings = made_settings(
        {
            "model_repository": (arguments.model_repository,),
            "kernels_cache": arguments.kernels_cache,
            "tuning": "on",
            "tuning_budget_secs": arguments.budget_secs,
            "tuning_pause": False,
            "tuning_cpu_share": 1.0,
            "allow_cpu_metrics": False,
            "allow_gpu_metrics": False,
        },
        {"tuning_budget_secs": "--budget-secs"},
    )
    return asyncio.run(tune(settings, arguments.model, show, retune=arguments.retune))


async def tune(
    settings: Settings, models: list[str], show: Callable[[dict[str, Any]], None], *, retune: bool = False
) -> list[dict[str, Any]]:
    """Load the models as the server does, tune them in turn, and return their last status. What a server's operator
    paused or pinned is tuned all the same: nothing serves here. Raises HoneError."""
    from prometheus_client import CollectorRegistry

    from hone.engines.cuda_transfers import CudaTransfers
    from hone.engines.onnxruntime import has_cuda
    from hone.metrics import Metrics
    from hone.repository import ModelRepository
    from hone.serving.executor import Completions
    from hone.serving.lifecycle import BaselineLoader, ModelLifecycle
    from hone.serving.registry import ModelRegistry
    from hone.tuning.assembly import BackgroundTuning
    from hone.tuning.gpus import detect_gpus, kind_of

    gpus = detect_gpus()
    transfers = CudaTransfers.load() if gpus else None
    registry = ModelRegistry()
    tuning = BackgroundTuning(settings, registry, follow_holds=False, spare=False, gpus=gpus, transfers=transfers)
    metrics = Metrics(CollectorRegistry(), allow_cpu_metrics=False, allow_gpu_metrics=False)
    completions = Completions(asyncio.get_running_loop())
    repository = ModelRepository(settings.model_repository, num_gpus=len(gpus))
    lifecycle = ModelLifecycle(
        repository,
        registry,
        metrics,
        completions,
        num_threads=1,
        load_engine=BaselineLoader(settings.intra_op_threads, len(gpus) if has_cuda() else 0, transfers),
        gpu_kinds=[kind_of(gpu) for gpu in gpus],
        observers=tuning.observers,
    )
    try:
        for model in models:
            await lifecycle.load(model)
        tuning.start()
        if retune:
            for model in models:
                await _ask_anew(tuning, model)
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


async def _ask_anew(tuning: TuningControl, model: str) -> None:
    """As soon as the tuner, which starts on threads of its own, has seen the model."""
    while True:
        try:
            done = tuning.act(model, "", "retune")
            break
        except (NotFound, Unavailable):
            await asyncio.sleep(_TICK_SECONDS)
    with contextlib.suppress(Unavailable):  # its status, which is shown, says why
        await asyncio.wrap_future(done)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """What is to be told of each status: a bar on a terminal, which goes when the block ends; else a line when
    something is done."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    columns = (
        TextColumn("{task.fields[model]}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, expand=True) as bar:
        task = bar.add_task("", total=1.0, model="")
        yield lambda status: bar.update(
            task, completed=status["progress"], description=status["reason"], model=status["model"]
        )


class _Lines:
    """Progress where there is no terminal: a line when something else is done."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, status: dict[str, Any]) -> None:
        text = f"{status['model']}: {status['reason'].partition(':')[0]}"
        if text != self._last and status["reason"]:
            self._last = text
            print(text, file=sys.stderr, flush=True)


def print_outcome(told: list[dict[str, Any]], file: TextIO | None = None, *, console: Console | None = None) -> None:
    """A table for each model, readable at 80 columns: numbers are never cut, and reasons have lines of their own."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console(file=file, highlight=False)
    for status in told:
        console.print(f"{status['model']} version {status['version']} is {status['state']}", markup=False)
        buckets = status["buckets"]
        if not buckets and status["reason"]:
            console.print(f"  {' '.join(status['reason'].split())}", markup=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("signature", overflow="fold", ratio=1)
        table.add_column("engine", no_wrap=True)
        for name in ("baseline", "tuned", "speed-up", "error"):
            table.add_column(name, justify="right", no_wrap=True)
        for bucket in buckets:
            table.add_row(
                bucket["signature"].replace("[", r"\["),
                bucket["engine"],
                _shown(bucket["baseline_ms"], " ms"),
                _shown(bucket["tuned_ms"], " ms"),
                _shown(bucket["speedup"], "x"),
                _shown(bucket["max_error"], ""),
            )
        if buckets:
            console.print(table)
        for line in _plans(buckets):
            console.print(f"  {line}", markup=False)
        for reason, signatures in _reasons(buckets).items():
            console.print(f"  {', '.join(signatures)}: {reason}", markup=False)


def _plans(buckets: list[dict[str, Any]]) -> Iterator[str]:
    """Where more instances of fewer threads would do more in a second than one of all threads."""
    for bucket in buckets:
        plans = bucket.get("plans", {})
        best, usual = plans.get("throughput"), plans.get("latency")
        if best and usual and best["instances"] != usual["instances"]:
            gain = best["rows_per_second"] / usual["rows_per_second"]
            yield (
                f"{bucket['signature']}: {best['instances']} instances of {best['threads']} thread(s) do {gain:.2f} x "
                f"as much in a second, each run taking {best['ms']:.3g} ms instead of {usual['ms']:.3g} "
                f"(instance_group {{ count: {best['instances']} }})"
            )


def _reasons(buckets: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Why signatures stay on the baseline: each reason once, with all that it is true of."""
    reasons: dict[str, list[str]] = {}
    for bucket in buckets:
        if bucket["outcome"] != "passed":
            provisional = " (asked again when serving rests)" if bucket["provisional"] else ""
            reason = " ".join(bucket["reason"].split()) or bucket["outcome"]
            reasons.setdefault(f"{reason}{provisional}", []).append(bucket["signature"])
    return reasons


def _shown(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:.4g}{unit}"
