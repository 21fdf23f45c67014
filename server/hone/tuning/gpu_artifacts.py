"""Artifacts for GPUs as engines of this process: on all cards of their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hone.engines.cuda_device import CudaDevice
from hone.engines.tvm import ConstantsSource, PackedWeights
from hone.engines.tvm_cuda import TvmCudaEngine
from hone.kernels import DeviceKey, Entry, KernelsCache
from hone.tuning.artifacts import HeldEngine, load_held
from hone.tuning.ports import TunableVersion
from hone.types import Engine


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

        def make(entry: Entry, kernels: Mapping[str, Path], constants: ConstantsSource) -> TvmCudaEngine:
            return TvmCudaEngine.load(
                entry.path,
                entry.manifest,
                model=model,
                kernels=kernels,
                constants=constants,
                devices=cards,
                packed=self._packed,
            )

        return load_held(self._cache, artifact, device, self._scopes.get(device, key.architecture), make)
