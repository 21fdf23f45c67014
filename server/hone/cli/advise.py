"""`hone advise MODEL`: what a change of the model's sizes, activations or layers would give on a kind of GPU."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from hone.compiler.cuda_target import CudaTarget
    from hone.compiler.workload import Workload
    from hone.kernels import DeviceKey
    from hone.kernels.gpu_key import Gpu

#: Rows of a table; `--json` has them all.
_MAX_ROWS = 20
_WIDTH = 160
#: What is told of where there is no GPU and none is named.
_DEVICE = "h100"
_PRECISIONS = ("f16", "bf16", "tf32", "f32", "int8")


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "advise",
        help="tell what other sizes and layers would cost on a GPU",
        description="Tell which sizes of a model a GPU cannot use well, which activations are free, and where a 1x1"
        " convolution would be nearly so. Costs are measured where the kernels cache knows them for such a GPU, or"
        " where --measure asks for it on the GPU of this machine; else modelled, for which no GPU is needed.",
    )
    parser.add_argument("model", help="name of a model in the repository, or an ONNX file")
    parser.add_argument(
        "--device", metavar="NAME", help="kind of GPU, such as t4, a100, l4 (default: this machine's, else h100)"
    )
    parser.add_argument(
        "--measure",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="measure what is not known yet on this machine's GPU, for so long; kernels are built into the cache",
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
    from hone.compiler.cuda_target import CudaTarget
    from hone.compiler.onnx_import import Unsupported, import_model
    from hone.compiler.phases.precision import Precision
    from hone.engines.onnxruntime import OnnxRuntimeEngine
    from hone.tuning.gpu_parts import target_of

    if arguments.batch < 1:
        raise InvalidRequest(f"--batch: expected 1 or more, found {arguments.batch}")
    if not 0 <= arguments.measure < math.inf:
        raise InvalidRequest(f"--measure: expected a number of seconds, found {arguments.measure:g}")
    gpu = _gpu_here(arguments.device)
    if arguments.measure and gpu is None:
        wanted = f"kind '{arguments.device}'" if arguments.device else "which code is made for"
        raise InvalidRequest(f"--measure: this machine has no GPU of {wanted}; without it costs are modelled")
    target = target_of(gpu.key) if gpu is not None else CudaTarget.preset(arguments.device or _DEVICE)
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
        if arguments.measure and gpu is not None:
            asked = _asked(lambda note: advise(imported, target, choices, note))
            _measure(asked, gpu, arguments.kernels_cache, arguments.precision, arguments.measure)
        is_it = _is_key(gpu.key) if gpu is not None else _is_preset(target)
        advice = advise(imported, target, choices, _measured(arguments.kernels_cache, is_it))
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


def _gpu_here(device: str | None) -> Gpu | None:
    """This machine's GPU, where it is of the kind that is asked for and one that code is made for. Raises
    InvalidRequest for a kind that nobody knows."""
    from hone.compiler.cuda_target import PRESETS, preset_named
    from hone.kernels.gpu_key import unsupported
    from hone.tuning.gpus import look_for_gpus

    if device is not None and device not in PRESETS:
        raise InvalidRequest(f"--device: '{device}' is unknown, expected one of {', '.join(PRESETS)}")
    for gpu in look_for_gpus()[0]:
        if unsupported(gpu.key):
            continue
        if device is None or preset_named(str(gpu.key.fields["name"])) == PRESETS[device]:
            return gpu
    return None


def _is_key(key: DeviceKey) -> Callable[[DeviceKey], bool]:
    return key.__eq__


def _is_preset(target: CudaTarget) -> Callable[[DeviceKey], bool]:
    """Whether a key is of whole cards of this kind."""
    from hone.compiler.cuda_target import preset_named

    return lambda key: preset_named(str(key.fields.get("name", ""))) == target and not key.fields.get("mig")


def _asked(advise: Callable[[Callable[[Workload], None]], object]) -> list[Workload]:
    """Every workload whose cost the advice rests on."""
    asked: list[Workload] = []
    advise(asked.append)
    return list(dict.fromkeys(asked))


def _measure(workloads: Sequence[Workload], gpu: Gpu, folder: Path, precision: str, seconds: float) -> None:
    """Leave decisions in the cache for as many as the time is enough for."""
    from hone.kernels import KernelsCache
    from hone.tuning.gpu_measure import measure_workloads

    def tell(share: float, text: str) -> None:
        print(f"{share:4.0%} {text}", file=sys.stderr, flush=True)

    cache = KernelsCache(folder)
    try:
        cache.describe(gpu.key)
        problem = measure_workloads(workloads, cache, gpu, precision, seconds, tell)
    finally:
        cache.close()
    if problem:
        print(f"not all could be measured: {problem}", file=sys.stderr)


def _measured(folder: Path, is_it: Callable[[DeviceKey], bool]) -> Callable[[Workload], float | None]:
    """Microseconds by workload, from the decisions of all GPUs in the cache that are such a device."""
    from hone.compiler.workload import Workload
    from hone.kernels import Entry, KernelsCache

    if not folder.is_dir():
        return lambda workload: None
    cache = KernelsCache(folder)
    best: dict[str, float] = {}
    try:
        scopes = {scope for scope, key in cache.devices().items() if key is not None and is_it(key)}
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
        ("layer", "activation", "layers", "with it", "without", "it adds", ""),
        [
            (
                row["layer"],
                row["activation"],
                str(row["num_layers"]),
                _cost(row["cost"]),
                _cost(row["without"]),
                _extra(row),
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


def _extra(row: Mapping[str, Any]) -> str:
    at_most = "" if row["source"] == "measured" else "at most "
    return f"{at_most}{row['extra_ratio']:.1%} ({row['source']})"


def _cost(cost: Mapping[str, Any]) -> str:
    return f"{cost['microseconds']:.1f} us ({cost['source']})"
