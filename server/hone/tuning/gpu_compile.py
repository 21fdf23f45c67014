"""The compile step for NVIDIA GPUs: CUTLASS's kernels by measurement, the rest by TVM. In the child only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.compiler.artifact import derived_constants
from hone.compiler.build import BuildFailed, GraphRefused, LinkFailed
from hone.compiler.choices import Choices
from hone.compiler.cuda.export import export_cuda_artifact
from hone.compiler.cuda.notes import note_of
from hone.compiler.cuda.partition import Templates
from hone.compiler.cuda.pipeline import (
    compile_cuda_model,
    cuda_layers,
    cuda_paddings,
    cuda_workloads,
    run_plain_phases,
)
from hone.compiler.cuda.precision import unsupported
from hone.compiler.onnx_import import ImportedModel
from hone.compiler.phases.precision import Precision
from hone.compiler.templates.cutlass.published import scope_of
from hone.compiler.templates.cutlass.toolchain import ToolchainMissing, find_toolchain
from hone.engines.tvm import PackedWeights
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_cuda import TvmCudaEngine
from hone.errors import EngineError
from hone.kernels import DeviceKey, Entry, KernelsCache
from hone.specialization import Signature
from hone.tuning.activity import Activity, ActivityView
from hone.tuning.artifacts import Sources
from hone.tuning.budget import num_compilers
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
from hone.tuning.contest import SearchCounts
from hone.tuning.gpu_artifacts import GpuArtifactLoader
from hone.tuning.gpu_parts import GpuParts
from hone.tuning.gpu_schedules import GpuScheduleSearch
from hone.tuning.gpu_search import GpuSearch
from hone.tuning.keeping import Compared, compare, find_layers_to_keep
from hone.tuning.kernel_map import kernel_map
from hone.tuning.kernel_trials import KernelTrials
from hone.tuning.profiler import Profiler
from hone.tuning.specialize import Compiled, NotCompiled, Told
from hone.tuning.wire import Message

#: Shares of a specialization's time.
_PADDING_SHARE, _SEARCH_SHARE, _SCHEDULE_SHARE = 0.15, 0.5, 0.15
#: Share of the time in which layers are looked for that must stay in float32, where low precision is not enough.
_KEEPING_SHARE = 0.5
#: Tensor cores take float32 rounded to tf32 from here on.
_TF32_SINCE = 80

_Engine = Loaded[TvmCudaEngine]


class CudaCompile:
    """See `specialize.Compile` and `specialize.PlainCompile`."""

    def __init__(self, spec: Message, cache: KernelsCache, device: DeviceKey, parts: GpuParts) -> None:
        self._spec, self._cache, self._parts = spec, cache, parts
        self._path = Path(spec["path"])
        self._packed = PackedWeights()
        self._precision = Precision(str(spec["precision"]))
        sources, scope = Sources.installed(), scope_of(parts.target)
        board = spec.get("activity")
        self._profiler = profiler = Profiler(
            parts.device,
            KernelTrials(cache, device.digest),
            activity=ActivityView(board).read if board is not None else lambda: Activity(0, 0),
        )
        self._search = GpuSearch(
            cache,
            device,
            parts.target,
            sources,
            profiler,
            parts.kernels,
            parts.templates,
            precision=self._precision.name,
            num_builders=num_compilers(
                device.architecture, spec.get("memory_bytes"), int(spec.get("build_threads", 1))
            ),
        )
        self._schedules = GpuScheduleSearch(
            cache, device, sources, parts.target, parts.templates, profiler, parts.functions
        )
        self._loader = GpuArtifactLoader(
            cache, {device.digest: (device, [parts.device])}, self._packed, {device.digest: scope}
        )
        self._artifacts = Artifacts(spec, cache, device, sources, scope)

    def build(self, signature: Signature, digest: str, seconds: float, tell: Told) -> Compiled | NotCompiled:
        began = time.monotonic()
        self._search.counts = counts = SearchCounts()
        imported = self._import(signature, tell)
        if isinstance(imported, NotCompiled):
            return imported
        tell(0.1, "looking for workloads")
        try:
            choices = self._choose(imported, self._precision, seconds, tell)
            tell(0.7, "compiling")
            compiling = time.monotonic()
            settled = self._hold_tolerance(imported, choices, signature, seconds, tell)
            return self._finished(settled, signature, digest, report(counts, compiling - began, compiling))
        except GraphRefused as problem:
            return not_taken(problem, imported, lambda model: run_plain_phases(model, self._parts.target))
        except (BuildFailed, LinkFailed) as problem:
            return NotCompiled("failed", str(problem))

    def build_plain(self, signature: Signature, digest: str, tell: Told) -> Compiled | NotCompiled:
        """With dlight's schedules for all of it: one run of nvcc, nothing measured, no kernels and so no paddings."""
        began = time.monotonic()
        imported = self._import(signature, tell)
        if isinstance(imported, NotCompiled):
            return imported
        tell(0.3, "compiling with plain schedules")
        try:
            target = self._parts.target
            paddings = cuda_paddings(imported, target, Choices(precision=self._precision), templates=())
            unpadded = {padding.operator.digest: 1 for padding in paddings}
            loaded = self._make(imported, Choices(precision=self._precision, paddings=unpadded), ())
            told = {"compile_seconds": time.monotonic() - began}
            return self._finished(Settled(loaded), signature, digest, told, is_plain=True)
        except GraphRefused as problem:
            return not_taken(problem, imported, lambda model: run_plain_phases(model, self._parts.target))
        except (BuildFailed, LinkFailed) as problem:
            return NotCompiled("failed", str(problem))

    def load(self, digest: str) -> Compiled | NotCompiled:
        return self._artifacts.load(digest, self._loader, lambda engine: {"clock": self._parts.clock})

    # --- choices

    def _import(self, signature: Signature, tell: Told) -> ImportedModel | NotCompiled:
        target = self._parts.target
        refused = unsupported(self._precision.name, target.compute_capability)
        if not target.twin:
            try:  # without it all that follows would be for nothing
                find_toolchain().check_supports(target.arch)
            except ToolchainMissing as problem:
                return NotCompiled("failed", str(problem))
        return import_for(self._path, signature, refused, tell)

    def _choose(self, imported: ImportedModel, precision: Precision, seconds: float, tell: Told) -> Choices:
        """By measurement: paddings, then kernels, then schedules of what is left. Raises DeviceLost."""
        target, templates, counts = self._parts.target, self._parts.templates, self._search.counts

        def searching(first: float, last: float) -> Callable[[float, str], None]:
            return lambda share, text: tell(first + (last - first) * share, text, **told_counts(counts))

        choices = Choices(precision=precision)
        found = cuda_paddings(imported, target, choices, templates=templates)
        paddings = self._search.decide_paddings(found, seconds * _PADDING_SHARE, searching(0.1, 0.2))
        choices = replace(choices, paddings=paddings)
        wanted = cuda_workloads(imported, target, choices, templates=templates)
        kernels = self._search.decide(wanted, seconds * _SEARCH_SHARE, searching(0.2, 0.55))
        choices = replace(choices, kernels=kernels)
        if self._spec.get("careful"):
            return choices
        self._schedules.choices = choices
        schedules = self._schedules.decide(imported, seconds * _SCHEDULE_SHARE, counts, searching(0.55, 0.7))
        return replace(choices, schedules=schedules)

    # --- precision

    def _hold_tolerance(
        self, imported: ImportedModel, choices: Choices, signature: Signature, seconds: float, tell: Told
    ) -> Settled[TvmCudaEngine]:
        """The engine, made again with layers (or all of it) in a higher precision where its outputs are too far off;
        and what was done. Where nothing helps it stays as it is: the gate says no, with its numbers."""
        loaded = self._make(imported, choices)
        if choices.precision.name == "f32" or isinstance(loaded, NotCompiled):
            return Settled(loaded)
        deadline = time.monotonic() + seconds * _KEEPING_SHARE
        compared = compare(self._artifacts, signature, loaded, imported, choices, deadline, tell)
        if compared is None or compared.holds:
            return Settled(loaded)
        found, note, is_open = self._find_precision(compared)
        if found is None:
            return Settled(loaded, note, is_open)
        loaded.close()
        chosen = self._choose(imported, found, compared.seconds_left, tell)
        return Settled(self._make(imported, chosen), note, is_open)

    def _find_precision(self, miss: Compared) -> tuple[Precision | None, str, bool]:
        """What holds the tolerance that was missed: first with the fewest layers higher, then the whole model; None
        where nothing does. Whether another day may bring a better answer."""
        name, is_open = miss.name, False

        def make(precision: Precision) -> _Engine | NotCompiled:
            # Padding and schedules are those of other dtypes: kernels' first guesses show what is computed.
            return self._make(miss.imported, Choices(precision=precision))

        def holds(precision: Precision) -> bool:
            nonlocal is_open
            miss.tell(0.75, f"comparing outputs in {precision.name}")
            made = make(precision)
            if isinstance(made, NotCompiled):
                is_open = True
                return False
            try:
                return miss.error_of(made.engine.instantiate()) <= 1.0
            finally:
                made.close()

        higher = ["f32"]
        if name != "tf32" and self._parts.target.compute_capability >= _TF32_SINCE:
            higher.insert(0, "tf32")
        whole = next((one for one in higher if holds(Precision(one))), None)
        if whole is None:
            return None, f"{miss.told}, and in f32 too", is_open
        if name == "tf32":
            return Precision(whole), f"{miss.told}: it is computed in {whole}", is_open
        layers = cuda_layers(miss.imported, self._parts.target, miss.choices, templates=self._parts.templates)
        found = find_layers_to_keep(miss, layers, lambda kept: make(Precision(name, kept, whole)), whole)
        if found.kept is None:
            return Precision(whole), f"{found.note}: all are computed so", is_open or found.is_open
        return Precision(name, found.kept.layers, whole), found.note, is_open

    # --- an artifact

    def _make(
        self, imported: ImportedModel, choices: Choices, templates: Templates | None = None
    ) -> _Engine | NotCompiled:
        """Compile, see that kernels and constants are in the cache, load the engine from a folder of its own. Raises
        BuildFailed and LinkFailed."""
        parts = self._parts
        compiled = compile_cuda_model(
            imported, parts.target, choices, templates=parts.templates if templates is None else templates
        )
        files: dict[str, Path] = {}
        for call in compiled.kernels:
            template: Any = call.template
            parts.kernels.get(template, call.workload, call.candidate)
            entry = self._cache.get("kernels", call.digest, self._artifacts.scope)
            if not isinstance(entry, Entry):
                return NotCompiled("failed", f"kernel {call.digest[:12]} is not in the cache ({entry.reason.value})")
            files[call.digest] = entry.files[KERNEL_FILE]
        # While they are packed, weights are there twice.
        needed, room = 2 * sum(int(array.nbytes) for array in imported.params.values()), self._profiler.room_bytes
        if needed > room:
            return NotCompiled(
                "failed",
                f"its weights take {needed >> 20} MiB while they are packed, and {max(0, room) >> 20} MiB of the GPU's"
                f" memory are free beside the {self._profiler.limits.reserve_bytes >> 20} kept for serving",
            )
        constants_digest = self._artifacts.keep_constants(derived_constants(imported))
        if isinstance(constants_digest, NotCompiled):
            return constants_digest
        folder = temporary_folder()
        place = Path(folder.name)
        toolchain = None if parts.target.twin else find_toolchain()
        exported = export_cuda_artifact(compiled, imported, constants_digest, place, toolchain).telling(
            kernel_map=kernel_map(
                compiled.kernels,
                compiled.functions,
                self._search.ranking,
                self._schedules.nanoseconds,
                lambda workload: note_of(workload, compiled.paddings),
            )
        )
        try:
            engine = TvmCudaEngine.load(
                place,
                exported.manifest,
                model=self._path,
                kernels=files,
                constants=self._artifacts.constants,
                devices=[parts.device],
                packed=self._packed,
            )
        except EngineError as problem:
            folder.cleanup()
            return NotCompiled("failed", str(problem))
        return Loaded(engine, exported, folder)

    def _finished(
        self,
        settled: Settled[TvmCudaEngine],
        signature: Signature,
        digest: str,
        told: dict[str, Any],
        *,
        is_plain: bool = False,
    ) -> Compiled | NotCompiled:
        loaded = settled.loaded
        if isinstance(loaded, NotCompiled):
            return loaded
        publish = self._artifacts.publisher(loaded, signature, digest, is_plain=is_plain)
        if isinstance(publish, NotCompiled):
            loaded.close()
            return publish
        return Compiled(loaded.held(), publish, told, settled.note, clock=self._parts.clock, is_open=settled.is_open)
