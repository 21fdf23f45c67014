"""What the compile steps for CPUs and for GPUs have in common: from a compiled model to an artifact that passed, and
from an artifact back to an engine. In the child only."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from hone.compiler.artifact import ExportedArtifact
from hone.compiler.blame import refused_operator
from hone.compiler.build import BuildFailed, GraphRefused, LinkFailed
from hone.compiler.onnx_import import ImportedModel, Unsupported, import_model
from hone.engines.onnxruntime import OnnxRuntimeEngine
from hone.engines.tvm import TvmEngine
from hone.engines.tvm_cuda import TvmCudaEngine
from hone.errors import EngineError
from hone.kernels import ArtifactKey, DeviceKey, Entry, Failure, KernelsCache, load_constants, publish_constants
from hone.specialization import Signature
from hone.tuning.artifacts import HeldEngine, Sources, Terms, artifact_key, parts_of
from hone.tuning.contest import SearchCounts
from hone.tuning.domains import derive_domains
from hone.tuning.samples import unpack
from hone.tuning.sensitivity import OutputError
from hone.tuning.specialize import Compiled, NotCompiled, Told, baseline_settings
from hone.tuning.trial import NoTrial, gather
from hone.tuning.verdicts import Verdicts
from hone.tuning.wire import Message
from hone.types import Array

#: For finding the operator that the compiler does not take.
_BLAME_SECONDS = 30.0

AnyEngine = TypeVar("AnyEngine", TvmEngine, TvmCudaEngine)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[AnyEngine]):
    """An engine, and the artifact that it runs, in a folder that goes with it."""

    engine: AnyEngine
    exported: ExportedArtifact
    folder: tempfile.TemporaryDirectory[str]

    def held(self) -> HeldEngine:
        """The engine alone, whose end is the folder's."""
        with ExitStack() as held:
            held.callback(self.folder.cleanup)
            return HeldEngine(self.engine, held.pop_all())

    def close(self) -> None:
        self.engine.close()
        self.folder.cleanup()


@dataclass(frozen=True, slots=True)
class Settled(Generic[AnyEngine]):
    """What keeping layers in a higher precision came to. `note` and `is_open`: see `Compiled`."""

    loaded: Loaded[AnyEngine] | NotCompiled
    note: str = ""
    is_open: bool = False


class Loader(Protocol):
    def load(self, artifact: str, device: str, model: Path) -> HeldEngine:
        """Raises EngineError; nothing is held then."""


