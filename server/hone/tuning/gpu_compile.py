"""The compile step for NVIDIA GPUs: CUTLASS's kernels by measurement, the rest by TVM. In the child only."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.compiler.artifact import derived_constants
from hone.compiler.build import BuildFailed, LinkFailed
from hone.compiler.choices import Choices
from hone.compiler.cuda.export import export_cuda_artifact
from hone.compiler.cuda.partition import CudaTemplate, Templates
from hone.compiler.cuda.pipeline import compile_cuda_model, cuda_paddings, cuda_workloads
from hone.compiler.cuda.precision import unsupported
from hone.compiler.cuda_target import PRESETS, CudaTarget
from hone.compiler.onnx_import import Unsupported, import_model
from hone.compiler.phases.precision import Precision
from hone.compiler.templates.base import Candidate
from hone.compiler.templates.cutlass.published import published_kernel, scope_of
from hone.compiler.templates.cutlass.registry import CUTLASS_TEMPLATES
from hone.compiler.templates.cutlass.toolchain import find_toolchain
from hone.compiler.workload import Workload
from hone.engines.cuda_device import CudaDevice
from hone.engines.cuda_runtime import CudaRuntime
from hone.engines.tvm import PackedWeights
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_cuda import TvmCudaEngine
from hone.engines.tvm_runtime import TvmRuntime, load_cuda
from hone.errors import EngineError
from hone.kernels import DeviceKey, Entry, Failure, KernelsCache, load_constants, publish_constants
from hone.specialization import Signature
from hone.tuning.activity import Activity, ActivityView
from hone.tuning.artifacts import HeldEngine, Sources, Terms, artifact_key, parts_of
from hone.tuning.contest import SearchCounts
from hone.tuning.gpu_artifacts import GpuArtifactLoader
from hone.tuning.gpu_search import GpuSearch, Kernel
from hone.tuning.kernel_trials import KernelTrials
from hone.tuning.measure import Clock
from hone.tuning.profiler import Profiler
from hone.tuning.specialize import Compiled, NotCompiled, Told
from hone.tuning.verdicts import Verdicts
from hone.tuning.wire import Message

_SEARCH_SHARE, _PADDING_SHARE = 0.6, 0.2
_GIB = 1 << 30
#: Of the tuning process itself, with TVM and a model.
_OWN_BYTES = 1 << 30
#: With so much, two compilers at once.
_TWO_COMPILERS_BYTES = 12 << 30


class CachedKernels:
    """See `gpu_search.KernelSource`: the kernels cache, and nvcc for what it does not hold.

    `memory_bytes` is what the process may take with all that it starts; kernels whose compiler takes more are only for
    those who have built them before.
    """

    def __init__(self, cache: KernelsCache, target: CudaTarget, memory_bytes: int | None = None) -> None:
        self._cache, self._target, self._memory_bytes = cache, target, memory_bytes

    def digest_of(self, template: CudaTemplate, workload: Workload, candidate: Candidate) -> str:
        return template.digest(workload, candidate, self._target)

    def has(self, digest: str) -> bool:
        return isinstance(self._cache.get("kernels", digest, scope_of(self._target)), Entry)

    def get(self, template: CudaTemplate, workload: Workload, candidate: Candidate) -> Kernel:
        cutlass: Any = template  # all that are built by nvcc
        needed = int(cutlass.recipe(workload, candidate, self._target).num_gib * _GIB) + _OWN_BYTES
        is_too_much = self._memory_bytes is not None and needed > self._memory_bytes
        if is_too_much and not self.has(self.digest_of(template, workload, candidate)):
            told = f"its compiler takes {needed >> 20} MiB with this process, more than tuning may"
            raise BuildFailed(str(candidate), MemoryError(f"{told}: build it before by `hone kernels build`"))
        return published_kernel(self._cache, cutlass, workload, candidate, self._target)


@dataclass(frozen=True, slots=True)
class GpuParts:
    """What the compile step works with, which tests replace by what stands for a GPU."""

    device: CudaDevice
    target: CudaTarget
    kernels: CachedKernels
    templates: Templates = CUTLASS_TEMPLATES
    clock: Clock = time.perf_counter_ns
    """What the gate measures by."""


def open_gpu(spec: Message, cache: KernelsCache, device: DeviceKey) -> GpuParts:
    """The GPU of a job. Raises EngineError where there is no driver or runtime, ValueError for an architecture that
    kernels are not made for."""
    cuda = CudaRuntime.load()
    runtime = TvmRuntime.load(int(spec["run_threads"]))
    load_cuda()
    target = target_of(device)
    return GpuParts(
        CudaDevice(cuda, runtime, int(spec.get("ordinal", 0))),
        target,
        CachedKernels(cache, target, spec.get("memory_bytes")),
    )


def target_of(device: DeviceKey) -> CudaTarget:
    """The compiler's view of a device key. What its maker states of speed is scaled from a card of its architecture
    where the key does not tell. Raises ValueError for an architecture that kernels are not made for."""
    fields: Any = device.fields
    arch = str(fields["architecture"]).removeprefix("sm_")
    typical = CudaTarget.typical(arch)
    named = next((one for name, one in PRESETS.items() if _is_named(fields["name"], name)), None)
    num_sms = int(fields["num_sms"])
    clock, bits = fields.get("memory_clock_mhz"), fields.get("memory_bus_bits")
    return CudaTarget.of_architecture(
        arch,
        name=str(fields["name"]),
        num_sms=num_sms,
        l2_bytes=int(fields["l2_bytes"]),
        tensor_tflops=named.tensor_tflops if named else typical.tensor_tflops * num_sms / typical.num_sms,
        # Both edges of the clock carry data.
        memory_gbps=2 * clock * bits / 8 / 1000 if clock and bits else (named or typical).memory_gbps,
    )


class CudaCompile:
    """See `specialize.Compile`."""

    def __init__(self, spec: Message, cache: KernelsCache, device: DeviceKey, parts: GpuParts) -> None:
        self._spec, self._cache, self._device, self._parts = spec, cache, device, parts
        self._path = Path(spec["path"])
        self._sources = Sources.installed()
        self._packed = PackedWeights()
        self._precision = Precision(str(spec["precision"]))
        board = spec.get("activity")
        self._search = GpuSearch(
            cache,
            device,
            parts.target,
            self._sources,
            Profiler(
                parts.device,
                KernelTrials(cache, device.digest),
                activity=ActivityView(board).read if board is not None else lambda: Activity(0, 0),
            ),
            parts.kernels,
            parts.templates,
            precision=self._precision.name,
            num_builders=_num_builders(spec),
        )
        self._loader = GpuArtifactLoader(
            cache,
            {device.digest: (device, [parts.device])},
            self._packed,
            {device.digest: scope_of(parts.target)},
        )

    def build(self, signature: Signature, digest: str, seconds: float, tell: Told) -> Compiled | NotCompiled:
        began = time.monotonic()
        self._search.counts = counts = SearchCounts()
        target, templates = self._parts.target, self._parts.templates
        refused = unsupported(self._precision.name, target.compute_capability)
        if refused:
            return NotCompiled("unsupported", refused)
        tell(0.0, "importing")
        imported = import_model(self._path, signature.shapes)
        if isinstance(imported, Unsupported):
            operator = imported.operator
            told = f"operator {operator}: " if operator and operator not in imported.reason else ""
            return NotCompiled("unsupported", told + imported.reason, operator)
        tell(0.1, "looking for workloads")
        try:
            choices = Choices(precision=self._precision)

            def searching(share: float, text: str) -> None:
                tried = {name: getattr(counts, name) for name in ("num_built", "num_measured", "num_failed")}
                tell(0.1 + 0.6 * share, text, **tried)

            paddings = self._search.decide_paddings(
                cuda_paddings(imported, target, choices, templates=templates),
                seconds * _PADDING_SHARE,
                lambda share, text: searching(_PADDING_SHARE * share, text),
            )
            choices = Choices(precision=self._precision, paddings=paddings)
            kernels = self._search.decide(
                cuda_workloads(imported, target, choices, templates=templates),
                seconds * _SEARCH_SHARE,
                lambda share, text: searching(_PADDING_SHARE + (1 - _PADDING_SHARE) * share, text),
            )
            choices = Choices(kernels=kernels, precision=self._precision, paddings=paddings)
            tell(0.7, "compiling")
            compiling = time.monotonic()
            made = self._make(imported, choices, signature, digest)
            if isinstance(made, NotCompiled):
                return made
            engine, publish = made
            report = _report(counts, compiling - began, compiling)
            return Compiled(engine, publish, report, clock=self._parts.clock)
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

        return Compiled(engine, prove, clock=self._parts.clock)

    # --- an artifact

    def _make(self, imported: Any, choices: Choices, signature: Signature, digest: str) -> Any:
        """Engine and publisher of the compiled model, or NotCompiled. Raises BuildFailed and LinkFailed."""
        compiled = compile_cuda_model(imported, self._parts.target, choices, templates=self._parts.templates)
        scope = scope_of(self._parts.target)
        files: dict[str, Path] = {}
        for call in compiled.kernels:
            self._parts.kernels.get(call.template, call.workload, call.candidate)  # type: ignore[arg-type]
            entry = self._cache.get("kernels", call.digest, scope)
            if not isinstance(entry, Entry):
                return NotCompiled("failed", f"kernel {call.digest[:12]} is not in the cache ({entry.reason.value})")
            files[call.digest] = entry.files[KERNEL_FILE]
        constants_digest = None
        constants = derived_constants(imported)
        if constants:
            kept = publish_constants(self._cache, constants)
            if isinstance(kept, Failure):
                return NotCompiled("failed", f"its constants could not be kept: {kept.reason.value} ({kept.detail})")
            constants_digest = kept.digest
        key = self._key(signature)
        if key.digest != digest:
            return NotCompiled("failed", "the server and its tuning process do not agree on the artifact's name")
        with ExitStack() as held:  # the folder goes when the engine is closed
            place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hone-artifact-")))
            toolchain = None if self._parts.target.twin else find_toolchain()
            exported = export_cuda_artifact(compiled, imported, constants_digest, place, toolchain)
            try:
                engine = TvmCudaEngine.load(
                    place,
                    exported.manifest,
                    model=self._path,
                    kernels=files,
                    constants=self._constants,
                    devices=[self._parts.device],
                    packed=self._packed,
                )
            except EngineError as problem:
                return NotCompiled("failed", str(problem))

            def publish(told: Mapping[str, Any]) -> str:
                requires = [
                    {"kind": kind, "digest": part, "scope": at} for kind, part, at in parts_of(exported.manifest, scope)
                ]
                manifest = {**exported.manifest, **told, "key": key.fields, "requires": requires}
                self._cache.describe(self._device)
                done = self._cache.publish("artifacts", digest, self._device.digest, dict(exported.files), manifest)
                return f"{done.reason.value} ({done.detail})" if isinstance(done, Failure) else ""

            return HeldEngine(engine, held.pop_all()), publish

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


def _num_builders(spec: Message) -> int:
    memory_bytes = spec.get("memory_bytes")
    most = 1 if memory_bytes is not None and int(memory_bytes) < _TWO_COMPILERS_BYTES else 2
    return max(1, min(most, int(spec.get("build_threads", 1))))


def _is_named(told: Any, preset: str) -> bool:
    """Whether NVML's name, such as "NVIDIA A100-SXM4-80GB", is that of a preset."""
    words = str(told).lower().replace("-", " ").replace("geforce ", "").replace("rtx ", "rtx").split()
    return preset in words


def _report(counts: SearchCounts, search_seconds: float, compiling: float) -> dict[str, Any]:
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
