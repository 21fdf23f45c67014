"""`hone explain MODEL`: where a model's time goes, tuned and on its baseline, and why it was or was not promoted."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.config import Settings
from hone.errors import EngineError, InvalidRequest

#: Rows of a table; `--json` has them all.
_MAX_ROWS = 40
_SHOWN_LOST = 12
_SHOWN_OPERATORS = 8
_WIDTH = 180


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="show where a model's time goes",
        description="Profile a model as it was tuned here, and on its baseline, layer by layer.",
    )
    parser.add_argument("model", help="name of a model in the repository")
    parser.add_argument("--model-repository", type=Path, default=Path("model_repo"), help="(default: %(default)s)")
    parser.add_argument("--kernels-cache", type=Path, default=Path("kernels_cache"), help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="batch size (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="runs to measure (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write one run of both as a Chrome trace")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.batch < 1 or arguments.rounds < 1:
        raise InvalidRequest(f"--batch and --rounds: expected 1 or more, found {arguments.batch}, {arguments.rounds}")
    settings = Settings(
        model_repository=(arguments.model_repository,),
        kernels_cache=arguments.kernels_cache,
        tuning="cache",
        allow_cpu_metrics=False,
        allow_gpu_metrics=False,
    )
    told = _explained(settings, arguments)
    if arguments.json:
        print(json.dumps(told))
    else:
        _print(told)
    return 0


def _explained(settings: Settings, arguments: argparse.Namespace) -> dict[str, Any]:
    """Status and explanation as JSON. Raises HoneError."""
    from hone.cli.tune import tune
    from hone.compiler.build import BuildFailed, LinkFailed
    from hone.compiler.onnx_import import Unsupported
    from hone.engines.onnxruntime import OnnxRuntimeEngine
    from hone.kernels import DeviceKey, KernelsCache
    from hone.repository import ModelRepository, narrowed
    from hone.specialization import CPU
    from hone.tuning.domains import derive_domains
    from hone.tuning.explanation import explain
    from hone.tuning.served import accelerator_parameters
    from hone.tuning.settings import model_tuning
    from hone.tuning.signatures import wanted_signatures
    from hone.tuning.trial import NoTrial, gather

    (status,) = asyncio.run(tune(settings, [arguments.model], lambda status: None))
    repository = ModelRepository(settings.model_repository)
    try:
        definition = repository.read(arguments.model)
    finally:
        repository.close()
    version = max(definition.versions)
    path = definition.versions[version]
    engine = OnnxRuntimeEngine.load(path)
    inputs = narrowed(engine.inputs, definition.config)
    tuning = model_tuning(accelerator_parameters(definition.config), inputs, "cache")
    max_batch_size = definition.config.max_batch_size
    signatures = wanted_signatures(inputs, max_batch_size, named=tuning.signatures)
    if max_batch_size > 0 and signatures:
        signatures = [signatures[0].with_rows(arguments.batch), *signatures]
    signature = next((one for one in signatures if one.rows == arguments.batch), None)
    if signature is None:
        known = ", ".join(one.text for one in signatures) or "none"
        raise InvalidRequest(
            f"{arguments.model} has no known signature of batch {arguments.batch} (known: {known}); "
            "name one in its configuration (parameter 'signatures' of its accelerator)"
        )
    evidence = gather(
        engine, engine.outputs, signature, derive_domains(path, signature.specs), (), batching=max_batch_size > 0
    )
    engine.close()
    if isinstance(evidence, NoTrial):
        raise EngineError(f"{arguments.model}: there are no inputs to profile it with: {evidence.reason}")
    tell = (lambda text: print(text, file=sys.stderr, flush=True)) if sys.stderr.isatty() else (lambda text: None)
    buckets = (one for one in status["buckets"] if one["device"] == CPU)  # what is explained is the module for CPUs
    bucket = next((one for one in buckets if one["signature"] == signature.text), None)
    try:
        found = explain(
            path,
            signature,
            evidence.sets[0].arrays,
            precision=tuning.precision,
            cache=KernelsCache(settings.kernels_cache),
            device=DeviceKey.for_cpu(),
            num_threads=len(os.sched_getaffinity(0)),
            tell=tell,
            rounds=arguments.rounds,
            artifact=bucket["artifact"] if bucket is not None and bucket["engine"] == "tvm" else None,
        )
    except (BuildFailed, LinkFailed) as problem:
        raise EngineError(f"{arguments.model} does not compile: {problem}") from problem
    told: dict[str, Any] = {
        "model": arguments.model,
        "version": str(version),
        "state": status["state"],
        "reason": status["reason"],
        "bucket": bucket,
    }
    if isinstance(found, Unsupported):
        return {**told, "unsupported": found.reason, "operator": found.operator}
    if arguments.trace is not None:
        arguments.trace.write_text(json.dumps(found.trace()) + "\n")
    return {**told, **found.to_json()}


def _print(told: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(_headline(told), highlight=False)
    if "unsupported" in told:
        console.print(f"The compiler does not take it: {told['unsupported']}", highlight=False)
        return
    tuned, baseline = told["tuned"], told["baseline"]
    limits = told["roofline"]
    console.print(f"{told['signature']} at {told['precision']}", highlight=False)
    if told["lowering"] is not None:
        _print_kept(console, told["lowering"])
    console.print(
        f"tuned {tuned['microseconds'] / 1e3:.3f} ms (between calls {tuned['overhead_microseconds']:.1f} us), "
        f"ONNX Runtime {baseline['microseconds'] / 1e3:.3f} ms; "
        f"limits of this machine {limits['gflops']:.0f} GFLOP/s in f32 and {limits['gflops_bf16']:.0f} in bf16, "
        f"{limits['num_threads']} threads",
        highlight=False,
    )
    if tuned["in_place"]:
        parts = sum(one["num_in_place"] for one in tuned["in_place"])
        saved = sum(one["bytes_in_place"] for one in tuned["in_place"])
        console.print(
            f"{len(tuned['in_place'])} concatenations are fused into what computes their parts: {parts} parts, "
            f"{saved / 1e6:.1f} MB, are written in place",
            highlight=False,
        )
    groups = Table(title="tuned, in the order of execution")
    for column in ("group", "layout", "in", "template", "parameters", "us", "share", "GFLOP/s", "of limit"):
        groups.add_column(column, justify="right" if column in ("us", "share", "GFLOP/s", "of limit") else "left")
    shown = sorted(tuned["groups"], key=lambda one: -one["microseconds"])[:_MAX_ROWS]
    for one in tuned["groups"]:
        if one in shown:
            groups.add_row(
                one["what"],
                one["layout"],
                one["precision"],
                one["template"],
                " ".join(f"{name}={value}" for name, value in one["parameters"].items()),
                f"{one['microseconds']:.1f}",
                f"{one['share']:.1%}",
                f"{one['gflops']:.0f}" if one["gflops"] else "",
                "" if one["of_roofline"] is None else f"{one['of_roofline']:.0%}",
            )
    console.print(groups)
    if len(tuned["groups"]) > len(shown):
        console.print(f"and {len(tuned['groups']) - len(shown)} shorter ones (--json has all)", highlight=False)
    layers = Table(title="by layer, against ONNX Runtime")
    for column in ("layer", "tuned us", "ONNX Runtime us", "ratio"):
        layers.add_column(column, justify="left" if column == "layer" else "right")
    for layer in told["layers"]:
        ratio = layer["baseline_us"] / layer["tuned_us"] if layer["tuned_us"] else float("inf")
        layers.add_row(layer["what"], f"{layer['tuned_us']:.1f}", f"{layer['baseline_us']:.1f}", f"{ratio:.2f}")
    console.print(layers)
    console.print(f"ONNX Runtime by operator: {_by_operator(baseline['nodes'])}", highlight=False)
    lost = [layer for layer in told["layers"] if layer["lost"]]
    if lost:
        names = ", ".join(
            f"{layer['what']} ({layer['tuned_us'] - layer['baseline_us']:+.1f} us)" for layer in lost[:_SHOWN_LOST]
        )
        console.print(f"Lost to the baseline: {names}", highlight=False)


def _print_kept(console: Any, lowering: Mapping[str, Any]) -> None:
    """Which layers are kept in float32, and what each does to the outputs when it is not."""
    from rich.table import Table

    console.print(
        f"With all of its {lowering['num_layers']} layers in {lowering['precision']} its outputs would be off by "
        f"{lowering['whole']:.2f} times what is allowed; with {len(lowering['kept'])} of them in f32 they are by "
        f"{lowering['error']:.2f}",
        highlight=False,
    )
    kept = Table(title="kept in f32")
    for column in ("layer", "what", "its error alone"):
        kept.add_column(column, justify="left" if column == "what" else "right")
    for one in lowering["kept"]:
        kept.add_row(str(one["layer"]), one["what"], f"{one['effect']:.2f}")
    console.print(kept)


def _headline(told: Mapping[str, Any]) -> str:
    bucket = told["bucket"]
    if bucket is None:
        state = "this signature was not tuned here"
    elif bucket["engine"] == "tvm":
        state = f"promoted, {bucket['speedup']:.2f} times as fast as the baseline when it was measured"
    else:
        state = f"not promoted: {bucket['reason'] or bucket['outcome'] or 'nothing in the cache'}"
    return f"{told['model']} version {told['version']}: {state}"


def _by_operator(nodes: Sequence[Mapping[str, Any]]) -> str:
    shares: Counter[str] = Counter()
    for node in nodes:
        shares[node["op"]] += node["share"]
    return ", ".join(f"{op} {share:.1%}" for op, share in shares.most_common(_SHOWN_OPERATORS))
