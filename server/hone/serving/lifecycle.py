"""Loading and unloading: from what is on disk to what is in memory, without ever taking down what serves.

New versions are made and warmed on loader threads, then published in one step; the old ones close when their last
lease ends. A load that fails leaves what was serving and says why in the index. One lock per model orders control
calls; the calls themselves are coroutines of the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from hone.engines.cuda_transfers import CudaTransfers
from hone.engines.onnxruntime import OnnxRuntimeEngine, SessionSettings
from hone.engines.onnxruntime_cuda import load_baseline
from hone.engines.onnxruntime_memory import MemoryLimit
from hone.engines.placed import PlacedEngine
from hone.errors import EngineError, HoneError, InternalError, LoadFailed, ModelNotInRepository, written_in
from hone.metrics import Metrics
from hone.protos import config_pb
from hone.repository import ModelDefinition, ModelRepository, check_model_name, complete, warmup_samples
from hone.serving.executor import Completions
from hone.serving.model import ServedModel, fingerprint_of
from hone.serving.registry import ModelEntry, ModelRegistry, ModelState, VersionStatus
from hone.specialization import Observers
from hone.types import Engine, LoadParameters

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_AS_ON_DISK = LoadParameters()
_NOBODY = Observers()

EngineLoader = Callable[[Path, config_pb.ModelConfig], Engine]


class BaselineLoader:
    """Loads the engine that every model starts on. Instances of a model share its threads out among themselves."""

    def __init__(
        self,
        num_threads: int = 0,
        num_gpus: int = 0,
        transfers: CudaTransfers | None = None,
        memory: MemoryLimit | None = None,
    ) -> None:
        """`num_gpus` that ONNX Runtime can use here: models that ask for them run there from the start, with these
        transfers. `memory` is what those on the CPU may take."""
        self._num_threads = num_threads or len(os.sched_getaffinity(0))
        self._num_gpus = num_gpus
        self._transfers = transfers
        self._memory = memory

    def __call__(self, path: Path, config: config_pb.ModelConfig) -> Engine:
        """Raises EngineError."""
        num_threads = max(1, self._num_threads // (sum(max(1, group.count) for group in config.instance_group) or 1))
        settings = SessionSettings(config.optimization.graph.level, num_threads, memory=self._memory)
        gpus = gpus_of(config, self._num_gpus)
        if not gpus:
            return OnnxRuntimeEngine.load(path, settings)
        loaded: dict[int, Engine] = {}
        try:
            for gpu in gpus:
                loaded[gpu] = load_baseline(path, replace(settings, gpu=gpu), self._transfers)
        except EngineError:
            for engine in loaded.values():
                engine.close()
            raise
        return PlacedEngine(loaded)


def gpus_of(config: config_pb.ModelConfig, num_gpus: int) -> list[int]:
    """Ordinals of the GPUs that the baseline runs on; none where a group of instances is on the CPU, since an engine's
    instances must all be of one kind. Groups that name no kind take GPUs where there are any."""
    kinds = config_pb.ModelInstanceGroup
    groups = list(config.instance_group) or [kinds()]
    if not num_gpus or any(group.kind not in (kinds.KIND_GPU, kinds.KIND_AUTO) for group in groups):
        return []
    return sorted({gpu for group in groups for gpu in (group.gpus or range(num_gpus)) if gpu < num_gpus})


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A version made on a loader thread, not yet published."""

    engine: Engine
    config: config_pb.ModelConfig
    seconds: float


