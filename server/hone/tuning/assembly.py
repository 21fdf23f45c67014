"""Background tuning as one object: what it watches from the start, and the tuner, which starts after serving does.

Everything that takes time (reading the machine, opening the cache's folders, loading TVM's runtime) happens on a
thread of its own after `start`, so that tuning never delays readiness.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from hone.config import Settings
from hone.engines.cuda_device import CudaDevice
from hone.engines.cuda_transfers import CudaTransfers
from hone.engines.tvm import PackedWeights
from hone.engines.tvm_runtime import TvmRuntime, load_cuda
from hone.errors import Unavailable
from hone.kernels import CacheUnsafe, DeviceKey, KernelsCache
from hone.kernels.gpu_key import Gpu, unsupported
from hone.kernels.spare import SpareFolder
from hone.kernels.statistics import CacheStatistics
from hone.serving.promotion import Promotions
from hone.serving.registry import ModelRegistry
from hone.specialization import Observers
from hone.tuning.activity import ActivityBoard
from hone.tuning.artifacts import ArtifactLoader, KeyMaker
from hone.tuning.book import TunerCounters
from hone.tuning.budget import Budget
from hone.tuning.gpu_artifacts import GpuArtifactLoader
from hone.tuning.gpus import kind_of, missing_cuda_tools
from hone.tuning.holding import OperatorHolds
from hone.tuning.options import Device, TunerOptions
from hone.tuning.ports import TunableVersion
from hone.tuning.probation import Death, Probation
from hone.tuning.running import RunningBoard
from hone.tuning.served import ServedVersions
from hone.tuning.signatures import Traffic
from hone.tuning.tuner import Tuner
from hone.tuning.verdicts import Verdicts
from hone.tuning.watch import Watch
from hone.types import Engine

_log = logging.getLogger(__name__)

_DEVICE = "cpu0"
_MIB = 1 << 20
#: Looking at the whole cache reads every folder in it.
_TENDING_SECONDS = 60.0
_PROBATION_FOLDER = ".probation"
_HOLDS_FOLDER = ".holds"
#: Events of a model's history that an operator wants to read of; the rest (stages, what passed) is in its status.
_LOGGED = frozenset({"promoted", "refused", "failed", "unsupported", "rolled_back", "retired", "quarantined", "held"})
#: What is left here by a server that was killed is swept after an hour.
_STAGING_FOLDER = ".staging"


class BackgroundTuning:
    """See `specialization.TuningControl`. The constructor raises CacheUnsafe where the cache cannot be trusted."""

    def __init__(
        self,
        settings: Settings,
        registry: ModelRegistry,
        *,
        follow_holds: bool = True,
        spare: bool = True,
        gpus: Sequence[Gpu] = (),
        transfers: CudaTransfers | None = None,
    ) -> None:
        """`follow_holds`: what operators paused or pinned stays so over a restart. `spare`: what the cache cannot keep
        is kept in a temporary folder while this lives. `transfers` are the process's, where it has GPUs."""
        self._settings = settings
        self._follow_holds = follow_holds
        self._gpus = tuple(gpus)
        self._transfers = transfers
        self._models = ServedVersions(registry, {kind_of(gpu): "tf32" for gpu in gpus if _has_tf32(gpu)})
        self._promotions = Promotions(registry)
        self._spare = SpareFolder.make() if spare else None
        try:
            self._cache = KernelsCache(
                settings.kernels_cache,
                spare=self._spare.path if self._spare else None,
                size_limit_bytes=settings.kernels_cache_mib * _MIB if settings.kernels_cache_mib else None,
            )
        except CacheUnsafe:
            self._close_spare()
            raise
        self._activity = ActivityBoard()
        self._traffic = Traffic()
        self._running = RunningBoard()
        self._watch = Watch(self._promotions, activity=self._activity.read, running=self._running.running)
        self._next_tending = float("-inf")
        self._tuner: Tuner | None = None
        self._starting: threading.Thread | None = None
        self._stopped = False

    @property
    def observers(self) -> Observers:
        """Who serving is to tell of executions."""
        return Observers(watcher=self._watch, activity=self._activity, traffic=self._traffic, running=self._running)

    def start(self) -> None:
        self._starting = threading.Thread(target=self._start, name="tuner-start", daemon=True)
        self._starting.start()

    def stop(self, timeout_seconds: float) -> bool:
        """End the child and the tuner's thread. False when that took longer."""
        self._stopped = True
        if self._starting is not None:
            self._starting.join(timeout_seconds)
        try:
            return self._tuner is None or self._tuner.stop(timeout_seconds)
        finally:
            self._cache.keep_spared()
            self._close_spare()

    def _close_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()

    def wake(self) -> None:
        """Models were loaded or unloaded."""
        if self._tuner is not None:
            self._tuner.wake()

    # --- TuningControl

    def status(self, model: str, version: str = "") -> dict[str, Any]:
        tuner = self._tuner
        if tuner is None or not any(_is(told, model, version) for told in tuner.statuses()):
            return {
                "model": model,
                "version": version,
                "state": "queued",
                "progress": 0.0,
                "reason": "tuning has not looked at it yet",
                "job": {},
                "buckets": [],
                "history": [],
            }
        return tuner.status(model, version)

    def act(self, model: str, version: str, action: str) -> Future[None]:
        if self._tuner is None:
            raise Unavailable("tuning is still starting")
        return self._tuner.act(model, version, action)

    # --- for metrics

    def statuses(self) -> list[dict[str, Any]]:
        return [] if self._tuner is None else self._tuner.statuses()

    @property
    def counters(self) -> TunerCounters:
        return TunerCounters() if self._tuner is None else self._tuner.counters

    @property
    def num_queued(self) -> int:
        return 0 if self._tuner is None else self._tuner.num_queued

    @property
    def num_spared(self) -> int:
        """Entries that the cache could not keep."""
        return self._cache.num_spared

    @property
    def num_declined(self) -> Mapping[tuple[str, int], int]:
        """Executions that tuned engines left to the baseline, by model and version."""
        return self._watch.num_declined

    @property
    def cache_statistics(self) -> CacheStatistics:
        return self._cache.statistics

    @property
    def cache_limit_bytes(self) -> int | None:
        """None where the cache may grow without limit."""
        return self._cache.size_limit_bytes

    def _tend_cache(self) -> None:
        """On the tuner's thread, while no child is at work."""
        self._cache.keep_spared()
        now = time.monotonic()
        if now >= self._next_tending:
            self._next_tending = now + _TENDING_SECONDS
            self._cache.tend()

    # --- the starting thread

    def _start(self) -> None:
        try:
            tuner = self._build()
        except Exception:
            _log.exception("tuning could not start; serving goes on without it")
            return
        if not self._stopped:
            self._tuner = tuner
            tuner.start()

    def _build(self) -> Tuner:
        settings = self._settings
        num_cores = len(os.sched_getaffinity(0))
        run_threads = settings.intra_op_threads or num_cores
        device = DeviceKey.for_cpu()
        keys = list(dict.fromkeys([device, *(gpu.key for gpu in self._gpus)]))
        cannot_build = missing_compiler()
        if cannot_build:
            _log.warning("models stay on ONNX Runtime, except for what the cache holds: %s", cannot_build)
        unsupported_on = {gpu.key.digest: reason for gpu in self._gpus if (reason := unsupported(gpu.key))}
        cannot_on_gpus = missing_cuda_tools() if len(unsupported_on) < len(self._gpus) else ""
        for reason in filter(None, [*unsupported_on.values(), cannot_on_gpus]):
            _log.warning("%s", reason)
        options = TunerOptions(
            mode=settings.tuning,
            budget=Budget(
                seconds=settings.tuning_budget_secs,
                cpu_share=settings.tuning_cpu_share,
                memory_bytes=settings.tuning_memory_mib * _MIB,
                memory_is_set="tuning_memory_mib" in settings.model_fields_set,
                pause=settings.tuning_pause,
            ),
            run_threads=run_threads,
            kernels_cache=settings.kernels_cache.absolute(),
            spare=self._spare.path if self._spare else None,
            cannot_build=cannot_build,
            cannot_build_on={gpu.key.digest: cannot_on_gpus for gpu in self._gpus if cannot_on_gpus},
            unsupported_on=unsupported_on,
            temporary_root=self._cache.path / _STAGING_FOLDER,
        )
        key_of = KeyMaker(keys, margin=options.margin, run_threads=run_threads)
        return Tuner(
            self._models,
            self._promotions,
            devices=[
                Device(_DEVICE, device.digest, device.fields),
                *(
                    Device(f"gpu{gpu.ordinal}", gpu.key.digest, gpu.key.fields, kind_of(gpu), gpu.ordinal)
                    for gpu in self._gpus
                ),
            ],
            memories={key.digest: Verdicts(self._cache, key.digest) for key in keys},
            quarantine=self._cache,
            key_of=key_of,
            plain_key_of=key_of.plain,
            load=_LazyLoader(self._cache, device, run_threads, self._gpus, self._transfers),
            watch=self._watch,
            probation=_FaultNoted(self._cache.path / _PROBATION_FOLDER, self._running),
            traffic=self._traffic,
            options=options,
            holds=OperatorHolds(self._cache.path / _HOLDS_FOLDER if self._follow_holds else None),
            activity=self._activity.read,
            activity_descriptor=self._activity.descriptor,
            listener=_log_event,
            num_cores=num_cores,
            upkeep=self._tend_cache,
            lost=lambda: self._transfers.cuda.lost if self._transfers is not None else "",
        )


