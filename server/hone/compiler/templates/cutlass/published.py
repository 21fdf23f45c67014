"""Kernels in the cache: built once an architecture, for every model and every device of it."""

from __future__ import annotations

import logging
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm_ffi

from hone.compiler.build import BuildFailed, LinkFailed
from hone.compiler.cuda_target import CudaTarget
from hone.compiler.templates.base import KERNEL_PREFIX, Candidate
from hone.compiler.templates.cutlass.kernel import CutlassTemplate, kernel_key
from hone.compiler.templates.cutlass.toolchain import NvccFailed, find_toolchain
from hone.compiler.workload import Workload
from hone.engines.tvm_artifact import KERNEL_FILE
from hone.kernels import Built, Entry, Failure, KernelsCache
from hone.kernels.digest import digest_of
from hone.kernels.files import reason_of, replace_file

logger = logging.getLogger(__name__)

#: Of a compiler's log, what is kept: the first errors are in it.
_MAX_LOG_CHARACTERS = 256_000


class BuildRefused(BuildFailed):
    """This kernel did not compile before: its record says why, and forgetting it tries again."""


class PublishedKernel:
    """A kernel in the cache: callable in this process, and ready to be exported."""

    def __init__(self, digest: str, path: Path) -> None:
        self.name, self.digest, self.path = KERNEL_PREFIX + digest, digest, path

    def __call__(self, *tensors: Any) -> None:
        self._function(*tensors)

    def export(self, path: Path) -> None:
        try:
            shutil.copyfile(self.path, path)
        except OSError as problem:
            raise LinkFailed(f"kernel {self.digest} could not be written to {path}: {problem.strerror}") from problem

    @cached_property
    def _function(self) -> Any:
        find_toolchain().load_runtime()
        self._module = tvm_ffi.load_module(str(self.path), keep_module_alive=False)
        return self._module[self.name]


def scope_of(target: CudaTarget) -> str:
    """Where the cache keeps kernels of the target."""
    return "twin" if target.twin else f"sm_{target.arch}"


def log_of(cache: KernelsCache, digest: str, target: CudaTarget) -> Path:
    """Where the compiler's log of a source that it refused is kept: beside the record of the quarantine."""
    return cache.path / scope_of(target) / "quarantine" / f"{digest}.log"


def published_kernel(
    cache: KernelsCache, template: CutlassTemplate, workload: Workload, candidate: Candidate, target: CudaTarget
) -> PublishedKernel:
    """The candidate's kernel out of the cache, built into it first where it is not there.

    A source that the compiler refuses is put into quarantine with the compiler's log, and is not tried again. Raises
    BuildFailed, CacheBusy.
    """
    digest, scope = template.digest(workload, candidate, target), scope_of(target)
    found = cache.get("kernels", digest, scope)
    if isinstance(found, Entry):
        return PublishedKernel(digest, found.files[KERNEL_FILE])
    if reason := cache.quarantined(digest, scope):
        raise BuildRefused(str(candidate), NvccFailed("refused it before", reason, is_refusal=True))
    entry = cache.get_or_build("kernels", digest, scope, lambda: _build(cache, template, workload, candidate, target))
    if isinstance(entry, Failure):
        problem = OSError(f"it was built and could not be kept in {cache.path}: {entry.reason.value} ({entry.detail})")
        raise BuildFailed(str(candidate), problem) from problem
    return PublishedKernel(digest, entry.files[KERNEL_FILE])


def _keep_log(path: Path, log: str) -> None:
    try:
        replace_file(path, log[:_MAX_LOG_CHARACTERS].encode())
    except OSError as problem:
        # The record says already what the first error was.
        logger.warning("the compiler's log could not be kept: %s: %s", path, reason_of(problem))


def _build(
    cache: KernelsCache, template: CutlassTemplate, workload: Workload, candidate: Candidate, target: CudaTarget
) -> Built:
    recipe, toolchain = template.recipe(workload, candidate, target), template.toolchain()
    key = kernel_key(recipe, target, toolchain)
    digest = digest_of(key)
    try:
        kernel = template.build(workload, candidate, target)
    except BuildFailed as failed:
        if isinstance(failed.__cause__, NvccFailed) and failed.__cause__.is_refusal:
            cache.quarantine(digest, scope_of(target), str(failed), cause="build")
            _keep_log(log_of(cache, digest, target), failed.__cause__.log)
        raise
    return Built(
        {KERNEL_FILE: kernel.path.read_bytes()},
        {
            "key": key,
            "recipe": {"source": recipe.source, "values": dict(recipe.values)},
            "workload": workload.fields(),
            "candidate": candidate.fields(),
            "target": target.fields(),
            "shared_bytes": kernel.shared_bytes,
            "resources": [one.fields() for one in kernel.resources],
            "compile_seconds": round(kernel.report.seconds, 2),
        },
    )
