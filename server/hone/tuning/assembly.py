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
from typing import Any

from hone.config import Settings
from hone.engines.tvm import PackedWeights
from hone.engines.tvm_runtime import TvmRuntime
from hone.errors import Unavailable
from hone.kernels import DeviceKey, KernelsCache
from hone.kernels.statistics import CacheStatistics
from hone.serving.promotion import Promotions
from hone.serving.registry import ModelRegistry
from hone.specialization import Observers
from hone.tuning.activity import ActivityBoard
from hone.tuning.artifacts import ArtifactLoader, KeyMaker
from hone.tuning.book import TunerCounters
from hone.tuning.budget import Budget
from hone.tuning.options import Device, TunerOptions
from hone.tuning.ports import TunableVersion
from hone.tuning.probation import Death, Probation
from hone.tuning.served import ServedVersions
from hone.tuning.signatures import Traffic
from hone.tuning.tuner import Tuner
from hone.tuning.verdicts import Verdicts
from hone.tuning.watch import Watch
from hone.types import Engine

_log = logging.getLogger(__name__)

_DEVICE = "cpu0"
_MIB = 1 << 20
_PROBATION_FOLDER = ".probation"
#: Events of a model's history that an operator wants to read of; the rest (stages, what passed) is in its status.
_LOGGED = frozenset({"promoted", "refused", "failed", "unsupported", "rolled_back", "quarantined"})
#: What is left here by a server that was killed is swept after an hour.
_STAGING_FOLDER = ".staging"


class BackgroundTuning:
    """See `specialization.TuningControl`. The constructor raises CacheUnsafe where the cache cannot be trusted."""

    def __init__(self, settings: Settings, registry: ModelRegistry) -> None:
        self._settings = settings
        self._models = ServedVersions(registry)
        self._promotions = Promotions(registry)
        self._cache = KernelsCache(
            settings.kernels_cache,
            size_limit_bytes=settings.kernels_cache_mib * _MIB if settings.kernels_cache_mib else None,
        )
        self._activity = ActivityBoard()
        self._traffic = Traffic()
        self._watch = Watch(self._promotions, activity=self._activity.read)
        self._tuner: Tuner | None = None
        self._starting: threading.Thread | None = None
        self._stopped = False

    @property
    def observers(self) -> Observers:
        """Who serving is to tell of executions."""
        return Observers(watcher=self._watch, activity=self._activity, traffic=self._traffic)

    def start(self) -> None:
        self._starting = threading.Thread(target=self._start, name="tuner-start", daemon=True)
        self._starting.start()

    def stop(self, timeout_seconds: float) -> bool:
        """End the child and the tuner's thread. False when that took longer."""
        self._stopped = True
        if self._starting is not None:
            self._starting.join(timeout_seconds)
        return self._tuner is None or self._tuner.stop(timeout_seconds)

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
                "buckets": [],
                "history": [],
            }
        return tuner.status(model, version)

    def act(self, model: str, version: str, action: str) -> None:
        if self._tuner is None:
            raise Unavailable("tuning is still starting")
        self._tuner.act(model, version, action)

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
    def cache_statistics(self) -> CacheStatistics:
        return self._cache.statistics

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
        cannot_build = missing_compiler()
        if cannot_build:
            _log.warning("models stay on ONNX Runtime, except for what the cache holds: %s", cannot_build)
        options = TunerOptions(
            mode=settings.tuning,
            budget=Budget(
                seconds=settings.tuning_budget_secs,
                cpu_share=settings.tuning_cpu_share,
                memory_bytes=settings.tuning_memory_mib * _MIB,
                pause=settings.tuning_pause,
            ),
            run_threads=run_threads,
            kernels_cache=settings.kernels_cache.absolute(),
            cannot_build=cannot_build,
            temporary_root=self._cache.path / _STAGING_FOLDER,
        )
        return Tuner(
            self._models,
            self._promotions,
            devices=[Device(_DEVICE, device.digest, device.fields)],
            memories={device.digest: Verdicts(self._cache, device.digest)},
            quarantine=self._cache,
            key_of=KeyMaker([device], margin=options.margin, run_threads=run_threads),
            load=_LazyLoader(self._cache, device, run_threads),
            watch=self._watch,
            probation=_FaultNoted(self._cache.path / _PROBATION_FOLDER),
            traffic=self._traffic,
            options=options,
            activity=self._activity.read,
            activity_descriptor=self._activity.descriptor,
            listener=_log_event,
            num_cores=num_cores,
        )


class _LazyLoader:
    """Loads TVM's runtime with the first artifact: a server that has none does not pay for it."""

    def __init__(self, cache: KernelsCache, device: DeviceKey, num_threads: int) -> None:
        self._cache = cache
        self._device = device
        self._num_threads = num_threads
        self._loader: ArtifactLoader | None = None

    def __call__(self, artifact: str, device: str, version: TunableVersion, /) -> Engine:
        if self._loader is None:
            runtime = TvmRuntime.load(self._num_threads)
            self._loader = ArtifactLoader(self._cache, [self._device], runtime, PackedWeights())
        return self._loader(artifact, device, version)


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


def missing_compiler() -> str:
    """Why nothing can be compiled on this machine; empty where it can."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return "no C++ compiler is installed (on Debian: apt-get install g++)"
    return ""


def _is(told: dict[str, Any], model: str, version: str) -> bool:
    return told["model"] == model and (not version or told["version"] == version)
