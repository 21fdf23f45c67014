"""The baseline on NVIDIA GPUs: ONNX Runtime's CUDA provider by IO binding, with hone's own copies.

A session of its own on each card launches on one stream. Each executor thread has a stream for copies: inputs go
through pinned memory that is used again, into device memory that is used again; the session's stream waits for them;
outputs are copied once, into pinned memory that becomes the answer. So one instance copies while another computes.

Where the process loses its GPU, the same model answers on the CPU from then on: slower, and never wrong.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hone.engines.cuda_runtime import CudaError, CudaRuntime
from hone.engines.cuda_transfers import CudaTransfers
from hone.engines.onnxruntime import (
    ONNX_BFLOAT16,
    OnnxRuntimeEngine,
    SessionSettings,
    cuda_provider,
    make_session,
    reason_of,
)
from hone.errors import DeviceLost, EngineError
from hone.types import NUMPY_DTYPES, Array, EngineInstance

_log = logging.getLogger(__name__)

_BFLOAT16 = NUMPY_DTYPES["BF16"]
#: Memory on the card is given out in powers of two from here, so that it seldom has to grow.
_SMALLEST_BYTES = 1 << 12


def load_baseline(
    path: Path,
    settings: SessionSettings,
    transfers: CudaTransfers | None = None,
    *,
    falls_back: bool = True,
    reserve_bytes: int | None = None,
) -> OnnxRuntimeEngine:
    """The engine that these settings ask for; `falls_back`: to the CPU where the process loses its GPU. Of the GPU's
    free memory `reserve_bytes` are left to others.

    Raises EngineError; ValueError for a GPU without `transfers`.
    """
    if settings.gpu is None:
        return OnnxRuntimeEngine.load(path, settings)
    if transfers is None:
        raise ValueError("a session on a GPU needs the process's transfers")
    if transfers.cuda.lost and falls_back:
        return OnnxRuntimeEngine.load(path, replace(settings, gpu=None))
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    transfers.cuda.set_device(settings.gpu)
    max_bytes = None
    if reserve_bytes is not None:
        free, _ = transfers.cuda.free_and_total_bytes()
        max_bytes = free - reserve_bytes
        if max_bytes <= 0:
            raise EngineError(f"cuda: {free >> 20} MiB of GPU {settings.gpu} are free, and as much is kept for serving")
    stream = _Stream(transfers.cuda)
    try:
        with transfers.captures:
            session = make_session(
                path, settings.graph_level, num_threads, cuda_provider(settings.gpu, stream.handle, max_bytes)
            )
    except EngineError:
        raise
    except Exception as problem:  # its exceptions have no common root below Exception
        raise EngineError(reason_of(problem, path)) from problem

    def on_cpu() -> OnnxRuntimeEngine:
        return OnnxRuntimeEngine.load(path, replace(settings, gpu=None))

    return OnnxRuntimeCudaEngine(session, transfers, settings.gpu, stream, on_cpu if falls_back else None, num_threads)


class OnnxRuntimeCudaEngine(OnnxRuntimeEngine):
    """One ONNX model on one card. Thread-safe but for `close`; each thread runs an instance of its own."""

    def __init__(
        self,
        session: Any,
        transfers: CudaTransfers,
        ordinal: int,
        stream: _Stream,
        on_cpu: Callable[[], OnnxRuntimeEngine] | None,
        num_threads: int = 1,
    ) -> None:
        """`stream` is what the session launches on; `on_cpu` loads the same model without a GPU, None where that is no
        answer."""
        super().__init__(session, num_threads)
        self.transfers, self.ordinal, self.stream = transfers, ordinal, stream
        #: What a session launches on one stream must come from one thread at a time.
        self.computing = threading.Lock()
        self._on_cpu = on_cpu
        self._fallback: OnnxRuntimeEngine | None = None
        self._loading = threading.Lock()

    @property
    def takes_text(self) -> bool:
        """Strings are never on a card."""
        return bool(self._text_inputs or self._text_outputs)

    def instantiate(self) -> EngineInstance:  # type: ignore[override]  # the CPU's engine is its own instance
        """For the calling thread. Raises EngineError."""
        if self.session is None:
            raise EngineError("the engine is closed")
        if self.transfers.cuda.lost:
            return self.fallback().instantiate()
        return OnnxRuntimeCudaInstance(self)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """With ONNX Runtime's own copies: for strings."""
        with self.transfers.captures, self.computing:
            return super().run(inputs, outputs)

    def fallback(self) -> OnnxRuntimeEngine:
        """The model on the CPU, loaded when it is first asked for. Raises EngineError; DeviceLost where there is to be
        none."""
        with self._loading:
            if self._on_cpu is None:
                raise DeviceLost(self.transfers.cuda.lost)
            if self._fallback is None:
                _log.warning(
                    "a model that ran on GPU %d goes on on the CPU: %s", self.ordinal, self.transfers.cuda.lost
                )
                self._fallback = self._on_cpu()
            return self._fallback

    def close(self) -> None:
        if self.transfers.cuda.lost:
            self.transfers.cuda.keep(self.session)
        else:
            self.transfers.cuda.set_device(self.ordinal)  # also has this thread free memory while another captures
        super().close()
        if self._fallback is not None:
            self._fallback.close()


