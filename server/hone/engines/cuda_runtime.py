"""The CUDA runtime as hone uses it, by ctypes: memory, copies, streams, events, graphs, and what a device is like.

The runtime's library holds no code of ours and loads on machines without a GPU, where every call says so.

After some failures (an illegal address in a kernel) no call works any more in this process: the GPU is *lost* to it,
and `lost` says why. From then on nothing is freed: freeing fails as well, and libraries that do not expect that end
the process. What would be freed is kept instead.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hone.errors import DeviceLost, EngineError

LIBRARY = "libcudart.so.13"
_TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3
_NON_BLOCKING = 1
_DISABLE_TIMING = 2
_THREAD_LOCAL_CAPTURE = 1
_NOT_READY, _OUT_OF_MEMORY = 600, 2
#: After these nothing works any more in this process's context: those of which the CUDA Runtime API says that the
#: process must be terminated and relaunched; a context that is gone (709); what the hardware itself reports,
#: uncorrectable errors of its memory (214) and of NVLink (220); and what has no name (999), which is how a card that
#: fell off the bus is told.
_POISONING = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
# Numbers of cudaDeviceAttr.
_NUM_SMS, _L2_BYTES, _MAJOR, _MINOR, _SHARED_OPT_IN = 16, 38, 75, 76, 97


class CudaError(EngineError):
    """A call of the CUDA runtime failed."""

    def __init__(self, call: str, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"cuda: {call}: {text} (error {code})")

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY

    @property
    def is_poisoning(self) -> bool:
        """Whether this process can no longer use the device: a new one can."""
        return self.code in _POISONING


class CudaRuntime:
    """One loaded runtime library. Thread-safe; devices are told by CUDA's ordinal, streams and events by handles."""

    def __init__(self, library: Any) -> None:
        """`library` has the functions of the CUDA runtime (a ctypes library, or what stands for one in tests)."""
        self._library = library
        self.lost = ""
        """Why this process can use its GPUs no longer; empty while it can."""
        self._kept: list[object] = []
        self._threads = threading.local()

    def keep(self, *things: object) -> None:
        """Never let go of these: what frees memory of a GPU that is lost may end the process."""
        self._kept.append(things)

    def check_not_lost(self) -> None:
        """Raises DeviceLost."""
        if self.lost:
            raise DeviceLost(self.lost)

    @classmethod
    def load(cls, places: Iterable[Path] | None = None) -> CudaRuntime:
        """From PyPI's CUDA runtime in this environment, or the system's. Visible to kernels' libraries, which want it.

        Raises EngineError naming what to install.
        """
        tried = list(places) if places is not None else library_places()
        for place in tried:
            try:
                return cls(ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL))
            except OSError:
                continue
        raise EngineError(
            f"{LIBRARY} was not found: install nvidia-cuda-runtime 13 beside hone, or CUDA 13 on the system"
        )

    def clear_error(self) -> None:
        """Forget what failed last on the calling thread, also inside somebody else's code.

        The runtime keeps it until it is asked for, and a launch is checked by asking: it would be told of the next
        kernel, which is innocent. What broke the context stays.
        """
        self._library.cudaGetLastError()

    # --- devices

    @property
    def num_devices(self) -> int:
        found = ctypes.c_int()
        self._ask("cudaGetDeviceCount", ctypes.byref(found))
        return found.value

    @property
    def runtime_version(self) -> int:
        """Such as 13000."""
        found = ctypes.c_int()
        self._ask("cudaRuntimeGetVersion", ctypes.byref(found))
        return found.value

    def pci_bus_id(self, ordinal: int) -> str:
        text = ctypes.create_string_buffer(32)
        self._ask("cudaDeviceGetPCIBusId", text, ctypes.c_int(len(text)), ctypes.c_int(ordinal))
        return text.value.decode("ascii")

    def num_sms(self, ordinal: int) -> int:
        return self._attribute(_NUM_SMS, ordinal)

    def l2_bytes(self, ordinal: int) -> int:
        return self._attribute(_L2_BYTES, ordinal)

    def max_shared_memory_per_block(self, ordinal: int) -> int:
        return self._attribute(_SHARED_OPT_IN, ordinal)

    def compute_capability(self, ordinal: int) -> tuple[int, int]:
        return self._attribute(_MAJOR, ordinal), self._attribute(_MINOR, ordinal)

    def set_device(self, ordinal: int) -> None:
        """For the calling thread."""
        self._call("cudaSetDevice", ctypes.c_int(ordinal))

    def free_and_total_bytes(self) -> tuple[int, int]:
        """Of the calling thread's device; makes a context."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # --- memory

    def allocate_pinned(self, num_bytes: int) -> int:
        """Address of host memory that copies reach without the driver's detour."""
        address = ctypes.c_void_p()
        self._call("cudaHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(1))
        return address.value or 0

    def free_pinned(self, address: int) -> None:
        self._let_go("cudaFreeHost", address)

    def allocate_device(self, num_bytes: int) -> int:
        """Address of memory of the calling thread's device."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value or 0

    def free_device(self, address: int) -> None:
        self._let_go("cudaFree", address)

    def copy_to_device(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._copy(to, source, num_bytes, _TO_DEVICE, stream)

    def copy_to_host(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._copy(to, source, num_bytes, _TO_HOST, stream)

    def copy_on_device(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self._copy(to, source, num_bytes, _ON_DEVICE, stream)

    # --- streams and events

    def create_stream(self) -> int:
        """One that does not wait for the default stream."""
        stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._let_go("cudaStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def create_event(self) -> int:
        event = ctypes.c_void_p()
        self._call("cudaEventCreate", ctypes.byref(event))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self._let_go("cudaEventDestroy", event)

    def create_mark(self) -> int:
        """An event that only orders streams: cheaper than one that tells the time."""
        event = ctypes.c_void_p()
        self._call("cudaEventCreateWithFlags", ctypes.byref(event), ctypes.c_uint(_DISABLE_TIMING))
        return event.value or 0

    def wait_for(self, event: int, stream: int) -> None:
        """Have what is put on the stream from now on wait for what the event was last recorded behind."""
        self._call("cudaStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def has_happened(self, event: int) -> bool:
        """Raises CudaError for a failure of what was launched before it."""
        self._mind_captures()
        code = int(self._library.cudaEventQuery(ctypes.c_void_p(event)))
        if code == _NOT_READY:
            self.clear_error()
            return False
        self._check("cudaEventQuery", code)
        return True

    def elapsed_ns(self, first: int, last: int) -> float:
        """Between two events that have happened."""
        milliseconds = ctypes.c_float()
        self._call("cudaEventElapsedTime", ctypes.byref(milliseconds), ctypes.c_void_p(first), ctypes.c_void_p(last))
        return float(milliseconds.value) * 1e6

    # --- graphs

    def begin_capture(self, stream: int) -> None:
        self._call("cudaStreamBeginCapture", ctypes.c_void_p(stream), ctypes.c_int(_THREAD_LOCAL_CAPTURE))

    def end_capture(self, stream: int) -> int:
        """The captured launches, ready to be replayed."""
        graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cudaStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        try:
            self._call("cudaGraphInstantiate", ctypes.byref(ready), graph, ctypes.c_ulonglong(0))
        finally:
            self._call("cudaGraphDestroy", graph)
        return ready.value or 0

    def replay(self, graph: int, stream: int) -> None:
        self._call("cudaGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def destroy_graph(self, graph: int) -> None:
        self._let_go("cudaGraphExecDestroy", graph)

    # --- all calls

    def _attribute(self, number: int, ordinal: int) -> int:
        found = ctypes.c_int()
        self._ask("cudaDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(number), ctypes.c_int(ordinal))
        return found.value

    def _copy(self, to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(to),
            ctypes.c_void_p(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_int(kind),
            ctypes.c_void_p(stream),
        )

    def _ask(self, name: str, *arguments: Any) -> None:
        """What needs no context, and makes none."""
        self._check(name, int(getattr(self._library, name)(*arguments)))

    def _call(self, name: str, *arguments: Any) -> None:
        self._mind_captures()
        self._check(name, int(getattr(self._library, name)(*arguments)))

    def _mind_captures(self) -> None:
        """Once a thread: have it refused only what would harm a capture of its own.

        TVM captures graphs in a mode that forbids all other threads to allocate, free and more: such a call fails, and
        spoils the capture besides. What those threads do concerns other streams, so they say that they know.
        """
        if not getattr(self._threads, "minds_own_captures", False):
            mode = ctypes.c_int(_THREAD_LOCAL_CAPTURE)
            refused = bool(self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
            self._threads.minds_own_captures = not refused  # without a driver, say: as the call that follows will tell

    def _let_go(self, name: str, handle: int) -> None:
        if not self.lost:
            self._call(name, ctypes.c_void_p(handle))

    def _check(self, name: str, code: int) -> None:
        if code:
            text = self._library.cudaGetErrorString
            text.restype = ctypes.c_char_p
            told = (text(ctypes.c_int(code)) or b"unknown error").decode("utf-8", "replace")
            problem = CudaError(name, code, told)
            self.clear_error()
            if problem.is_poisoning and not self.lost:
                self.lost = f"{told} (error {code}): this process can use its GPUs no longer, a new one can"
            raise problem


def library_places() -> list[Path]:
    """PyPI's package first: the version that the kernels were built with. Then wherever the system's loader looks."""
    places = []
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        places.append(Path(folder) / "cu13" / "lib" / LIBRARY)
    return [*places, Path(LIBRARY)]