class _LazyLoader:
    """Loads TVM's runtime with the first artifact: a server that has none does not pay for it."""

    def __init__(
        self,
        cache: KernelsCache,
        device: DeviceKey,
        num_threads: int,
        gpus: Sequence[Gpu] = (),
        transfers: CudaTransfers | None = None,
    ) -> None:
        self._cache = cache
        self._device = device
        self._num_threads = num_threads
        self._gpus = gpus
        self._transfers = transfers
        self._runtime: TvmRuntime | None = None
        self._packed = PackedWeights()
        self._loader: ArtifactLoader | None = None
        self._gpu_loader: GpuArtifactLoader | None = None

    def __call__(self, artifact: str, device: str, version: TunableVersion, /) -> Engine:
        if self._runtime is None:
            self._runtime = TvmRuntime.load(self._num_threads)
        if device != self._device.digest:
            if self._gpu_loader is None:
                self._gpu_loader = GpuArtifactLoader(self._cache, self._cards(self._runtime), self._packed)
            return self._gpu_loader(artifact, device, version)
        if self._loader is None:
            self._loader = ArtifactLoader(self._cache, [self._device], self._runtime, self._packed)
        return self._loader(artifact, device, version)

    def _cards(self, runtime: TvmRuntime) -> dict[str, tuple[DeviceKey, list[CudaDevice]]]:
        """Raises EngineError."""
        transfers = self._transfers = self._transfers or CudaTransfers.load()
        load_cuda()
        cards: dict[str, tuple[DeviceKey, list[CudaDevice]]] = {}
        for gpu in self._gpus:
            card = CudaDevice(transfers.cuda, runtime, gpu.ordinal, transfers=transfers)
            cards.setdefault(gpu.key.digest, (gpu.key, []))[1].append(card)
        return cards