@dataclass(frozen=True, slots=True)
class Artifacts:
    """Names, publishes and loads the artifacts of one job, for one kind of device. `scope` is that of its kernels."""

    spec: Message
    cache: KernelsCache
    device: DeviceKey
    sources: Sources
    scope: str

    @property
    def model(self) -> Path:
        return Path(self.spec["path"])

    def key(self, signature: Signature, *, is_plain: bool = False) -> ArtifactKey:
        spec = self.spec
        return artifact_key(
            graph=spec["graph"],
            signature=signature,
            precision=spec["precision"],
            objective=spec["objective"],
            terms=Terms(spec["tolerance"], spec["margin"], spec["run_threads"], spec["graph_level"]),
            device=self.device,
            sources=self.sources,
            is_plain=is_plain,
        )

    def publisher(
        self, loaded: Loaded[AnyEngine], signature: Signature, digest: str, *, is_plain: bool = False
    ) -> Callable[[Mapping[str, Any]], str] | NotCompiled:
        """What publishes a loaded artifact once it passed (see `Compiled.publish`); NotCompiled where its name is not
        the one that the server asked for."""
        key = self.key(signature, is_plain=is_plain)
        if key.digest != digest:
            return NotCompiled("failed", "the server and its tuning process do not agree on the artifact's name")
        exported = loaded.exported

        def publish(told: Mapping[str, Any]) -> str:
            requires = [
                {"kind": kind, "digest": part, "scope": scope}
                for kind, part, scope in parts_of(exported.manifest, self.scope)
            ]
            manifest = {**exported.manifest, **told, "key": key.fields, "requires": requires}
            self.cache.describe(self.device)
            done = self.cache.publish("artifacts", digest, self.device.digest, dict(exported.files), manifest)
            loaded.folder.cleanup()
            return f"{done.reason.value} ({done.detail})" if isinstance(done, Failure) else ""

        return publish

    def load(
        self, digest: str, loader: Loader, of: Callable[[HeldEngine], Mapping[str, Any]]
    ) -> Compiled | NotCompiled:
        """An artifact that is in the cache, to be proven. `of` gives the rest of `Compiled`."""
        entry = self.cache.get("artifacts", digest, self.device.digest)
        if not isinstance(entry, Entry):
            return NotCompiled("failed", f"the artifact is no longer in the cache ({entry.reason.value})")
        try:
            engine = loader.load(digest, self.device.digest, self.model)
        except EngineError as problem:
            return NotCompiled("failed", str(problem))

        def prove(told: Mapping[str, Any]) -> str:
            self.cache.prove(entry)
            Verdicts(self.cache, self.device.digest).keep_measured(digest, told["verdict"])
            return ""

        return Compiled(engine, prove, **of(engine))

    # --- constants

    def keep_constants(self, constants: Mapping[str, Array]) -> str | NotCompiled | None:
        """Digest of the entry that keeps them; None where there are none."""
        if not constants:
            return None
        kept = publish_constants(self.cache, constants)
        if isinstance(kept, Failure):
            return NotCompiled("failed", f"its constants could not be kept: {kept.reason.value} ({kept.detail})")
        return kept.digest

    def constants(self, digest: str) -> Mapping[str, Array]:
        """See `ConstantsSource`. Raises EngineError."""
        entry = self.cache.get("constants", digest)
        if not isinstance(entry, Entry):
            raise EngineError(f"constants {digest[:12]} are no longer in the cache")
        return load_constants(entry)

    # --- the baseline

    def output_error(self, signature: Signature) -> OutputError | None:
        """How far outputs are from the baseline's; None where nothing can be compared: the gate says why."""
        spec = self.spec
        baseline = OnnxRuntimeEngine.load(self.model, baseline_settings(spec))
        domains: Any = derive_domains(self.model, signature.specs)
        samples = unpack(spec["samples"]) if spec.get("samples") is not None else ()
        batching = int(spec["max_batch_size"]) > 0
        evidence = gather(baseline, baseline.outputs, signature, domains, samples, batching=batching)
        if isinstance(evidence, NoTrial):
            return None
        return OutputError(evidence, baseline.outputs, signature, str(spec["precision"]), spec.get("tolerance"))


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hone-artifact-", ignore_cleanup_errors=True)


def import_for(path: Path, signature: Signature, refused: str, tell: Told) -> ImportedModel | NotCompiled:
    """The model at the signature's shapes. `refused`: why the device does not do the precision, empty where it does."""
    if refused:
        return NotCompiled("unsupported", refused)
    tell(0.0, "importing")
    try:
        imported = import_model(path, signature.shapes)
    except BuildFailed as problem:
        return NotCompiled("failed", str(problem))
    if not isinstance(imported, Unsupported):
        return imported
    operator, reason = imported.operator, imported.reason
    if operator and operator not in reason:
        reason = f"operator {operator}: {reason}"
    return NotCompiled("unsupported", reason, operator)


def not_taken(problem: GraphRefused, imported: ImportedModel, compile_plain: Callable[[Any], object]) -> NotCompiled:
    """The graph was refused. Where it is without any choice of kernels and schedules, too, it is for ever, and the
    operator is looked for; else a choice is to blame, and another day may bring another."""
    try:
        compile_plain(imported)
    except GraphRefused as again:
        problem = again
    except (BuildFailed, LinkFailed) as other:
        return NotCompiled("failed", str(other))
    else:
        return NotCompiled("failed", f"with the kernels and schedules that were chosen: {problem}")
    deadline = time.monotonic() + _BLAME_SECONDS
    operator = refused_operator(imported.mod, compile_plain, lambda: time.monotonic() < deadline)
    named = f"operator {operator}" if operator else "its graph"
    return NotCompiled("unsupported", f"the compiler does not take {named}: {problem}", operator)


def told_counts(counts: SearchCounts) -> dict[str, int]:
    """How far the search is, for people."""
    return {"num_built": counts.num_built, "num_measured": counts.num_measured, "num_failed": counts.num_failed}


def report(counts: SearchCounts, search_seconds: float, compiling: float) -> dict[str, Any]:
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
