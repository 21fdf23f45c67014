"""Artifacts by name: what a specialization's digest is made of, and how one becomes an engine in this process."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hone.engines.tvm import ConstantsSource, PackedWeights, TvmEngine
from hone.engines.tvm_artifact import FORMAT, KERNEL_FILE
from hone.engines.tvm_cuda import TvmCudaEngine
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import EngineError
from hone.kernels import ArtifactKey, DeviceKey, Entry, KernelsCache, Kind, Toolchain, load_constants
from hone.specialization import Signature
from hone.tuning.ports import TunableVersion
from hone.tuning.settings import ModelTuning
from hone.types import Array, Engine, EngineInstance, TensorSpec


@dataclass(frozen=True, slots=True)
class Sources:
    """Digests of the code that makes artifacts: another compiler is another artifact."""

    templates_sha256: str
    pipeline_sha256: str

    @classmethod
    def installed(cls) -> Sources:
        """Of the compiler in this installation, which is read and not imported."""
        spec = importlib.util.find_spec("hone.compiler")
        assert spec is not None and spec.submodule_search_locations is not None
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(path for kind in ("*.py", "*.jinja", "*.cpp") for path in folder.rglob(kind))
        templates = [path for path in files if path.is_relative_to(folder / "templates")]
        return cls(_digest_of(templates, folder), _digest_of([p for p in files if p not in templates], folder))


@dataclass(frozen=True, slots=True)
class Terms:
    """What a verdict depends on besides the artifact's own making: a model held to other terms is judged anew."""

    tolerance: float | None
    margin: float
    run_threads: int
    graph_level: int

    def flags(self) -> tuple[str, ...]:
        return (
            f"tolerance={'default' if self.tolerance is None else repr(self.tolerance)}",
            f"margin={self.margin!r}",
            f"threads={self.run_threads}",
            f"baseline=onnxruntime {_version_of('onnxruntime')} level {self.graph_level}",
            f"format={FORMAT}",
        )


def artifact_key(
    *,
    graph: str,
    signature: Signature,
    precision: str,
    objective: str,
    terms: Terms,
    device: DeviceKey,
    sources: Sources,
    is_plain: bool = False,
) -> ArtifactKey:
    """`graph` is the fingerprint of the version's files, graph and weights together. `is_plain`: made without kernels
    and without a search."""
    return ArtifactKey(
        graph_sha256=graph,
        weights_sha256=graph,
        signature={tensor.name: [tensor.datatype, list(tensor.shape)] for tensor in signature.tensors},
        precision=precision,
        objective=objective,
        templates_sha256=sources.templates_sha256,
        pipeline_sha256=sources.pipeline_sha256,
        flags=(*terms.flags(), "plain") if is_plain else terms.flags(),
        device=device.digest,
        toolchain=toolchain_of(device),
    )


class KeyMaker:
    """Names artifacts in the server; see `planner.KeyOf`."""

    def __init__(self, devices: Sequence[DeviceKey], *, margin: float, run_threads: int) -> None:
        self._devices = {device.digest: device for device in devices}
        self._margin = margin
        self._run_threads = run_threads
        self._sources = Sources.installed()

    def __call__(self, version: TunableVersion, tuning: ModelTuning, signature: Signature, device: str) -> str:
        return self._key(version, tuning, signature, device, is_plain=False)

    def plain(self, version: TunableVersion, tuning: ModelTuning, signature: Signature, device: str) -> str:
        """Of the module that serves until the one that is searched for is there."""
        return self._key(version, tuning, signature, device, is_plain=True)

    def _key(
        self, version: TunableVersion, tuning: ModelTuning, signature: Signature, device: str, *, is_plain: bool
    ) -> str:
        return artifact_key(
            graph=version.ref.graph,
            signature=signature,
            precision=tuning.precision,
            objective=tuning.objective,
            terms=Terms(tuning.tolerance, self._margin, version.threads_of(self._run_threads), version.graph_level),
            device=self._devices[device],
            sources=self._sources,
            is_plain=is_plain,
        ).digest


def toolchain_of(device: DeviceKey) -> Toolchain:
    told: Any = device.fields.get("toolchain", {})
    names = ("tvm", "tvm_ffi", "llvm", "cxx", "nvcc", "cutlass")
    return Toolchain(**{name: str(told.get(name, "none")) for name in names})


