"""The real compile step: hone's compiler on TVM, and the kernels cache. In the child only: the server has no TVM."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hone.compiler.artifact import ExportedArtifact, derived_constants, export_artifact
from hone.compiler.build import BuildFailed, LinkFailed
from hone.compiler.choices import Choices, KernelCall
from hone.compiler.onnx_import import Unsupported, import_model
from hone.compiler.phases.precision import F32, Precision, is_lowered, unsupported
from hone.compiler.pipeline import compile_model, lowerable_layers, template_workloads
from hone.compiler.target import CpuTarget
from hone.engines.onnxruntime import OnnxRuntimeEngine
from hone.engines.tvm import PackedWeights, TvmEngine
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError, HoneError
from hone.kernels import DeviceKey, Entry, Failure, KernelsCache, load_constants, publish_constants
from hone.specialization import Signature
from hone.tuning.artifacts import ArtifactLoader, Sources, Terms, artifact_key, parts_of, toolchain_of
from hone.tuning.domains import derive_domains
from hone.tuning.samples import unpack
from hone.tuning.schedules import ScheduleSearch
from hone.tuning.search import Search, SearchCounts
from hone.tuning.sensitivity import OutputError, find_kept
from hone.tuning.specialize import Compile, Compiled, Ledger, NotCompiled, Outcome, Told, baseline_settings
from hone.tuning.trial import NoTrial, gather
from hone.tuning.verdicts import Verdicts
from hone.tuning.wire import Message

#: Share of a specialization's time that searching may take, and of the progress it stands for.
_SEARCH_SHARE = 0.6
_SCHEDULE_SHARE = 0.2
_HEARTBEAT_SECONDS = 5.0
#: Share of the time in which layers are looked for that must stay in float32, where low precision is not enough.
_KEEPING_SHARE = 0.5
_NOTHING_QUANTIZED = (
    "precision 'int8' is for models that are quantised already: this one has no convolution or matrix product between"
    " DequantizeLinear (of data with one scale, and of int8 weights without zero point) and QuantizeLinear"
)
#: Layers that a note names.
_MAX_NAMED = 6


def open_compiler(spec: Message) -> tuple[Compile, Ledger]:
    """The compile step and the memory for a job. Raises what only a wrong installation or cache folder can raise."""
    spare = spec.get("spare")
    cache = KernelsCache(Path(spec["kernels_cache"]), spare=Path(spare) if spare else None)
    device = DeviceKey(spec["device_fields"])
    if device.fields["kind"] == "gpu":
        from hone.tuning.gpu_compile import CudaCompile, open_gpu

        return CudaCompile(spec, cache, device, open_gpu(spec, cache, device)), CacheLedger(cache, device.digest)
    return TvmCompile(spec, cache, device), CacheLedger(cache, device.digest)


class CacheLedger:
    """See `specialize.Ledger`."""

    def __init__(self, cache: KernelsCache, scope: str) -> None:
        self._cache = cache
        self._scope = scope
        self._verdicts = Verdicts(cache, scope)

    @contextmanager
    def lock(self, digest: str, waiting: Callable[[], None]) -> Iterator[None]:
        told = [time.monotonic()]

        def still_waiting() -> bool:
            if time.monotonic() - told[0] > _HEARTBEAT_SECONDS:
                told[0] = time.monotonic()
                waiting()
            return False

        with self._cache.lock("artifacts", digest, self._scope, cancelled=still_waiting):
            yield

    def known(self, digest: str) -> tuple[Outcome, str, Mapping[str, Any]] | None:
        found = self._verdicts.recall(digest)
        if found.state in ("absent", "unproven", "quarantined"):
            return None
        return found.state, found.reason, found.verdict  # type: ignore[return-value]

    def keep_refusal(self, digest: str, outcome: str, reason: str, verdict: Mapping[str, Any]) -> None:
        self._verdicts.keep_refusal(digest, outcome, reason, verdict)


class TvmCompile:
    """See `specialize.Compile`."""

    def __init__(self, spec: Message, cache: KernelsCache, device: DeviceKey) -> None:
        self._spec = spec
        self._path = Path(spec["path"])
        self._cache = cache
        self._device = device
        self._sources = Sources.installed()
        self._target = CpuTarget.detect(int(spec["run_threads"]))
        self._runtime = TvmRuntime.load(int(spec["run_threads"]))
        self._packed = PackedWeights()
        num_builders = max(1, int(spec.get("build_threads", 1)))
        self._search = Search(cache, device, self._target, self._sources, num_builders=num_builders)
        self._schedules = ScheduleSearch(cache, device, self._target, self._sources)
        self._loader = ArtifactLoader(cache, [device], self._runtime, self._packed)

    def build(self, signature: Signature, digest: str, seconds: float, tell: Told) -> Compiled | NotCompiled:
        began = time.monotonic()
        self._search.counts = counts = SearchCounts()
        precision = Precision(str(self._spec["precision"]))
        refused = unsupported(precision.name, self._target)
        if refused:
            return NotCompiled("unsupported", refused)
        tell(0.0, "importing")
        imported = import_model(self._path, signature.shapes)
        if isinstance(imported, Unsupported):
            return NotCompiled("unsupported", _told_operator(imported), imported.operator)
        tell(0.1, "looking for workloads")
        try:
            workloads = template_workloads(imported, self._target, precision)
            if precision.name == "int8" and not any(is_lowered(workload) for workload in workloads):
                return NotCompiled("unsupported", _NOTHING_QUANTIZED)
            kernels = self._search.decide(
                workloads,
                seconds * _SEARCH_SHARE,
                lambda share, text: tell(0.1 + 0.4 * share, text, **_tried(counts)),
            )
            schedules = {}
            if not self._spec.get("careful"):
                schedules = self._schedules.decide(
                    imported,
                    seconds * _SCHEDULE_SHARE,
                    counts,
                    lambda share, text: tell(0.5 + 0.2 * share, text, **_tried(counts)),
                )
            tell(0.7, "compiling")
            compiling = time.monotonic()
            choices = Choices(kernels=kernels, schedules=schedules, precision=precision)
            loaded, note = self._make(imported, choices, tell), ""
            if precision != F32 and isinstance(loaded, _Loaded):
                loaded, note = self._hold_tolerance(imported, choices, loaded, signature, seconds, tell)
            if isinstance(loaded, NotCompiled):
                return loaded
            return self._finish(loaded, signature, digest, note, _report(counts, compiling - began, compiling))
        except (BuildFailed, LinkFailed) as problem:
            return NotCompiled("failed", str(problem))

    def load(self, digest: str) -> Compiled | NotCompiled:
        entry = self._cache.get("artifacts", digest, self._device.digest)
        if not isinstance(entry, Entry):
            return NotCompiled("failed", f"the artifact is no longer in the cache ({entry.reason.value})")
        try:
            engine = self._loader.load(digest, self._device.digest, self._path)
        except EngineError as problem:
            return NotCompiled("failed", str(problem))

        def prove(told: Mapping[str, Any]) -> str:
            self._cache.prove(entry)
            Verdicts(self._cache, self._device.digest).keep_measured(digest, told["verdict"])
            return ""

        return Compiled(engine, prove, instances_of=engine.instantiate_with)

    def _make(self, imported: Any, choices: Choices, tell: Told | None = None) -> _Loaded | NotCompiled:
        """Compile, put kernels and constants into the cache, and load the engine from a folder of its own. Raises
        BuildFailed and LinkFailed."""
        compiled = compile_model(imported, self._target, choices)
        folder = tempfile.TemporaryDirectory(prefix="hone-artifact-", ignore_cleanup_errors=True)
        place = Path(folder.name)
        kernels: dict[str, Path] = {}
        self._build_kernels(compiled.kernels, place)
        for call in compiled.kernels:
            found = self._kernel(call, place)
            if isinstance(found, str):
                return NotCompiled("failed", found)
            kernels[call.digest] = found
        constants_digest = None
        constants = derived_constants(imported)
        if constants:
            kept = publish_constants(self._cache, constants)
            if isinstance(kept, Failure):
                return NotCompiled("failed", f"its constants could not be kept: {kept.reason.value} ({kept.detail})")
            constants_digest = kept.digest
        if tell is not None:
            tell(0.72, "linking")
        exported = export_artifact(compiled, imported, constants_digest, place)
        try:
            engine = TvmEngine.load(
                place,
                exported.manifest,
                model=self._path,
                kernels=kernels,
                constants=self._constants,
                runtime=self._runtime,
                packed=self._packed,
            )
        except EngineError as problem:
            return NotCompiled("failed", str(problem))
        return _Loaded(engine, exported, folder)

    def _hold_tolerance(
        self, imported: Any, choices: Choices, loaded: _Loaded, signature: Signature, seconds: float, tell: Told
    ) -> tuple[_Loaded | NotCompiled, str]:
        """The engine, made again with single layers in float32 where its outputs are too far off; and which those are.

        Where that does not help the engine stays as it is: the gate says no, with its numbers.
        """
        tell(0.75, "comparing outputs in low precision")
        error_of = self._output_error(signature)
        if error_of is None:
            return loaded, ""
        share = error_of(loaded.engine.instantiate())
        if share <= 1.0:
            return loaded, ""
        name = choices.precision.name
        layers = lowerable_layers(imported, self._target, name)
        deadline = time.monotonic() + seconds * _KEEPING_SHARE
        num_tried = 0

        def error(kept: frozenset[int]) -> float | None:
            nonlocal num_tried
            if time.monotonic() > deadline:
                return None
            num_tried += 1
            tell(0.75, f"looking for layers to keep in f32: {num_tried} tried", num_tried=num_tried)
            made = self._make(imported, replace(choices, precision=Precision(name, kept)))
            if isinstance(made, NotCompiled):
                return None
            try:
                return error_of(made.engine.instantiate())
            finally:
                made.close()

        try:
            kept = find_kept(len(layers), error)
        except HoneError as problem:
            return loaded, f"which layers to keep in f32 was not found: {problem}"
        if kept is None:
            off = f"in {name} its outputs are off by {share:.2g} times what is allowed"
            return loaded, f"{off}, and no layers to keep in f32 were found"
        loaded.close()
        tell(0.9, f"keeping {len(kept.layers)} of {len(layers)} layers in f32")
        precision = Precision(name, kept.layers)
        workloads = template_workloads(imported, self._target, precision)
        kernels = self._search.decide(workloads, max(1.0, deadline - time.monotonic()), lambda share, text: None)
        told = [f"{at} ({layers[at]})" for at in sorted(kept.layers)]
        more = f" and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
        note = f"kept in f32: {len(told)} of {len(layers)} layers: {', '.join(told[:_MAX_NAMED])}{more}"
        return self._make(imported, replace(choices, kernels=kernels, precision=precision), tell), note

    def _output_error(self, signature: Signature) -> OutputError | None:
        """None where nothing can be compared; the gate says why."""
        spec = self._spec
        baseline = OnnxRuntimeEngine.load(self._path, baseline_settings(spec))
        domains: Any = derive_domains(self._path, signature.specs)
        samples = unpack(spec["samples"]) if spec.get("samples") is not None else ()
        batching = int(spec["max_batch_size"]) > 0
        evidence = gather(baseline, baseline.outputs, signature, domains, samples, batching=batching)
        if isinstance(evidence, NoTrial):
            return None
        return OutputError(evidence, baseline.outputs, signature, str(spec["precision"]), spec.get("tolerance"))

    def _finish(
        self, loaded: _Loaded, signature: Signature, digest: str, note: str, report: Mapping[str, Any]
    ) -> Compiled | NotCompiled:
        key = self._key(signature)
        if key.digest != digest:
            return NotCompiled("failed", "the server and its tuning process do not agree on the artifact's name")
        exported = loaded.exported

        def publish(told: Mapping[str, Any]) -> str:
            requires = [
                {"kind": kind, "digest": part, "scope": scope}
                for kind, part, scope in parts_of(exported.manifest, self._device.architecture)
            ]
            manifest = {**exported.manifest, **told, "key": key.fields, "requires": requires}
            self._cache.describe(self._device)
            done = self._cache.publish("artifacts", digest, self._device.digest, dict(exported.files), manifest)
            loaded.folder.cleanup()
            return f"{done.reason.value} ({done.detail})" if isinstance(done, Failure) else ""

        return Compiled(loaded.engine, publish, report, note, instances_of=loaded.engine.instantiate)

    def _build_kernels(self, calls: Sequence[KernelCall], place: Path) -> None:
        """Libraries of the kernels that the cache does not hold, side by side: linking is another process's work.
        Raises BuildFailed and LinkFailed."""
        missing = [
            call
            for call in calls
            if not isinstance(self._cache.get("kernels", call.digest, self._device.architecture), Entry)
        ]

        def build(call: KernelCall) -> None:
            built = self._search.built.get(call.digest) or call.build(self._target)
            built.export(_library(place, call))

        with ThreadPoolExecutor(self._search.num_builders, thread_name_prefix="link") as linkers:
            for _ in linkers.map(build, missing):
                pass

    def _kernel(self, call: Any, place: Path) -> Path | str:
        """The kernel's library, from the cache or (built by now) into it; or why there is none."""
        found = self._cache.get("kernels", call.digest, self._device.architecture)
        if isinstance(found, Entry) and KERNEL_FILE in found.files:
            return found.files[KERNEL_FILE]
        path = _library(place, call)
        told = {"workload": call.workload.fields(), "candidate": call.candidate.fields()}
        kept = self._cache.publish(
            "kernels",
            call.digest,
            self._device.architecture,
            {KERNEL_FILE: path},
            {**told, "toolchain": {"cxx": toolchain_of(self._device).cxx, "tvm": toolchain_of(self._device).tvm}},
        )
        if isinstance(kept, Failure):
            return f"a kernel could not be kept: {kept.reason.value} ({kept.detail})"
        return kept.files[KERNEL_FILE]

    def _constants(self, digest: str) -> Mapping[str, Any]:
        entry = self._cache.get("constants", digest)
        if not isinstance(entry, Entry):
            raise EngineError(f"constants {digest[:12]} are no longer in the cache")
        return load_constants(entry)

    def _key(self, signature: Signature) -> Any:
        spec = self._spec
        return artifact_key(
            graph=spec["graph"],
            signature=signature,
            precision=spec["precision"],
            objective=spec["objective"],
            terms=Terms(spec["tolerance"], spec["margin"], spec["run_threads"], spec["graph_level"]),
            device=self._device,
            sources=self._sources,
        )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """An engine, and the artifact that it runs, in a folder that goes with it."""

    engine: TvmEngine
    exported: ExportedArtifact
    folder: tempfile.TemporaryDirectory[str]

    def close(self) -> None:
        self.engine.close()
        self.folder.cleanup()


def _tried(counts: SearchCounts) -> dict[str, int]:
    """How far the search is, for people."""
    return {"num_built": counts.num_built, "num_measured": counts.num_measured, "num_failed": counts.num_failed}


def _report(counts: SearchCounts, search_seconds: float, compiling: float) -> dict[str, Any]:
    """What making it took; `compiling` is the time at which compiling began."""
    return {
        "candidates_built": counts.num_built,
        "candidates_measured": counts.num_measured,
        "candidates_failed": counts.num_failed,
        "candidates_cut": counts.num_cut,
        "workloads_remembered": counts.num_remembered,
        "search_seconds": search_seconds,
        "compile_seconds": counts.build_seconds + time.monotonic() - compiling,
        "measure_seconds": counts.measure_seconds,
    }


def _library(place: Path, call: KernelCall) -> Path:
    return place / f"{call.digest}.so"


def _told_operator(unsupported: Unsupported) -> str:
    if unsupported.operator and unsupported.operator not in unsupported.reason:
        return f"operator {unsupported.operator}: {unsupported.reason}"
    return unsupported.reason