class OnnxRuntimeCudaInstance:
    """One thread's memory and stream for a session on a card."""

    def __init__(self, engine: OnnxRuntimeCudaEngine) -> None:
        cuda = engine.transfers.cuda
        cuda.set_device(engine.ordinal)
        self._engine, self._cuda = engine, cuda
        self._datatypes = {spec.name: NUMPY_DTYPES[spec.datatype] for spec in engine.outputs}
        self._places: dict[str, _Place] = {}
        self._bound: tuple[Any, ...] = ()
        self._copies = _Stream(cuda)
        self._inputs_are_there = _Mark(cuda)
        # Let go of in the order of a tuple: the binding holds the session, whose stream must outlive it.
        self._binding = engine.session.io_binding()
        self._computes = engine.stream

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """The arrays returned are pinned memory of their own, which comes back for others when nobody looks at it.

        Raises EngineError.
        """
        engine = self._engine
        if not self._cuda.lost:
            try:
                return self._run_here(inputs, outputs)
            except EngineError:
                if not self._is_lost():
                    raise
        return engine.fallback().instantiate().run(inputs, outputs)

    def _run_here(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        engine, cuda, copies = self._engine, self._cuda, self._copies.handle
        cuda.set_device(engine.ordinal)  # a thread may have instances on several cards
        if engine.takes_text:
            return engine.run(inputs, outputs)
        arrays: list[Array] = []  # held also when a later download fails: copies into them still run then
        try:
            self._upload(inputs)
            values = self._compute(outputs)
            for name, value in zip(outputs, values, strict=True):
                shape, dtype = value.shape(), self._datatypes[name]
                arrays.append(engine.transfers.download(value.data_ptr(), shape, dtype, copies))
        finally:
            # Also when something failed: memory that a copy still goes to or comes from must not be another's.
            cuda.synchronize(copies)
        # ONNX Runtime owns what lies behind the values, and gives it to the next run: only now.
        del values
        self._binding.clear_binding_outputs()
        return arrays

    def _upload(self, inputs: Mapping[str, Array]) -> None:
        """Bring the inputs onto the card, and bind them where they lie."""
        transfers, copies = self._engine.transfers, self._copies.handle
        lies = []
        for name, array in inputs.items():
            place = self._places.get(name)
            if place is None or place.num_bytes < array.nbytes:
                place = self._places[name] = _Place(transfers, array.nbytes)
            transfers.upload(array, place.address, place.staging, copies)
            lies.append((name, array.dtype, array.shape, place.address))
        self._cuda.record(self._inputs_are_there.handle, copies)
        if self._bound != (bound := tuple(lies)):
            self._bound = ()  # until all are bound
            self._binding.clear_binding_inputs()
            for name, dtype, shape, address in lies:
                told = ONNX_BFLOAT16 if dtype == _BFLOAT16 else dtype.type
                self._binding.bind_input(name, "cuda", self._engine.ordinal, told, shape, address)
            self._bound = bound

    def _compute(self, outputs: Sequence[str]) -> list[Any]:
        """Run, and wait for it: what ONNX Runtime returns are its own values on the card, in the order asked for."""
        engine, binding = self._engine, self._binding
        try:
            # Bound anew each time: else it would write into the values of the run before, whatever their size.
            binding.clear_binding_outputs()
            for name in outputs:
                binding.bind_output(name, "cuda", engine.ordinal)
            with engine.computing:
                self._cuda.wait_for(self._inputs_are_there.handle, self._computes.handle)
                self._cuda.clear_error()  # what failed here before is not its own
                engine.session.run_with_iobinding(binding)
            found: list[Any] = binding.get_outputs()
        except EngineError:
            raise
        except Exception as problem:  # its exceptions have no common root below Exception
            raise EngineError(f"onnxruntime: {reason_of(problem)}") from problem
        return found

    def _is_lost(self) -> bool:
        """Whether the process can use the card no longer, which ONNX Runtime's own errors do not tell for sure."""
        with suppress(CudaError):  # of what kind it is, the runtime notes
            self._cuda.synchronize(self._copies.handle)
        return bool(self._cuda.lost)


class _Stream:
    """A stream for as long as anybody holds it."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, cuda: CudaRuntime) -> None:
        self.handle = cuda.create_stream()
        weakref.finalize(self, cuda.destroy_stream, self.handle).atexit = False


class _Mark:
    """An event for as long as anybody holds it."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, cuda: CudaRuntime) -> None:
        self.handle = cuda.create_mark()
        weakref.finalize(self, cuda.destroy_event, self.handle).atexit = False


class _Place:
    """Where one input lies: on the card, and in pinned memory on its way there."""

    __slots__ = ("__weakref__", "address", "num_bytes", "staging")

    def __init__(self, transfers: CudaTransfers, num_bytes: int) -> None:
        self.num_bytes = max(_SMALLEST_BYTES, 1 << (max(1, num_bytes) - 1).bit_length())
        self.address = transfers.cuda.allocate_device(self.num_bytes)
        weakref.finalize(self, transfers.cuda.free_device, self.address).atexit = False
        self.staging = transfers.pinned.take(self.num_bytes)
