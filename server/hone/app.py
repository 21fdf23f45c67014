"""The composition root: builds every object, starts them in order, stops them in reverse; owns signals and threads."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import uvloop
from prometheus_client import CollectorRegistry

from hone import __version__
from hone.config import Settings
from hone.dashboard import Dashboard
from hone.dashboard.picture import Painter
from hone.dashboard.readings import Readings
from hone.engines.cuda_transfers import CudaTransfers
from hone.engines.onnxruntime import has_cuda
from hone.engines.onnxruntime_memory import MemoryLimit
from hone.errors import HoneError
from hone.frontends.grpc import GrpcServer
from hone.frontends.http import build_http_app, error_response
from hone.frontends.http_server import HttpServer
from hone.logs import LogControl, configure
from hone.metrics import Metrics
from hone.metrics.devices import no_pinned_memory
from hone.metrics.endpoint import MetricsEndpoint
from hone.repository import ModelRepository, RepositoryPoller
from hone.serving.executor import Completions
from hone.serving.follower import RepositoryFollower
from hone.serving.lifecycle import BaselineLoader, ModelLifecycle
from hone.serving.registry import ModelRegistry
from hone.serving.service import InferenceService
from hone.serving.shared_memory import SharedMemoryRegions
from hone.specialization import Observers
from hone.tracing import TraceControl, open_tracer
from hone.tuning.assembly import BackgroundTuning
from hone.tuning.gpus import detect_gpus, kind_of
from hone.tuning.metrics import TuningCollector

_log = logging.getLogger(__name__)

#: Seconds between a thread asking for the interpreter lock and getting it. The default of 5 ms is what an executor
#: thread may wait for a busy event loop; measured, 0.5 ms takes 14 µs off the way to the executor and back.
_SWITCH_INTERVAL_SECONDS = 0.0005
#: glibc's M_MMAP_THRESHOLD (its maximum), M_TRIM_THRESHOLD and M_TOP_PAD, in bytes.
_MALLOC_OPTIONS = ((-3, 32 << 20), (-1, 128 << 20), (-2, 16 << 20))
#: Seconds that the last flush of logs and traces may take.
_FLUSH_SECONDS = 2.0
#: Seconds between two pictures of the models on a terminal.
_PICTURE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Display:
    """Where the server tells people (or, `as_json`, programs: an object a line) what it serves. `show` takes a picture
    of the models every second, as `dashboard.picture` makes them; None where nobody looks."""

    out: TextIO
    log: TextIO
    as_json: bool = False
    show: Callable[[Mapping[str, Any]], None] | None = None


def serve(settings: Settings, display: Display | None = None) -> int:
    """Run the server until SIGTERM or SIGINT. Returns the exit code: 0 stopped as asked, 1 could not start."""
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    keep_large_blocks()
    display = display or Display(sys.stdout, sys.stderr)
    log_control = configure(settings, display.log)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            application = Application(settings, log_control, runner.get_loop(), display)
            code = runner.run(application.run())
            if not application.ended_cleanly:
                # A thread is inside an engine and cannot be ended: leaving the interpreter would wait for it.
                log_control.close(_FLUSH_SECONDS)
                os._exit(code)
            return code
    finally:
        log_control.close(_FLUSH_SECONDS)


def keep_large_blocks() -> None:
    """Let the allocator reuse blocks of up to 32 MiB instead of returning each to the kernel.

    Request bodies and outputs are of that kind: faulting their pages in anew for every request costs more than a small
    inference (600 KB tensors over HTTP: 0.8 ms a request with glibc's defaults, 0.5 ms so). Other C libraries are left
    as they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in _MALLOC_OPTIONS:
            libc.mallopt(parameter, value)


def memory_limit(settings: Settings) -> MemoryLimit | None:
    """What the settings let ONNX Runtime take for requests; None for no limit."""
    return MemoryLimit(settings.onnxruntime_memory_mib) if settings.onnxruntime_memory_mib else None


class Application:
    """One server: `run` builds nothing, it starts what `__init__` built, waits for a signal, and stops it."""

    def __init__(
        self, settings: Settings, log_control: LogControl, loop: asyncio.AbstractEventLoop, display: Display
    ) -> None:
        self._settings = settings
        self._display = display
        self._log_control = log_control
        self._stop = asyncio.Event()
        self.ended_cleanly = True
        """False when engines or loads still ran at the exit timeout, or a GPU is lost: the interpreter would free what
        lies on it at its end, which fails, and aborts."""
        gpus = detect_gpus()
        transfers = self._transfers = CudaTransfers.load() if gpus else None
        self._repository = ModelRepository(
            settings.model_repository,
            config_name=settings.model_config_name,
            allow_file_override=settings.allow_file_override,
            num_gpus=len(gpus),
        )
        self._registry = ModelRegistry()
        collectors = CollectorRegistry()
        self._metrics = Metrics(
            collectors,
            allow_cpu_metrics=settings.allow_cpu_metrics,
            allow_gpu_metrics=settings.allow_gpu_metrics,
            interval_ms=settings.metrics_interval_ms,
            pinned=no_pinned_memory if transfers is None else lambda: transfers.pinned.usage,
        )
        self._completions = Completions(loop)
        self._tuning: BackgroundTuning | None = None
        if settings.tuning != "off":
            self._tuning = BackgroundTuning(settings, self._registry, gpus=gpus, transfers=transfers)
            self._registry.on_publish = self._tuning.wake
            collectors.register(TuningCollector(self._tuning))
        self._lifecycle = ModelLifecycle(
            self._repository,
            self._registry,
            self._metrics,
            self._completions,
            num_threads=settings.model_load_thread_count,
            num_retries=settings.model_load_retry_count,
            default_max_batch_size=settings.default_max_batch_size,
            load_engine=BaselineLoader(
                settings.intra_op_threads, len(gpus) if has_cuda() else 0, transfers, memory_limit(settings)
            ),
            gpu_kinds=[kind_of(gpu) for gpu in gpus],
            observers=self._tuning.observers if self._tuning is not None else Observers(),
        )
        self._regions = SharedMemoryRegions(allowed=settings.allow_client_shm)
        trace_control = TraceControl(settings)
        self._tracer = open_tracer(settings, trace_control, __version__)
        self._service = InferenceService(
            server_name=settings.server_name,
            registry=self._registry,
            lifecycle=self._lifecycle,
            regions=self._regions,
            log_control=log_control,
            trace_control=trace_control,
            tracer=self._tracer,
            control_mode=settings.model_control_mode,
            strict_readiness=settings.strict_readiness,
            ready_requires_model=settings.ready_requires_model,
            known_names=self._repository.names,
            tuning=self._tuning,
            broken=lambda: self._lost_gpu,
        )
        self._http_app = build_http_app(self._service, settings)
        self._dashboard: Dashboard | None = None
        if settings.dashboard == "on" and settings.allow_http:
            self._dashboard = Dashboard(
                settings,
                self._service,
                self._registry,
                self._tuning,
                known_names=self._repository.names,
                keys=self._http_app.restrictions,
                answer_error=error_response,
            )
            self._dashboard.mount(self._http_app.fastapi)
        self._http = HttpServer(self._http_app, settings.http_address, settings.http_port, settings=settings)
        self._grpc = GrpcServer(self._service, settings)
        self._metrics_http = HttpServer(
            MetricsEndpoint(self._metrics), settings.metrics_address, settings.metrics_port, settings=settings
        )
        self._follower = RepositoryFollower(
            RepositoryPoller(self._repository),
            self._lifecycle,
            self._registry,
            interval_seconds=settings.repository_poll_secs,
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        started = time.monotonic()
        following: asyncio.Task[None] | None = None
        picturing: asyncio.Task[None] | None = None
        try:
            await self._listen()
            self._tell_addresses()
            if self._display.show is not None:
                picturing = loop.create_task(self._keep_shown(self._display.show))
            failed = await self._until_stopped(self._load_first())
            if failed and self._settings.exit_on_error:
                _log.error("stopping: --exit-on-error, and these models failed to load: %s", ", ".join(failed))
                return 1
            if not self._stop.is_set():
                self._service.start()
                gc.collect()
                gc.freeze()  # what start-up made stays: later collections need not look at it
                self._tell_ready(time.monotonic() - started)
                if self._tuning is not None:
                    self._tuning.start()
                if self._settings.model_control_mode == "poll":
                    following = loop.create_task(self._follower.run())
                await self._stop.wait()
            return 0
        except OSError as problem:
            _log.error("cannot start: %s", problem)
            return 1
        finally:
            for task in (following, picturing):
                if task is not None:
                    task.cancel()
            await self._close()

    @property
    def _lost_gpu(self) -> str:
        """Why this process can use its GPUs no longer; empty while it can, and where there are none."""
        return self._transfers.cuda.lost if self._transfers is not None else ""

    def _interrupt(self) -> None:
        """Stop; and at once when a person asks a second time."""
        if self._stop.is_set():
            _log.warning("interrupted again: requests in flight are cut")
            self._log_control.close(_FLUSH_SECONDS)
            os._exit(128 + signal.SIGINT)
        self._stop.set()

    async def _listen(self) -> None:
        """Bind all ports before any model loads: liveness answers at once, and a taken port is told at once.

        Raises OSError naming the address.
        """
        for part, allowed, start in (
            ("metrics", self._settings.allow_metrics, self._metrics_http.start),
            ("http", self._settings.allow_http, self._http.start),
            ("grpc", self._settings.allow_grpc, self._grpc.start),
        ):
            try:
                if allowed:
                    await start()
            except OSError as problem:
                if problem.errno != errno.EADDRINUSE:
                    raise
                hint = f"end what listens there, or take another with --{part}-port (0: a free one)"
                raise OSError(f"{problem}; {hint}") from problem

    async def _load_first(self) -> list[str]:
        """Load what is to be served at start. Returns the names of those that failed."""
        mode = self._settings.model_control_mode
        names = await asyncio.to_thread(self._repository.names)
        if mode == "explicit" and "*" not in self._settings.load_model:
            names = list(dict.fromkeys(self._settings.load_model))
        results = await asyncio.gather(*(self._lifecycle.load(name) for name in names), return_exceptions=True)
        failed = []
        for name, result in zip(names, results, strict=True):
            if isinstance(result, HoneError):
                _log.error("model %s: %s", name, result, extra={"model": name})
                failed.append(name)
            elif isinstance(result, BaseException):
                raise result
        return failed

    async def _until_stopped(self, loading: Coroutine[Any, Any, list[str]]) -> list[str]:
        """Wait for the first load, or less when the server is to stop."""
        task = asyncio.create_task(loading)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            return []
        return task.result()

    async def _keep_shown(self, show: Callable[[Mapping[str, Any]], None]) -> None:
        """Until cancelled."""
        painter = Painter(
            self._settings, self._service, self._registry, self._tuning, Readings(), self._repository.names
        )
        looked_at = time.monotonic()
        while True:
            now = time.monotonic()
            picture = await painter.look(time.time(), now - looked_at)
            looked_at = now
            show(picture.models)
            await asyncio.sleep(_PICTURE_SECONDS)

    def _tell_addresses(self) -> None:
        settings = self._settings
        places = {}
        if settings.allow_http:
            places["http"] = f"http://{_place(settings.http_address, self._http.port)}"
        if settings.allow_grpc:
            places["grpc"] = _place(settings.grpc_address, self._grpc.port)
        if settings.allow_metrics:
            places["metrics"] = f"http://{_place(settings.metrics_address, self._metrics_http.port)}/metrics"
        if self._dashboard is not None:
            places["dashboard"] = f"http://{_place(settings.http_address, self._http.port)}/"
        repositories = [str(path) for path in settings.model_repository]
        if self._display.as_json:
            told = {"event": "listening", "version": __version__, "model_repository": repositories, **places}
            _print([json.dumps(told)], self._display.out)
            return
        lines = [f"hone {__version__}, models from {', '.join(repositories)}"]
        shown = {"http": "HTTP", "grpc": "gRPC"}
        _print(
            [*lines, *(f"  {shown.get(kind, kind):<9}  {place}" for kind, place in places.items())], self._display.out
        )

    def _tell_ready(self, seconds: float) -> None:
        """What is served, and what to try."""
        served = sorted({model.name for model in self._registry.served()})
        if self._display.as_json:
            told = {"event": "ready", "seconds": round(seconds, 3), "models": served}
            _print([json.dumps(told)], self._display.out)
            return
        shown = ", ".join(served[:8]) + (", ..." if len(served) > 8 else "")
        lines = [f"ready in {seconds:.1f} s: {len(served)} model(s){': ' if served else ''}{shown}"]
        if served and self._settings.allow_http:
            name = "digits" if "digits" in served else served[0]
            lines.append(f"  try  curl http://{_place(self._settings.http_address, self._http.port)}/v2/models/{name}")
            if name == "digits" and self._http.port == Settings().http_port:
                lines.append("  or   .venv/bin/hone infer digits examples/digits/seven.png")
        _print(lines, self._display.out)

    async def _close(self) -> None:
        """In reverse: not ready, no new requests, those in flight finish, then everything ends."""
        deadline = time.monotonic() + self._settings.exit_timeout_secs
        self._service.stop()
        self._service.refuse()
        if self._dashboard is not None:
            self._dashboard.close()  # its streams would be waited for
        if self._settings.allow_grpc or self._settings.allow_http:
            _log.info("stopping: requests in flight get up to %g s", self._settings.exit_timeout_secs)
        if self._tuning is not None and not await asyncio.to_thread(self._tuning.stop, _FLUSH_SECONDS * 5):
            self.ended_cleanly = False
        await asyncio.gather(
            self._http.stop(self._settings.exit_timeout_secs), self._grpc.stop(self._settings.exit_timeout_secs)
        )
        drained = await self._lifecycle.close(max(0.0, deadline - time.monotonic()))
        self.ended_cleanly = self.ended_cleanly and drained and not self._lost_gpu
        await self._metrics_http.stop(_FLUSH_SECONDS)
        if self.ended_cleanly:
            self._completions.close()
        self._http_app.close()
        self._regions.close()
        self._metrics.close()
        self._repository.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.shutdown, _FLUSH_SECONDS)
        _log.info("stopped")


def _print(lines: list[str], out: TextIO) -> None:
    """What cannot be printed (a full disk, a reader that is gone) is no reason not to serve."""
    with contextlib.suppress(OSError, ValueError):
        print("\n".join(lines), file=out, flush=True)


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
