"""What tests of CUTLASS templates share: a cache of kernels that outlives the run; each takes seconds to build."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.kernels import KernelsCache

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def kernel_cache():
    """Kernels by digest: a change of sources or compilers names others, so what is here is never stale."""
    folder = ROOT / ".cutlass-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    cache = KernelsCache(folder, size_limit_bytes=1 << 30)
    yield cache
    cache.close()


@pytest.fixture(scope="session")
def twin_cache(kernel_cache):
    return kernel_cache
