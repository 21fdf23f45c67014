"""`hone advise MODEL`: what a change of the model's sizes, activations or layers would give on a kind of GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.errors import EngineError, InvalidRequest

#: Rows of a table; `--json` has them all.
_MAX_ROWS = 20
_WIDTH = 160
_PRECISIONS = ("f16", "bf16", "tf32", "f32", "int8")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "advise",
        help="tell what other sizes and layers would cost on a GPU",
        description="Tell which sizes of a model a GPU cannot use well, which activations are free, and where a 1x1"
        " convolution would be nearly so. Costs are measured where the kernels cache knows them for such a GPU, else"
        " modelled; no GPU is needed.",
    )
    parser.add_argument("model", help="name of a model in the repository, or an ONNX file")
    parser.add_argument(
        "--device", default="h100", metavar="NAME", help="kind of GPU, such as t4, a100, l4 (default: %(default)s)"
    )
    parser.add_argument("--precision", choices=_PRECISIONS, default="f16", help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="batch size (default: %(default)s)")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME:DIMS", help="an input's shape, such as image:8x3x224x224"
    )
    parser.add_argument("--model-repository", type=Path, default=Path("model_repo"), help="(default: %(default)s)")
    parser.add_argument("--kernels-cache", type=Path, default=Path("kernels_cache"), help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from hone.compiler.build import BuildFailed
    from hone.compiler.choices import Choices
    from hone.compiler.cuda.advice import advise
    from hone.compiler.cuda.precision import unsupported
    from hone.compiler.cuda_target import PRESETS, CudaTarget
    from hone.compiler.onnx_import import Unsupported, import_model
    from hone.compiler.phases.precision import Precision
    from hone.engines.onnxruntime import OnnxRuntimeEngine

    if arguments.device not in PRESETS:
        raise InvalidRequest(f"--device: '{arguments.device}' is unknown, expected one of {', '.join(PRESETS)}")
    if arguments.batch < 1:
        raise InvalidRequest(f"--batch: expected 1 or more, found {arguments.batch}")
    target = CudaTarget.preset(arguments.device)
    reason = unsupported(arguments.precision, target.compute_capability)
    if reason:
        raise InvalidRequest(f"--precision: {reason}")
    path = _path_of(arguments.model, arguments.model_repository)
    engine = OnnxRuntimeEngine.load(path)
    try:
        shapes = _shapes({spec.name: spec.shape for spec in engine.inputs}, arguments.shape, arguments.batch)
    finally:
        engine.close()
    choices = Choices(precision=Precision(arguments.precision))
    try:
        imported = import_model(path, shapes)
        if isinstance(imported, Unsupported):
            raise EngineError(f"{arguments.model}: the compiler does not take it: {imported.reason}")
        advice = advise(imported, target, choices, _measured(arguments.kernels_cache, target.name, target.arch))
    except BuildFailed as problem:
        raise EngineError(f"{arguments.model} does not compile: {problem}") from problem
    told = {"model": arguments.model, "shapes": {name: list(s) for name, s in shapes.items()}, **advice.to_json()}
    if arguments.json:
        print(json.dumps(told))
    else:
        _print(told)
    return 0


def _path_of(model: str, repository_path: Path) -> Path:
    """The ONNX file of a model that is named or given as a file."""
    from hone.repository import ModelRepository

    given = Path(model)
    if given.suffix == ".onnx" and given.is_file():
        return given
    repository = ModelRepository((repository_path,))
    try:
        definition = repository.read(model)
    finally:
        repository.close()
    return definition.versions[max(definition.versions)]


def _shapes(inputs: Mapping[str, Sequence[int]], given: Sequence[str], batch: int) -> dict[str, tuple[int, ...]]:
    """Every input's shape: as given, else as the model has it with the batch where its first dimension is free."""
    named: dict[str, tuple[int, ...]] = {}
    for text in given:
        name, _, dims = text.rpartition(":")
        parts = dims.split("x")
        if name not in inputs:
            raise InvalidRequest(f"--shape: the model has no input '{name}', only {', '.join(inputs)}")
        if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
            raise InvalidRequest(f"--shape: expected dimensions such as 8x3x224x224, found '{dims}'")
        named[name] = tuple(int(part) for part in parts)
    for name, shape in inputs.items():
        if name in named:
            continue
        filled = tuple(batch if at == 0 and dim < 0 else dim for at, dim in enumerate(shape))
        if any(dim < 0 for dim in filled):
            told = "x".join("?" if dim < 0 else str(dim) for dim in filled)
            raise InvalidRequest(
                f"input '{name}' is {told}: give its shape with --shape {name}:{told.replace('?', 'N')}"
            )
        named[name] = filled
    return named


