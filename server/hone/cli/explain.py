"""`hone explain MODEL`: where a model's time goes, tuned and on its baseline, and why it was or was not promoted."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.cli.explain_report import print_explanation
from hone.config import Settings
from hone.errors import ConfigError, EngineError, InvalidRequest
from hone.specialization import CPU

if TYPE_CHECKING:
    from hone.repository import ModelDefinition
    from hone.specialization import Signature

#: So many that no configuration names more of them.
_MANY_GPUS = 1024


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="show where a model's time goes",
        description="Profile a model as it was tuned here, and on its baseline, layer by layer. Of what was tuned on"
        " GPUs it shows the times that the search measured there: nothing runs, and no GPU is needed.",
    )
    parser.add_argument("model", help="name of a model in the repository")
    parser.add_argument("--model-repository", type=Path, default=Path("model_repo"), help="(default: %(default)s)")
    parser.add_argument("--kernels-cache", type=Path, default=Path("kernels_cache"), help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="batch size (default: %(default)s)")
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="explain the module for CPUs or those for GPUs only (default: for what its instances run on, and what is"
        " kept for GPUs)",
    )
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
        print_explanation(told)
    return 0


def _explained(settings: Settings, arguments: argparse.Namespace) -> dict[str, Any]:
    """Status and explanation as JSON. Raises HoneError."""
    from hone.cli.tune import tune
    from hone.tuning.gpus import detect_gpus

    subject = subject_of(settings, arguments, len(detect_gpus()))
    if arguments.trace is not None and not subject.profiles:
        raise InvalidRequest("--trace: a module for GPUs is not profiled, so there is no run of it to write down")
    status: dict[str, Any] = {"state": None, "reason": "", "buckets": []}
    if subject.runs_here:
        (status,) = asyncio.run(tune(settings, [arguments.model], lambda status: None))
    buckets = [one for one in status["buckets"] if one["signature"] == subject.signature.text]
    told: dict[str, Any] = {
        "model": arguments.model,
        "version": str(subject.version),
        "signature": subject.signature.text,
        "state": status["state"],
        "reason": status["reason"],
        "bucket": next((one for one in buckets if (one["device"] == CPU) == subject.profiles), None),
    }
    if arguments.device != "cpu":
        told["gpus"] = _kept_for_gpus(settings, subject, buckets)
    if not subject.profiles:
        if not told["gpus"]:
            raise EngineError(_nothing_kept(told))
        return told
    return {**told, **_profiled(settings, arguments, subject, told["bucket"])}


@dataclass(frozen=True, slots=True)
class Subject:
    """The newest version of a model at one signature."""

    definition: ModelDefinition
    signature: Signature
    runs_here: bool
    """Whether this machine has what its configuration asks for and something here may serve it."""
    profiles: bool
    """Whether its module for CPUs is to be profiled."""

    @property
    def version(self) -> int:
        return max(self.definition.versions)

    @property
    def path(self) -> Path:
        return self.definition.versions[self.version]


def subject_of(settings: Settings, arguments: argparse.Namespace, num_gpus: int) -> Subject:
    """Raises HoneError."""
    from hone.engines.onnxruntime import OnnxRuntimeEngine
    from hone.repository import narrowed
    from hone.tuning.places import MAX_SIGNATURES
    from hone.tuning.served import accelerator_parameters
    from hone.tuning.settings import model_tuning
    from hone.tuning.signatures import wanted_signatures

    definition, has_gpus = _definition(settings, arguments, num_gpus)
    profiles = arguments.device == "cpu" or (arguments.device is None and not _is_on_gpus(definition, num_gpus))
    engine = OnnxRuntimeEngine.load(definition.versions[max(definition.versions)])
    inputs = narrowed(engine.inputs, definition.config)
    engine.close()
    tuning = model_tuning(accelerator_parameters(definition.config, gpu=not profiles), inputs, "cache")
    max_batch_size = definition.config.max_batch_size
    signatures = wanted_signatures(inputs, max_batch_size, named=tuning.signatures)[:MAX_SIGNATURES]
    if max_batch_size > 0 and signatures:
        signatures = [signatures[0].with_rows(arguments.batch), *signatures]
    signature = next((one for one in signatures if one.rows == arguments.batch), None)
    if signature is None:
        known = ", ".join(one.text for one in signatures) or "none"
        raise InvalidRequest(
            f"{arguments.model} has no known signature of batch {arguments.batch} (known: {known}); "
            "name one in its configuration (parameter 'signatures' of its accelerator)"
        )
    return Subject(definition, signature, has_gpus and (profiles or num_gpus > 0), profiles)


def _definition(settings: Settings, arguments: argparse.Namespace, num_gpus: int) -> tuple[ModelDefinition, bool]:
    """The model, and whether the GPUs that its configuration asks for are here: what is kept for others can be told of
    without them. Raises HoneError."""
    from hone.repository import ModelRepository

    def read(num_gpus: int) -> ModelDefinition:
        with closing(ModelRepository(settings.model_repository, num_gpus=num_gpus)) as repository:
            return repository.read(arguments.model)

    try:
        return read(num_gpus), True
    except ConfigError:
        if arguments.device == "cpu":
            raise
        with suppress(ConfigError):
            definition = read(_MANY_GPUS)
            if any(group.kind == group.KIND_GPU for group in definition.config.instance_group):
                return definition, False
        raise


def _is_on_gpus(definition: ModelDefinition, num_gpus: int) -> bool:
    """Whether all of its instances are on GPUs, as the server fills in what the configuration leaves open."""
    groups = definition.config.instance_group
    if not groups:
        return num_gpus > 0
    return all(group.kind == group.KIND_GPU or (group.kind == group.KIND_AUTO and num_gpus) for group in groups)


def _kept_for_gpus(settings: Settings, subject: Subject, buckets: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    from hone.dashboard.kernel_map import read_gpu_maps
    from hone.tuning.artifacts import Sources

    return read_gpu_maps(
        settings.kernels_cache,
        subject.definition.version_fingerprints[subject.version],
        {tensor.name: [tensor.datatype, list(tensor.shape)] for tensor in subject.signature.tensors},
        sources=asdict(Sources.installed()),
        serving={one["artifact"] for one in buckets if one["device"] != CPU and one["engine"] == "tvm"},
    )


def _nothing_kept(told: Mapping[str, Any]) -> str:
    bucket = told["bucket"]
    why = f": {bucket['reason'] or bucket['outcome']}" if bucket is not None and bucket["engine"] != "tvm" else ""
    return (
        f"{told['model']} version {told['version']}: the kernels cache keeps no module for a GPU at {told['signature']}"
        f"{why}. Tune it on a machine with the GPU ('hone tune {told['model']}') or bring that machine's cache here"
        " ('hone cache import'); '--device cpu' profiles its module for CPUs"
    )


def _profiled(
    settings: Settings, arguments: argparse.Namespace, subject: Subject, bucket: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What profiling the module for CPUs tells. Raises HoneError."""
    from hone.compiler.build import BuildFailed, LinkFailed
    from hone.compiler.onnx_import import Unsupported
    from hone.engines.onnxruntime import OnnxRuntimeEngine
    from hone.kernels import DeviceKey, KernelsCache
    from hone.repository import narrowed
    from hone.tuning.domains import derive_domains
    from hone.tuning.explanation import explain
    from hone.tuning.served import accelerator_parameters
    from hone.tuning.settings import model_tuning
    from hone.tuning.trial import NoTrial, gather

    config, signature = subject.definition.config, subject.signature
    engine = OnnxRuntimeEngine.load(subject.path)
    domains = derive_domains(subject.path, signature.specs)
    evidence = gather(engine, engine.outputs, signature, domains, (), batching=config.max_batch_size > 0)
    tuning = model_tuning(accelerator_parameters(config), narrowed(engine.inputs, config), "cache")
    engine.close()
    if isinstance(evidence, NoTrial):
        raise EngineError(f"{arguments.model}: there are no inputs to profile it with: {evidence.reason}")
    tell = (lambda text: print(text, file=sys.stderr, flush=True)) if sys.stderr.isatty() else (lambda text: None)
    try:
        found = explain(
            subject.path,
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
    if isinstance(found, Unsupported):
        return {"unsupported": found.reason, "operator": found.operator}
    if arguments.trace is not None:
        arguments.trace.write_text(json.dumps(found.trace()) + "\n")
    return found.to_json()
