"""The pool of threads for parallel loops, kept in the cache beside the kernels. In the child only."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hone.compiler.build import LinkFailed
from hone.compiler.parallel import ParallelPool
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.kernels import Entry, Failure, KernelsCache


def parallel_pool(cache: KernelsCache, architecture: str) -> tuple[str, Path]:
    """Digest and library; built and kept where the cache does not hold it. Raises BuildFailed and LinkFailed."""
    pool = ParallelPool.here()
    found = cache.get("kernels", pool.digest, architecture)
    if isinstance(found, Entry) and KERNEL_FILE in found.files:
        return pool.digest, found.files[KERNEL_FILE]
    with tempfile.TemporaryDirectory(prefix="hone-parallel-") as folder:
        path = Path(folder) / KERNEL_FILE
        pool.build(path)
        kept = cache.publish("kernels", pool.digest, architecture, {KERNEL_FILE: path}, pool.fields)
    if isinstance(kept, Failure):
        raise LinkFailed(f"the pool for parallel loops could not be kept: {kept.reason.value} ({kept.detail})")
    return pool.digest, kept.files[KERNEL_FILE]