def parts_of(manifest: Mapping[str, Any], architecture: str) -> list[tuple[Kind, str, str]]:
    """Entries (kind, digest, scope) that an artifact cannot run without."""
    pool = [manifest["pool"]] if manifest.get("pool") else []
    kernels: list[tuple[Kind, str, str]] = [("kernels", one, architecture) for one in (*manifest["kernels"], *pool)]
    constants = {p["digest"] for p in manifest["params"].values() if p["source"] == "constants"}
    return kernels + [("constants", digest, "") for digest in sorted(constants)]


class ArtifactLoader:
    """Makes engines of artifacts in the cache; see `ports.EngineLoader`. What an engine runs stays in the cache until
    the engine is closed."""

    def __init__(
        self, cache: KernelsCache, devices: Sequence[DeviceKey], runtime: TvmRuntime, packed: PackedWeights
    ) -> None:
        self._cache = cache
        self._architectures = {device.digest: device.architecture for device in devices}
        self._runtime = runtime
        self._packed = packed

    def __call__(self, artifact: str, device: str, version: TunableVersion, /) -> Engine:
        return self.load(artifact, device, version.path, version.threads_of(self._runtime.num_threads))

    def load(self, artifact: str, device: str, model: Path, num_threads: int = 0) -> HeldEngine:
        """Instances are run by so many threads (0: all of the runtime's). Raises EngineError; nothing is held then."""

        def make(entry: Entry, kernels: Mapping[str, Path], constants: ConstantsSource) -> TvmEngine:
            return TvmEngine.load(
                entry.path,
                entry.manifest,
                model=model,
                kernels=kernels,
                constants=constants,
                runtime=self._runtime,
                packed=self._packed,
            )

        return load_held(self._cache, artifact, device, self._architectures[device], make, num_threads)


def load_held(
    cache: KernelsCache,
    artifact: str,
    device: str,
    scope: str,
    make: Callable[[Entry, Mapping[str, Path], ConstantsSource], TvmEngine | TvmCudaEngine],
    num_threads: int = 0,
) -> HeldEngine:
    """The engine that `make` makes of an artifact's entry, its kernels' libraries by digest and its constants, all of
    which stay in the cache until it is closed. `scope` is that of the kernels. Raises EngineError; nothing is held
    then."""
    with ExitStack() as held:

        def get(kind: Kind, digest: str, scope: str) -> Entry:
            entry = cache.get(kind, digest, scope, hold=True)
            if not isinstance(entry, Entry):
                raise EngineError(f"{kind} {digest[:12]} is not in the cache ({entry.reason.value})")
            held.callback(cache.release, entry)
            return entry

        entry = get("artifacts", artifact, device)
        try:
            parts = parts_of(entry.manifest, scope)
        except (KeyError, TypeError, AttributeError) as problem:
            raise EngineError(f"the artifact's manifest is incomplete: {problem!r}") from problem
        entries = {(kind, digest): get(kind, digest, at) for kind, digest, at in parts}

        def constants(digest: str) -> Mapping[str, Array]:
            try:
                return load_constants(entries["constants", digest])
            except (OSError, ValueError) as problem:
                raise EngineError(f"constants {digest} cannot be read: {problem}") from problem

        kernels = {digest: one.files[KERNEL_FILE] for (kind, digest), one in entries.items() if kind == "kernels"}
        return HeldEngine(make(entry, kernels, constants), held.pop_all(), num_threads)


class HeldEngine:
    """An engine whose files are kept from eviction until it is closed."""

    def __init__(self, engine: TvmEngine | TvmCudaEngine, held: ExitStack, num_threads: int = 0) -> None:
        self._engine = engine
        self._num_threads = num_threads
        self._held = held
        self.kind = engine.kind
        self.inputs: tuple[TensorSpec, ...] = engine.inputs
        self.outputs: tuple[TensorSpec, ...] = engine.outputs
        self.initializers: tuple[TensorSpec, ...] = engine.initializers
        self.is_steady: bool = engine.is_steady

    def instantiate(self) -> EngineInstance:
        return self.instantiate_with(self._num_threads)

    def instantiate_with(self, num_threads: int) -> EngineInstance:
        """An instance that so many threads run (0: all of the runtime's). A GPU's instances have no such choice."""
        engine = self._engine
        return engine.instantiate(num_threads) if isinstance(engine, TvmEngine) else engine.instantiate()

    def close(self) -> None:
        try:
            self._engine.close()
        finally:
            self._held.close()


def _digest_of(files: Sequence[Path], folder: Path) -> str:
    total = hashlib.sha256()
    for path in files:
        data = path.read_bytes()
        total.update(f"{path.relative_to(folder)}\0{len(data)}\0".encode() + data)
    return total.hexdigest()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
