"""The real compile step: hone's compiler on TVM, and the kernels cache. In the child only: the server has no TVM."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.compiler.artifact import derived_constants, export_artifact
from hone.compiler.build import BuildFailed, GraphRefused, LinkFailed
from hone.compiler.choices import Choices, KernelCall
from hone.compiler.onnx_import import ImportedModel
from hone.compiler.phases.precision import F32, Precision, is_lowered, unsupported
from hone.compiler.pipeline import compile_model, lowerable_layers, template_workloads
from hone.compiler.target import CpuTarget
from hone.engines.tvm import PackedWeights, TvmEngine
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError, HoneError
from hone.kernels import DeviceKey, Entry, Failure, KernelsCache
from hone.specialization import Signature
from hone.tuning.artifacts import ArtifactLoader, Sources, toolchain_of
from hone.tuning.compiling import (
    Artifacts,
    Loaded,
    Settled,
    import_for,
    not_taken,
    report,
    temporary_folder,
    told_counts,
)
from hone.tuning.keeping import Compared, compare, find_layers_to_keep
from hone.tuning.kernel_map import kernel_map
from hone.tuning.lowering import Lowering, find_lowering
from hone.tuning.parallel import parallel_pool
from hone.tuning.preload import programs_give_way
from hone.tuning.schedules import ScheduleSearch
from hone.tuning.search import Search, SearchCounts
from hone.tuning.specialize import Compile, Compiled, Ledger, NotCompiled, Outcome, Told
from hone.tuning.verdicts import Verdicts
from hone.tuning.wire import Message

#: Share of a specialization's time that searching may take, and of the progress it stands for.
_SEARCH_SHARE = 0.6
_SCHEDULE_SHARE = 0.2
#: And at most: first promotions within minutes are worth more than the last percent, which another search, where this
#: one left off, may still find.
_MAX_SEARCH_SECONDS, _MAX_SCHEDULE_SECONDS = 45.0, 15.0
_HEARTBEAT_SECONDS = 5.0
#: Searches take less where layers may have to be found that must stay in float32; these are looked for until so much
#: of the time is over, and the gate has the rest.
_LOWERED_SHARE, _KEEPING_END = 0.7, 0.85
_NOTHING_QUANTIZED = (
    "precision 'int8' is for models that are quantised already: this one has no convolution or matrix product between"
    " DequantizeLinear (of data with one scale, and of int8 weights without zero point) and QuantizeLinear"
)


def open_cache(spec: Message) -> KernelsCache:
    """Raises what only a wrong cache folder can raise."""
    spare = spec.get("spare")
    return KernelsCache(Path(spec["kernels_cache"]), spare=Path(spare) if spare else None)


def open_compiler(spec: Message, cache: KernelsCache) -> tuple[Compile, Ledger]:
    """The compile step and the memory for a job. Raises what only a wrong installation can raise."""
    if spec.get("activity") is not None:
        programs_give_way()
    device = DeviceKey(spec["device_fields"])
    if device.fields["kind"] == "gpu":
        from hone.tuning.gpu_compile import CudaCompile
        from hone.tuning.gpu_parts import open_gpu

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
        self._artifacts = Artifacts(spec, cache, device, self._sources, device.architecture)
        self._pool: tuple[str, Path] | None = None
        #: Layers that had to stay in float32 for an earlier signature of this job.
        self._lowering: Lowering | None = None

    def build(self, signature: Signature, digest: str, seconds: float, tell: Told) -> Compiled | NotCompiled:
        began = time.monotonic()
        self._search.counts = counts = SearchCounts()
        precision = Precision(str(self._spec["precision"]))
        imported = import_for(self._path, signature, unsupported(precision.name, self._target), tell)
        if isinstance(imported, NotCompiled):
            return imported
        try:
            tell(0.1, "looking for workloads")
            known = self._lowering
            if known is not None and known.num_layers == len(lowerable_layers(imported, self._target, precision.name)):
                # What had to stay in float32 at another batch has to here.
                precision = replace(precision, kept=known.layers)
            workloads = template_workloads(imported, self._target, precision)
            if precision.name == "int8" and not any(is_lowered(workload) for workload in workloads):
                return NotCompiled("unsupported", _NOTHING_QUANTIZED)
            self._use_pool()
            searched = 1.0 if precision == F32 else _LOWERED_SHARE
            kernels = self._search.decide(
                workloads,
                min(seconds * _SEARCH_SHARE, _MAX_SEARCH_SECONDS) * searched,
                lambda share, text: tell(0.1 + 0.4 * share, text, **told_counts(counts)),
            )
            schedules = {}
            if not self._spec.get("careful"):
                schedules = self._schedules.decide(
                    imported,
                    min(seconds * _SCHEDULE_SHARE, _MAX_SCHEDULE_SECONDS) * searched,
                    counts,
                    lambda share, text: tell(0.5 + 0.2 * share, text, **told_counts(counts)),
                )
            tell(0.7, "compiling")
            compiling = time.monotonic()
            choices = Choices(kernels=kernels, schedules=schedules, precision=precision)
            settled = Settled(self._make(imported, choices, tell))
            if precision != F32 and isinstance(settled.loaded, Loaded):
                settled = self._hold_tolerance(
                    settled.loaded, imported, choices, signature, began + seconds * _KEEPING_END, tell
                )
            loaded = settled.loaded
            if isinstance(loaded, NotCompiled):
                return loaded
            publish = self._artifacts.publisher(loaded, signature, digest)
            if isinstance(publish, NotCompiled):
                return publish
            told = report(counts, compiling - began, compiling)
            engine = loaded.held()
            return Compiled(
                engine,
                publish,
                told,
                settled.note,
                instances_of=engine.instantiate_with,
                is_open=settled.is_open,
            )
        except GraphRefused as problem:
            tell(0.7, "looking for the operator that the compiler does not take")
            return not_taken(problem, imported, lambda model: compile_model(model, self._target))
        except (BuildFailed, LinkFailed) as problem:
            return NotCompiled("failed", str(problem))

    def _use_pool(self) -> tuple[str, Path]:
        """Parallel loops run here as they do in the server, from now on. Digest and library of the pool that does it.
        Raises BuildFailed and LinkFailed."""
        if self._pool is None:
            self._pool = parallel_pool(self._cache, self._device.architecture)
            self._runtime.parallel.load(self._pool[1], self._runtime.num_threads)
        return self._pool

    def load(self, digest: str) -> Compiled | NotCompiled:
        return self._artifacts.load(digest, self._loader, lambda engine: {"instances_of": engine.instantiate_with})

    def _make(self, imported: Any, choices: Choices, tell: Told | None = None) -> Loaded[TvmEngine] | NotCompiled:
        """Compile, put kernels and constants into the cache, and load the engine from a folder of its own. Raises
        BuildFailed and LinkFailed."""
        compiled = compile_model(imported, self._target, choices)
        folder = temporary_folder()
        place = Path(folder.name)
        pool, library = self._use_pool()
        kernels: dict[str, Path] = {pool: library}
        self._build_kernels(compiled.kernels, place)
        for call in compiled.kernels:
            found = self._kernel(call, place)
            if isinstance(found, str):
                return NotCompiled("failed", found)
            kernels[call.digest] = found
        constants_digest = self._artifacts.keep_constants(derived_constants(imported))
        if isinstance(constants_digest, NotCompiled):
            return constants_digest
        if tell is not None:
            tell(0.72, "linking")
        exported = export_artifact(compiled, imported, constants_digest, place, pool)
        known = kernel_map(compiled.kernels, compiled.functions, self._search.ranking, self._schedules.nanoseconds)
        exported = exported.telling(kernel_map=known)
        try:
            engine = TvmEngine.load(
                place,
                exported.manifest,
                model=self._path,
                kernels=kernels,
                constants=self._artifacts.constants,
                runtime=self._runtime,
                packed=self._packed,
            )
        except EngineError as problem:
            return NotCompiled("failed", str(problem))
        return Loaded(engine, exported, folder)

    def _hold_tolerance(
        self,
        loaded: Loaded[TvmEngine],
        imported: ImportedModel,
        choices: Choices,
        signature: Signature,
        deadline: float,
        tell: Told,
    ) -> Settled[TvmEngine]:
        """The engine, made again with single layers in float32 where its outputs are too far off; and which those are.

        Where that does not help the engine stays as it is: the gate says no, with its numbers.
        """
        found = compare(self._artifacts, signature, loaded, imported, choices, deadline, tell)
        if found is None:
            return Settled(loaded)
        if found.holds:
            if self._lowering is None or not choices.precision.kept:
                return Settled(loaded)
            known = replace(self._lowering, error=found.share)
            return Settled(_described(loaded, known), known.note)
        return self._keep_rounded(loaded, found) if found.name == "bf16" else self._keep_stretches(loaded, found)

    def _keep_rounded(self, loaded: Loaded[TvmEngine], miss: Compared) -> Settled[TvmEngine]:
        """Where layers can be measured one by one: see `lowering.py`."""
        made: list[Loaded[TvmEngine]] = []
        found, problem, is_open = None, "no layers to keep in f32 were found", False

        def attempt(lowering: Lowering) -> float | None:
            nonlocal problem, is_open
            again = self._make_again(miss, Precision(lowering.precision, lowering.layers), miss.seconds_left / 3)
            if isinstance(again, NotCompiled):
                problem, is_open = f"which layers to keep in f32 was not found: {again.reason}", True
                return None
            made.append(again)
            return miss.error_of(again.engine.instantiate())

        whole = self._lowering.whole if self._lowering is not None else miss.share
        try:
            found = find_lowering(
                miss.imported,
                self._target,
                miss.error_of,
                attempt,
                whole=whole,
                deadline=miss.deadline,
                num_builders=self._search.num_builders,
                tell=miss.tell,
            )
        except (HoneError, BuildFailed, LinkFailed) as failure:
            problem, is_open = f"which layers to keep in f32 was not found: {failure}", True
        for one in made if found is None else [loaded, *made[:-1]]:
            one.close()
        if found is None:
            if not is_open and time.monotonic() > miss.deadline:
                problem, is_open = f"{problem} in the time that there was", True
            return Settled(loaded, f"{miss.told}, and {problem}", is_open)
        self._lowering = found
        return Settled(_described(made[-1], found), found.note)

    def _keep_stretches(self, loaded: Loaded[TvmEngine], miss: Compared) -> Settled[TvmEngine]:
        """Where every question costs a compilation: see `keeping.py`."""
        layers = lowerable_layers(miss.imported, self._target, miss.name)

        def make(kept: frozenset[int]) -> Loaded[TvmEngine] | NotCompiled:
            return self._make(miss.imported, replace(miss.choices, precision=Precision(miss.name, kept)))

        found = find_layers_to_keep(miss, layers, make)
        if found.kept is None:
            return Settled(loaded, found.note, found.is_open)
        loaded.close()
        precision = Precision(miss.name, found.kept.layers)
        return Settled(self._make_again(miss, precision, miss.seconds_left, miss.tell), found.note)

    def _make_again(
        self, miss: Compared, precision: Precision, seconds: float, tell: Told | None = None
    ) -> Loaded[TvmEngine] | NotCompiled:
        """With kernels searched for this precision. Raises BuildFailed and LinkFailed."""
        workloads = template_workloads(miss.imported, self._target, precision)
        kernels = self._search.decide(workloads, seconds, lambda share, text: None)
        return self._make(miss.imported, replace(miss.choices, kernels=kernels, precision=precision), tell)

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


def _described(loaded: Loaded[TvmEngine], lowering: Lowering) -> Loaded[TvmEngine]:
    """With a manifest that tells the layers that are kept."""
    return replace(loaded, exported=loaded.exported.telling(lowering=lowering.to_json()))


def _library(place: Path, call: KernelCall) -> Path:
    return place / f"{call.digest}.so"
