"""A machine with GPUs that are not there: NVML and the CUDA runtime by their own functions, memory in the host's.

`FakeCudart` stands for the library that `CudaRuntime` loads: it takes the same ctypes arguments, so that everything
above it is hone's own code. Streams run at once; events carry the time of a clock that tests set.
"""

from __future__ import annotations

import ctypes
import threading
import types

import numpy as np

SUCCESS, OUT_OF_MEMORY, NOT_READY, LAUNCH_FAILURE, INVALID, CAPTURE_UNSUPPORTED = 0, 2, 600, 719, 1, 900
H100 = {"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "num_sms": 132, "l2_bytes": 50 << 20}


class FakeCudart:
    """`cards` are dicts like H100. `now_ns` is the device's clock, moved by whoever runs something."""

    def __init__(self, cards=(H100,), *, free_bytes=1 << 34):
        self.cards = list(cards)
        self.free_bytes = free_bytes
        self.now_ns = 0.0
        self.slowdown = 1.0
        """What launches take of their usual time, as when the clock goes down."""
        self.failure = SUCCESS
        self.hangs = False
        self.capture_spoiled = False
        self.pinned, self.streams, self.events, self.graphs = {}, set(), {}, {}
        self.allocated = {}
        """Device memory by address; what is let go of is overwritten first."""
        self.copies = []
        self.last_errors = {}
        """What failed last, by thread, until somebody asks."""
        self.capture_modes = {}
        """By thread; 0 is the runtime's own default."""
        self.capturing_globally = None
        """The thread whose capture all threads of the default mode must respect."""
        self.handles = iter(range(1, 1 << 30))
        self.device = 0
        self.cudaGetErrorString = _ErrorString()

    # --- threads

    def cudaThreadExchangeStreamCaptureMode(self, mode):
        thread = threading.get_ident()
        before = self.capture_modes.get(thread, 0)
        self.capture_modes[thread] = mode._obj.value
        return _set(mode, before)

    def cudaGetLastError(self):
        return self.last_errors.pop(threading.get_ident(), SUCCESS)

    def fail(self, code):
        """As the runtime does: it returns the code, and keeps it for who asks."""
        if code:
            self.last_errors[threading.get_ident()] = code
        return code

    def refused_by_capture(self):
        """Whether another thread's capture forbids what the calling one is about to do; the capture is spoiled then."""
        thread = threading.get_ident()
        if self.capturing_globally in (None, thread) or self.capture_modes.get(thread, 0):
            return SUCCESS
        self.capture_spoiled = True
        return self.fail(CAPTURE_UNSUPPORTED)

    # --- devices

    def cudaGetDeviceCount(self, found):
        return _set(found, len(self.cards))

    def cudaRuntimeGetVersion(self, found):
        return _set(found, 13000)

    def cudaDeviceGetPCIBusId(self, text, size, ordinal):
        text.value = f"0000:{0x40 + ordinal.value:02X}:00.0".encode()
        return SUCCESS

    def cudaDeviceGetAttribute(self, found, number, ordinal):
        card = self.cards[ordinal.value]
        told = {
            16: card["num_sms"],
            38: card["l2_bytes"],
            75: card["capability"][0],
            76: card["capability"][1],
            97: 227 << 10,
        }
        return _set(found, told[number.value])

    def cudaSetDevice(self, ordinal):
        self.device = ordinal.value
        return SUCCESS if ordinal.value < len(self.cards) else 101

    def cudaMemGetInfo(self, free, total):
        _set(free, self.free_bytes)
        return _set(total, 1 << 34) or self.failure

    # --- memory

    def cudaHostAlloc(self, address, size, flags):
        if refused := self.refused_by_capture():
            return refused
        block = np.zeros(size.value + 64, np.uint8)
        start = block.ctypes.data + -block.ctypes.data % 64
        self.pinned[start] = block
        return _set(address, start)

    def cudaFreeHost(self, address):
        if refused := self.refused_by_capture():
            return refused
        del self.pinned[address.value]
        return SUCCESS

    def cudaMalloc(self, address, size):
        block = np.zeros(max(1, size.value), np.uint8)
        self.allocated[block.ctypes.data] = block
        return _set(address, block.ctypes.data)

    def cudaFree(self, address):
        self.allocated.pop(address.value)[:] = 0xEE
        return SUCCESS

    def cudaMemcpyAsync(self, to, source, size, kind, stream):
        self.copies.append((kind.value, size.value))
        assert stream.value in self.streams
        host = source.value if kind.value == 1 else to.value
        assert kind.value == 3 or any(start <= host < start + block.nbytes for start, block in self.pinned.items()), (
            "not pinned"
        )
        ctypes.memmove(to.value, source.value, size.value)
        return self.failure

    # --- streams, events, graphs

    def cudaStreamCreateWithFlags(self, stream, flags):
        handle = next(self.handles)
        self.streams.add(handle)
        return _set(stream, handle)

    def cudaStreamDestroy(self, stream):
        self.streams.remove(stream.value)
        return SUCCESS

    def cudaStreamSynchronize(self, stream):
        return self.fail(self.failure)

    def cudaEventCreate(self, event):
        handle = next(self.handles)
        self.events[handle] = None
        return _set(event, handle)

    def cudaEventCreateWithFlags(self, event, flags):
        assert flags.value == 2, "expected one without a time"
        return self.cudaEventCreate(event)

    def cudaStreamWaitEvent(self, stream, event, flags):
        assert stream.value in self.streams
        assert event.value in self.events
        return self.failure

    def cudaEventDestroy(self, event):
        del self.events[event.value]
        return SUCCESS

    def cudaEventRecord(self, event, stream):
        self.events[event.value] = self.now_ns
        return SUCCESS

    def cudaEventQuery(self, event):
        return self.fail(NOT_READY if self.hangs else self.failure)

    def cudaStreamBeginCapture(self, stream, mode):
        self.captured_at = self.now_ns
        return self.failure

    def cudaStreamEndCapture(self, stream, graph):
        """Launches run at once all the same; what they took is what a replay takes."""
        handle = next(self.handles)
        self.graphs[handle] = (self.now_ns - self.captured_at) / self.slowdown
        self.now_ns = self.captured_at
        return _set(graph, handle)

    def cudaGraphInstantiate(self, ready, graph, flags):
        return _set(ready, graph.value)

    def cudaGraphDestroy(self, graph):
        return SUCCESS

    def cudaGraphLaunch(self, graph, stream):
        self.now_ns += self.graphs[graph.value] * self.slowdown
        return self.failure

    def cudaGraphExecDestroy(self, graph):
        if self.failure:
            return self.failure
        del self.graphs[graph.value]
        return SUCCESS

    def cudaEventElapsedTime(self, found, first, last):
        return _set(found, (self.events[last.value] - self.events[first.value]) / 1e6)


class LazyCudart(FakeCudart):
    """Streams run nothing before somebody waits for them, or for another that waits for them: what is not ordered
    happens as late as can be."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.waiting = {}
        """By stream: what is still to be done."""
        self.recorded = {}
        """By event: the stream, and how much of what waits there is before it."""

    def later(self, stream, work):
        self.waiting.setdefault(stream, []).append(work)

    def finish(self, stream):
        """All that was put on a stream so far."""
        while self.waiting.get(stream):
            self.waiting[stream].pop(0)()

    def cudaMemcpyAsync(self, to, source, size, kind, stream):
        done = super().cudaMemcpyAsync
        arguments = [
            ctypes.c_void_p(to.value),
            ctypes.c_void_p(source.value),
            ctypes.c_size_t(size.value),
            kind,
            stream,
        ]
        self.later(stream.value, lambda: done(*arguments))
        return self.failure

    def cudaEventRecord(self, event, stream):
        reached = []
        self.recorded[event.value] = (stream.value, reached)
        self.later(stream.value, lambda: reached.append(True))
        return self.failure

    def cudaStreamWaitEvent(self, stream, event, flags):
        other, reached = self.recorded[event.value]

        def wait():
            while not reached:
                self.waiting[other].pop(0)()

        self.later(stream.value, wait)
        return super().cudaStreamWaitEvent(stream, event, flags)

    def cudaStreamSynchronize(self, stream):
        self.finish(stream.value)
        return self.failure


def _set(reference, value):
    """Write through ctypes.byref."""
    reference._obj.value = value
    return SUCCESS


class _ErrorString:
    restype = None

    def __call__(self, code):
        return {LAUNCH_FAILURE: b"unspecified launch failure", OUT_OF_MEMORY: b"out of memory"}.get(
            code.value, b"failed"
        )


class FakeNvml:
    """As much of `pynvml` as device keys need; `readings` replace or take away (None) what a card tells. `Slices` are
    the readings of MIG devices by their number, or None where a card does not tell of them."""

    NVML_CLOCK_MEM = 2

    class NVMLError(Exception):
        pass

    def __init__(self, **readings):
        told = {
            "Name": "NVIDIA H100 80GB HBM3",
            "UUID": "GPU-11111111",
            "MemoryInfo": types.SimpleNamespace(total=80 << 30, free=70 << 30, used=10 << 30),
            "MaxClockInfo": 2619,
            "MemoryBusWidth": 5120,
            "EnforcedPowerLimit": 700_000,
            "MigMode": [0, 0],
        }
        self.readings = {**told, **readings}
        self.driver = readings.get("Driver", "580.65.06")

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        assert bus.startswith("0000:"), bus
        return bus

    def nvmlDeviceGetMaxMigDeviceCount(self, card):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card, index):
        if index not in (self.readings.get("Slices") or {}):
            raise self.NVMLError("Not Found")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        slices = self.readings.get("Slices") or {}
        found = [index for index, told in slices.items() if told["UUID"] == uuid]
        if not found:
            raise self.NVMLError("Not Found")
        return found[0]

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12040

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def __getattr__(self, name):
        reading = name.removeprefix("nvmlDeviceGet")
        if reading not in self.readings:
            raise AttributeError(name)

        def read(device, *arguments):
            value = self.readings[reading]
            if isinstance(device, int):  # a slice tells of itself only
                value = self.readings["Slices"][device].get(reading)
            if value is None:
                raise self.NVMLError("Not Supported")
            return value

        return read
