"""The pool of pinned memory over memory that is not pinned."""

from __future__ import annotations

import ctypes
import gc
import threading

from hone.engines.pinned import PinnedPool


class Memory:
    """`asks` is called by whoever allocates or frees, while the driver would work."""

    def __init__(self):
        self.blocks = {}
        self.asks = lambda: None

    def allocate_pinned(self, num_bytes):
        self.asks()
        block = ctypes.create_string_buffer(num_bytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free_pinned(self, address):
        self.asks()
        del self.blocks[address]


def test_blocks_are_used_again_up_to_what_may_lie_idle():
    memory = Memory()
    pool = PinnedPool(memory, keep_bytes=8192)
    first, second = pool.take(100), pool.take(5000)
    assert (first.nbytes, second.nbytes) == (100, 5000)
    assert pool.usage == (4096 + 8192, 4096 + 8192)
    del second
    gc.collect()
    assert pool.usage == (4096 + 8192, 4096)
    del first
    gc.collect()
    assert pool.usage == (8192, 0), "no more than that lies idle"
    again = pool.take(8000)
    assert (len(memory.blocks), pool.usage) == (1, (8192, 8192))
    pool.close()
    assert pool.usage == (8192, 8192)
    del again
    gc.collect()
    assert (memory.blocks, pool.usage) == ({}, (0, 0))


def test_closing_frees_what_is_idle():
    memory = Memory()
    pool = PinnedPool(memory)
    arrays = [pool.take(1), pool.take(9000)]
    arrays.clear()
    gc.collect()
    assert pool.usage == (4096 + 16384, 0)
    pool.close()
    assert (memory.blocks, pool.usage) == ({}, (0, 0))


def test_nobody_waits_while_another_pins_or_frees():
    memory = Memory()
    pool = PinnedPool(memory, keep_bytes=0)
    seen = []

    def another():
        thread = threading.Thread(target=lambda: seen.append(pool.usage))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    memory.asks = another
    array = pool.take(1)
    del array
    gc.collect()
    assert seen == [(0, 0), (0, 0)]
