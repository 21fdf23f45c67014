"""Host memory that a GPU copies to and from at full speed, used again and again: pinning takes a millisecond."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Protocol

from hone.engines.base import view_memory
from hone.types import Array

#: Sizes are rounded up to powers of two from here, so that blocks fit again.
_SMALLEST_BYTES = 4096


class PinnedMemory(Protocol):
    """See `cuda_runtime.CudaRuntime`."""

    def allocate_pinned(self, num_bytes: int) -> int: ...
    def free_pinned(self, address: int) -> None: ...


class _Block:
    """Owner of one block while arrays look at it."""

    __slots__ = ("__weakref__", "address", "num_bytes")

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes


class PinnedPool:
    """Blocks of pinned memory. A block comes back when the last array over it is gone. Thread-safe.

    `keep_bytes` bounds what lies idle: beyond it, blocks that come back are freed.
    """

    def __init__(self, cuda: PinnedMemory, keep_bytes: int = 256 << 20) -> None:
        self._cuda = cuda
        self._keep_bytes = keep_bytes
        # Reentrant: a block may come back while this very thread, inside, lets go of garbage.
        self._lock = threading.RLock()
        self._idle: dict[int, list[int]] = defaultdict(list)
        self._idle_bytes = 0
        self.num_bytes = 0
        """All that is pinned, idle or not."""
        self._closed = False

    @property
    def usage(self) -> tuple[int, int]:
        """Bytes that are pinned, and those of them that arrays lie in."""
        with self._lock:
            return self.num_bytes, self.num_bytes - self._idle_bytes

    def take(self, num_bytes: int) -> Array:
        """An uninitialised uint8 array. Raises what the CUDA runtime raises where no more can be pinned."""
        size = max(_SMALLEST_BYTES, 1 << (max(1, num_bytes) - 1).bit_length())
        with self._lock:
            address = self._idle[size].pop() if self._idle[size] else None
            if address is not None:
                self._idle_bytes -= size
        if address is None:  # pinning, and its end, wait for the GPU's driver: not under the lock
            address = self._cuda.allocate_pinned(size)
            with self._lock:
                self.num_bytes += size
        block = _Block(address, size)
        weakref.finalize(block, self._give_back, address, size).atexit = False
        return view_memory(address, max(1, num_bytes), block)[:num_bytes]

    def close(self) -> None:
        """Free what is idle now, and the rest as it comes back."""
        with self._lock:
            self._closed = True
            gone = [address for addresses in self._idle.values() for address in addresses]
            self._idle.clear()
            self.num_bytes -= self._idle_bytes
            self._idle_bytes = 0
        for address in gone:
            self._cuda.free_pinned(address)

    def _give_back(self, address: int, size: int) -> None:
        with self._lock:
            stays = not self._closed and self._idle_bytes + size <= self._keep_bytes
            if stays:
                self._idle[size].append(address)
                self._idle_bytes += size
            else:
                self.num_bytes -= size
        if not stays:
            self._cuda.free_pinned(address)
