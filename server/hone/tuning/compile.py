"""The real compile step: hone's compiler on TVM, and the kernels cache. In the child only: the server has no TVM."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hone.compiler.artifact import derived_constants, export_artifact
from hone.compiler.build import BuildFailed, LinkFailed
from hone.compiler.choices import Choices
from hone.compiler.onnx_import import Unsupported, import_model
from hone.compiler.pipeline import CompiledModel, compile_model, template_workloads
from hone.compiler.target import CpuTarget
from hone.engines.tvm import PackedWeights, TvmEngine
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError
from hone.kernels import DeviceKey, Entry, Failure, KernelsCache, load_constants, publish_constants
from hone.specialization import Signature
from hone.tuning.artifacts import ArtifactLoader, Sources, Terms, artifact_key, parts_of, toolchain_of
from hone.tuning.schedules import ScheduleSearch
from hone.tuning.search import Search, SearchCounts
from hone.tuning.specialize import Compile, Compiled, Ledger, NotCompiled, Outcome, Told
from hone.tuning.verdicts import Verdicts
from hone.tuning.wire import Message

#: Share of a specialization's time that searching may take, and of the progress it stands for.
_SEARCH_SHARE = 0.6
_SCHEDULE_SHARE = 0.2
_HEARTBEAT_SECONDS = 5.0
#: What the compiler makes so far; other precisions that a configuration may name are told to be unsupported.
PRECISIONS = ("f32",)


def open_compiler(spec: Message) -> tuple[Compile, Ledger]:
    """The compile step and the memory for a job. Raises what only a wrong installation or cache folder can raise."""
    cache = KernelsCache(Path(spec["kernels_cache"]))
    device = DeviceKey(spec["device_fields"])
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
        self._search = Search(cache, device, self._target, self._sources)
        self._schedules = ScheduleSearch(cache, device, self._target, self._sources)
        self._loader = ArtifactLoader(cache, [device], self._runtime, self._packed)

    def build(self, signature: Signature, digest: str, seconds: float, tell: Told) -> Compiled | NotCompiled:
        began = time.monotonic()
        self._search.counts = counts = SearchCounts()
        precision = str(self._spec["precision"])
        if precision not in PRECISIONS:
            reason = f"precision '{precision}' is not compiled in this version, only {', '.join(PRECISIONS)}"
            return NotCompiled("unsupported", reason)
        tell(0.0, "importing")
        imported = import_model(self._path, signature.shapes)
        if isinstance(imported, Unsupported):
            return NotCompiled("unsupported", _told_operator(imported), imported.operator)
        if imported.hazards:
            return NotCompiled("unsupported", "; ".join(imported.hazards))
        tell(0.1, "looking for workloads")
        try:
            workloads = template_workloads(imported, self._target)
            kernels = self._search.decide(
                workloads, seconds * _SEARCH_SHARE, lambda share, text: tell(0.1 + 0.4 * share, text)
            )
            schedules = {}
            if not self._spec.get("careful"):
                schedules = self._schedules.decide(
                    imported, seconds * _SCHEDULE_SHARE, counts, lambda share, text: tell(0.5 + 0.2 * share, text)
                )
            tell(0.7, "compiling")
            compiling = time.monotonic()
            compiled = compile_model(imported, self._target, Choices(kernels=kernels, schedules=schedules))
            return self._finish(imported, compiled, signature, digest, tell, counts, compiling - began)
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

        return Compiled(engine, prove)

    def _finish(
        self,
        imported: Any,
        compiled: CompiledModel,
        signature: Signature,
        digest: str,
        tell: Told,
        counts: SearchCounts,
        search_seconds: float,
    ) -> Compiled | NotCompiled:
        """Export, put kernels and constants into the cache, and load the engine from a folder of its own."""
        began = time.monotonic()
        folder = tempfile.TemporaryDirectory(prefix="hone-artifact-", ignore_cleanup_errors=True)
        place = Path(folder.name)
        kernels: dict[str, Path] = {}
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
        tell(0.95, "linking")
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
        key = self._key(signature)
        if key.digest != digest:
            return NotCompiled("failed", "the server and its tuning process do not agree on the artifact's name")

        def publish(told: Mapping[str, Any]) -> str:
            requires = [
                {"kind": kind, "digest": part, "scope": scope}
                for kind, part, scope in parts_of(exported.manifest, self._device.architecture)
            ]
            manifest = {**exported.manifest, **told, "key": key.fields, "requires": requires}
            self._cache.describe(self._device)
            done = self._cache.publish("artifacts", digest, self._device.digest, dict(exported.files), manifest)
            folder.cleanup()
            return f"{done.reason.value} ({done.detail})" if isinstance(done, Failure) else ""

        report = {
            "candidates_built": counts.num_built,
            "candidates_measured": counts.num_measured,
            "candidates_failed": counts.num_failed,
            "workloads_remembered": counts.num_remembered,
            "search_seconds": search_seconds,
            "compile_seconds": counts.build_seconds + time.monotonic() - began,
            "measure_seconds": counts.measure_seconds,
        }
        return Compiled(engine, publish, report)

    def _kernel(self, call: Any, place: Path) -> Path | str:
        """The kernel's library, from the cache or built into it; or why there is none."""
        found = self._cache.get("kernels", call.digest, self._device.architecture)
        if isinstance(found, Entry) and KERNEL_FILE in found.files:
            return found.files[KERNEL_FILE]
        path = place / f"{call.digest}.so"
        call.build(self._target).export(path)
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


def _told_operator(unsupported: Unsupported) -> str:
    if unsupported.operator and unsupported.operator not in unsupported.reason:
        return f"operator {unsupported.operator}: {unsupported.reason}"
    return unsupported.reason