def _measured(folder: Path, device: str, arch: str) -> Any:
    """Microseconds by workload, from the decisions of all GPUs in the cache that are such a device."""
    from hone.compiler.workload import Workload
    from hone.kernels import Entry, KernelsCache

    if not folder.is_dir():
        return lambda workload: None
    cache = KernelsCache(folder)
    best: dict[str, float] = {}
    try:
        scopes = {
            scope
            for scope, key in cache.devices().items()
            if key is not None
            and str(key.fields.get("architecture", "")).removeprefix("sm_") == arch
            and device in str(key.fields.get("name", "")).lower().replace(" ", "")
        }
        for listed in cache.entries():
            if listed.name.kind != "decisions" or listed.name.scope not in scopes:
                continue
            entry = cache.peek(listed.name)
            if not isinstance(entry, Entry):
                continue
            try:
                workload = Workload.from_fields(entry.manifest["key"]["workload"])
                ranking = json.loads(entry.files["ranking.json"].read_bytes())["ranking"]
                best[workload.digest] = min(float(one["ns"]) for one in ranking) / 1e3
            except (OSError, KeyError, TypeError, ValueError):
                continue  # another form of decision, or gone meanwhile: modelled instead
    finally:
        cache.close()
    return lambda workload: best.get(workload.digest)


def _print(told: Mapping[str, Any]) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(f"{told['model']} on {told['device']} in {told['precision']}", highlight=False)
    _table(
        console,
        "Sizes that are not read at full width",
        ("layer", "sizes", "padded", "as it is", "padded", "were it wider", ""),
        [
            (
                row["layer"],
                _pair(row["sizes"]),
                _pair(row["padded_sizes"]),
                _cost(row["unpadded"]),
                _cost(row["padded"]),
                _cost(row["wider"]),
                "copies its data" if row["copies_data"] else "",
            )
            for row in told["unaligned"]
        ],
        "All sizes are read at full width.",
    )
    _table(
        console,
        "Activations in epilogues",
        ("layer", "activation", "layers", "any other adds at most", ""),
        [
            (
                row["layer"],
                row["activation"],
                str(row["num_layers"]),
                f"{row['extra_ratio']:.1%}",
                "free" if row["is_free"] else "",
            )
            for row in told["activations"]
        ],
        "No layer has an activation in its epilogue.",
    )
    _table(
        console,
        "3x3 convolutions that a 1x1 could follow in the same kernel",
        ("layer", "layers", "alone", "with a 1x1 of its own", "in one kernel"),
        [
            (
                row["layer"],
                str(row["num_layers"]),
                _cost(row["alone"]),
                _cost(row["with_kernel_of_its_own"]),
                _cost(row["fused"]),
            )
            for row in told["deepen"]
        ],
        "No 3x3 convolution keeps its channels in one block.",
    )
    _table(
        console,
        "Layers back to back that one kernel can do",
        ("first", "second", "pairs", "two kernels", "one kernel"),
        [
            (row["first"], row["second"], str(row["num_pairs"]), _cost(row["apart"]), _cost(row["fused"]))
            for row in told["pairs"]
        ],
        "No two layers fit into one kernel.",
    )


def _table(console: Any, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], otherwise: str) -> None:
    from rich.table import Table

    if not rows:
        console.print(otherwise, highlight=False)
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows[:_MAX_ROWS]:
        table.add_row(*row)
    console.print(table)
    if len(rows) > _MAX_ROWS:
        console.print(f"and {len(rows) - _MAX_ROWS} more: see --json", highlight=False)


def _pair(sizes: Sequence[int]) -> str:
    return " -> ".join(map(str, sizes))


def _cost(cost: Mapping[str, Any]) -> str:
    return f"{cost['microseconds']:.1f} us ({cost['source']})"
