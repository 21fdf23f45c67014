"""Artifacts for GPUs as engines of this process: on all cards of their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hone.engines.cuda_device import CudaDevice
from hone.engines.tvm import PackedWeights
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.engines.tvm_cuda import TvmCudaEngine
from hone.errors import EngineError
from hone.kernels import DeviceKey, Entry, KernelsCache, Kind, load_constants
from hone.tuning.artifacts import HeldEngine, parts_of
from hone.tuning.ports import TunableVersion
from hone.types import Array, Engine


class GpuArtifactLoader:
    """See `ports.EngineLoader`. `devices`: digest of a device key -> the key, and the cards of that kind. What an
    engine runs stays in the cache until it is closed."""

    def __init__(
        self,
        cache: KernelsCache,
        devices: Mapping[str, tuple[DeviceKey, Sequence[CudaDevice]]],
        packed: PackedWeights,
        scopes: Mapping[str, str] | None = None,
    ) -> None:
        """`scopes` of kernels by the key's digest, where they are others than the architectures' (twins)."""
        self._cache, self._devices, self._packed = cache, devices, packed
        self._scopes = scopes or {}

    def __call__(self, artifact: str, device: str, version: TunableVersion, /) -> Engine:
        return self.load(artifact, device, version.path)

    def load(self, artifact: str, device: str, model: Path) -> HeldEngine:
        """Raises EngineError; nothing is held then."""
        key, cards = self._devices[device]
        with ExitStack() as held:
            entry = self._get(held, "artifacts", artifact, device)
            try:
                parts = parts_of(entry.manifest, self._scopes.get(device, key.architecture))
            except (KeyError, TypeError, AttributeError) as problem:
                raise EngineError(f"the artifact's manifest is incomplete: {problem!r}") from problem
            entries = {(kind, digest): self._get(held, kind, digest, scope) for kind, digest, scope in parts}

            def constants(digest: str) -> Mapping[str, Array]:
                try:
                    return load_constants(entries["constants", digest])
                except (OSError, ValueError) as problem:
                    raise EngineError(f"constants {digest} cannot be read: {problem}") from problem

            engine = TvmCudaEngine.load(
                entry.path,
                entry.manifest,
                model=model,
                kernels={d: e.files[KERNEL_FILE] for (kind, d), e in entries.items() if kind == "kernels"},
                constants=constants,
                devices=cards,
                packed=self._packed,
            )
            return HeldEngine(engine, held.pop_all())

    def _get(self, held: ExitStack, kind: Kind, digest: str, scope: str) -> Entry:
        entry = self._cache.get(kind, digest, scope, hold=True)
        if not isinstance(entry, Entry):
            raise EngineError(f"{kind} {digest[:12]} is not in the cache ({entry.reason.value})")
        held.callback(self._cache.release, entry)
        return entry