class ModelLifecycle:
    """Loads and unloads models of one repository into one registry."""

    def __init__(
        self,
        repository: ModelRepository,
        registry: ModelRegistry,
        metrics: Metrics,
        completions: Completions,
        *,
        num_threads: int,
        num_retries: int = 0,
        default_max_batch_size: int = 4,
        load_engine: EngineLoader | None = None,
        observers: Observers = _NOBODY,
        gpu_kinds: Sequence[str] = (),
    ) -> None:
        """`gpu_kinds` are the kinds of the server's GPUs, by ordinal, as specializations name them."""
        self._repository = repository
        self._registry = registry
        self._metrics = metrics
        self._completions = completions
        self._num_retries = num_retries
        self._default_max_batch_size = default_max_batch_size
        self._load_engine = load_engine or BaselineLoader()
        self._observers = observers
        self._gpu_kinds = tuple(gpu_kinds)
        self._generation_numbers = itertools.count(1)
        self._loaders = ThreadPoolExecutor(num_threads, thread_name_prefix="load")
        # A lock lives while somebody uses it, so that asking for unknown names leaves nothing behind.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._retirements: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._users: Counter[Path] = Counter()
        self._running: list[Callable[..., object]] = []

    async def load(self, name: str, parameters: LoadParameters = _AS_ON_DISK) -> None:
        """Load a model, or reload it where its files or configuration changed.

        Raises NotFound, RepositoryError, ConfigError (nothing on disk that could be loaded) and LoadFailed (a version
        did not come up); in each case what was serving still serves, and the index tells the reason. A caller that is
        cancelled does not cancel the load.
        """
        check_model_name(name)
        task = asyncio.get_running_loop().create_task(self._load(name, parameters))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def _load(self, name: str, parameters: LoadParameters) -> None:
        async with self._lock(name):
            known = self._registry.entry(name) is not None
            entry = self._registry.ensure(name)
            entry.wanted = True
            try:
                definition = await self._call(self._repository.read, name, parameters)
            except HoneError as problem:
                if not known and (isinstance(problem, ModelNotInRepository) or parameters != _AS_ON_DISK):
                    self._registry.forget(name)  # a request that asks for nonsense leaves nothing behind
                entry.problem = str(problem)
                raise
            entry.problem = ""
            entry.fingerprint = definition.fingerprint
            self._users[definition.path] += 1
            try:
                await self._load_versions(name, entry, definition)
            finally:
                self._release(definition)

    async def unload(self, name: str) -> None:
        """Stop serving a model; unknown names are no error. Requests in flight finish."""
        async with self._lock(name):
            self._unload(name)

    def _unload(self, name: str) -> None:
        entry = self._registry.entry(name)
        if entry is None:
            return
        entry.wanted = entry.was_whole = False
        entry.problem = ""
        retired = entry.served
        self._registry.publish(name, {})
        for version, status in entry.statuses.items():
            if version in retired:
                status.state, status.reason = ModelState.UNLOADING, ""
            else:
                status.state, status.reason = ModelState.UNAVAILABLE, "unloaded"
        for version, model in retired.items():
            self._retire(model, entry.statuses.get(version))

    async def forget(self, name: str) -> None:
        """Unload a model whose folder is gone, and drop it from the index."""
        await self.unload(name)
        self._registry.forget(name)

    async def close(self, timeout_seconds: float) -> bool:
        """Retire everything, for at most `timeout_seconds`. False when requests or loads still ran then."""
        for task in self._tasks:
            task.cancel()
        for name in self._registry.names():
            self._unload(name)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        late: set[asyncio.Task[None]] = set()
        if self._retirements:
            _, late = await asyncio.wait(self._retirements, timeout=timeout_seconds)
            for task in late:
                task.cancel()
        if late:
            _log.warning("%d model version(s) still had requests in flight at the exit timeout", len(late))
        if self._running:
            _log.warning("%d load(s) still ran at the end", len(self._running))
        return not late and not self._running

    async def _load_versions(self, name: str, entry: ModelEntry, definition: ModelDefinition) -> None:
        kept: dict[int, ServedModel] = {}
        wanted: dict[int, Path] = {}
        for version, path in definition.versions.items():
            served = entry.served.get(version)
            if served is not None and served.fingerprint == fingerprint_of(definition, version):
                kept[version] = served
                entry.statuses[version] = VersionStatus(ModelState.READY)
            else:
                wanted[version] = path
                if served is None:
                    entry.statuses[version] = VersionStatus(ModelState.LOADING)
        results = await asyncio.gather(*(self._load_version(definition, version) for version in wanted))
        before = entry.served
        fresh: dict[int, ServedModel] = {}
        failures: list[tuple[int, str]] = []
        for version, result in zip(wanted, results, strict=True):
            if isinstance(result, HoneError):
                failures.append((version, str(result)))
                continue
            try:
                fresh[version] = self._serve(definition, version, result)
            except HoneError as problem:
                result.engine.close()
                failures.append((version, str(problem)))
        for version, model in fresh.items():
            if version in before and before[version].ref == model.ref:
                model.slot.take_over(before[version].slot)  # only the configuration changed
        # When a version failed, the versions that this load would have retired go on serving.
        surviving = before if failures else {}
        self._registry.publish(name, {**surviving, **kept, **fresh})
        for version, model in before.items():
            if entry.served.get(version) is not model:
                self._retire(model, None)
        for version in list(entry.statuses):
            if version not in entry.served and version not in wanted:
                del entry.statuses[version]
        for version in entry.served:
            entry.statuses[version] = VersionStatus(ModelState.READY)
        for version, reason in failures:
            if version in entry.served:
                entry.statuses[version] = VersionStatus(
                    ModelState.READY, f"reload failed, still serving as before: {reason}"
                )
            else:
                entry.statuses[version] = VersionStatus(ModelState.UNAVAILABLE, reason)
        if failures:
            raise LoadFailed(name, failures)
        entry.was_whole = True

    async def _load_version(self, definition: ModelDefinition, version: int) -> _Loaded | HoneError:
        for attempt in range(self._num_retries + 1):
            try:
                return await self._call(self._make, definition, version)
            except HoneError as problem:
                failure = problem
            except Exception:
                _log.exception("loading %s version %d failed unexpectedly", definition.name, version)
                return InternalError("internal error while loading, see the server's log")
            if attempt < self._num_retries:
                _log.warning("loading %s version %d failed, trying again: %s", definition.name, version, failure)
        return failure

    def _make(self, definition: ModelDefinition, version: int) -> _Loaded:
        """On a loader thread: session, configuration, warm-up. Raises HoneError."""
        started = time.monotonic()
        engine = self._load_engine(definition.versions[version], definition.config)
        try:
            with written_in(definition.config_file):
                config = complete(
                    definition.config,
                    engine.inputs,
                    engine.outputs,
                    model=definition.name,
                    default_max_batch_size=self._default_max_batch_size,
                    initializers=engine.initializers,
                    num_gpus=len(self._gpu_kinds),
                )
                self._warm(definition, config, engine)
        except HoneError:
            engine.close()
            raise
        seconds = time.monotonic() - started
        return _Loaded(engine, config, seconds)

    @staticmethod
    def _warm(definition: ModelDefinition, config: config_pb.ModelConfig, engine: Engine) -> None:
        outputs = [spec.name for spec in config.output]
        for sample in warmup_samples(definition, config, engine.inputs):
            instance = engine.instantiate()
            for _ in range(max(1, sample.count)):
                instance.run(sample.inputs, outputs)

    def _serve(self, definition: ModelDefinition, version: int, made: _Loaded) -> ServedModel:
        """Raises ConfigError for metric tags that cannot be labels."""
        name = definition.name
        with written_in(definition.config_file):
            statistics = self._metrics.model(name, str(version), dict(made.config.metric_tags))
        statistics.load_seconds = made.seconds
        self._users[definition.path] += 1
        _log.info("loaded %s version %d in %.3f s", name, version, made.seconds, extra={"model": name})
        return ServedModel(
            definition=definition,
            version=version,
            config=made.config,
            engine=made.engine,
            statistics=statistics,
            completions=self._completions,
            observers=self._observers,
            generation_numbers=self._generation_numbers,
            gpu_kinds=self._gpu_kinds,
        )

    def _retire(self, model: ServedModel, status: VersionStatus | None) -> None:
        task = asyncio.get_running_loop().create_task(self._drain(model, status))
        self._retirements.add(task)
        task.add_done_callback(self._retirements.discard)

    async def _drain(self, model: ServedModel, status: VersionStatus | None) -> None:
        await model.retire()
        self._metrics.remove(model.statistics)
        self._release(model.definition)
        if status is not None and status.state is ModelState.UNLOADING:
            status.state, status.reason = ModelState.UNAVAILABLE, "unloaded"

    def _release(self, definition: ModelDefinition) -> None:
        """Give files that came with a load request back when the last version made of them is gone."""
        self._users[definition.path] -= 1
        if not self._users[definition.path]:
            del self._users[definition.path]
            self._repository.release(definition)

    def _lock(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    async def _call(self, function: Callable[..., _T], *args: object) -> _T:
        def run() -> _T:
            self._running.append(function)  # appending and popping are atomic: loader threads share the list
            try:
                return function(*args)
            finally:
                self._running.pop()

        return await asyncio.get_running_loop().run_in_executor(self._loaders, run)