class _FaultNoted(Probation):
    """Has the interpreter's fault handler write its note where the next server finds it."""

    def open(self) -> list[Death]:
        deaths = super().open()
        if self.fault_note is not None:
            faulthandler.enable(self.fault_note)
        return deaths

    def close(self) -> None:
        faulthandler.disable()
        super().close()


def _log_event(event: dict[str, Any]) -> None:
    """A line of a model's tuning history, for the log."""
    if event["event"] not in _LOGGED:
        return
    level = logging.WARNING if event["event"] in ("rolled_back", "quarantined", "failed") else logging.INFO
    told = [f"{name} {value:.2f}" for name in ("speedup",) if isinstance(value := event.get(name), float)]
    told += [str(event["reason"])] if event.get("reason") else []
    _log.log(
        level,
        "tuning of %s: %s %s%s",
        event["model"],
        event["event"],
        event.get("signature", ""),
        f" ({'; '.join(told)})" if told else "",
        extra={"model": event["model"]},
    )


def _has_tf32(gpu: Gpu) -> bool:
    """Whether products of float32 can go through tensor cores, as the baseline's do by default."""
    capability: Any = gpu.key.fields["compute_capability"]
    return tuple(capability) >= (8, 0)


def missing_compiler() -> str:
    """Why nothing can be compiled on this machine; empty where it can."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "no C++ compiler is installed (on Debian: apt-get install g++)"
    return ""


def _is(told: dict[str, Any], model: str, version: str) -> bool:
    return told["model"] == model and (not version or told["version"] == version)
