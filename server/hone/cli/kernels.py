"""`hone kernels`: build GPU kernels ahead of any model, without a GPU, and see what they take of one."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hone.cli.cache import add_action
from hone.cli.settings import read_settings
from hone.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hone.compiler.cuda_target import CudaTarget
    from hone.compiler.templates.cutlass.prebuild import PlannedKernel
    from hone.kernels import Entry, KernelsCache

#: More compilers than this would take more memory than small machines have; each waits for what it needs.
_NUM_COMPILERS = 2
#: What a kernel takes of one core, until some were built here.
_USUAL_SECONDS, _USUAL_3X_SECONDS = 10.0, 45.0


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "kernels", help="build GPU kernels ahead of time, or list them", description=__doc__
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    build = add_action(
        actions, "build", _build, "build kernels for an architecture into the kernels cache; no GPU needed", run
    )
    build.add_argument("--arch", required=True, help="architecture: 75, 80, 86, 89, 90a or 100a")
    build.add_argument("--family", default="gemm,conv2d", metavar="NAMES", help="of gemm, conv2d, depthwise, attention")
    build.add_argument("--dtype", default="f16", metavar="NAMES", help="of f16, bf16, tf32, f32, int8")
    build.add_argument("--limit", type=_count, metavar="N", help="the N most useful kernels only")
    build.add_argument("--dry-run", action="store_true", help="print what would be built")

    listed = add_action(actions, "ls", _list, "list kernels for GPUs with the compiler's report of what they take", run)
    listed.add_argument("--arch", help="only of this architecture")


def run(arguments: argparse.Namespace) -> int:
    from hone.kernels import KernelsCache

    root = read_settings(arguments, os.environ).kernels_cache
    creates = arguments.action == "build" and not arguments.dry_run
    cache = KernelsCache(root, create=creates)
    if not creates and arguments.action == "ls" and not cache.exists:
        raise NotFound(f"no kernels cache in {root}: there is no {cache.path}; name another with --kernels-cache")
    return int(arguments.act(cache, arguments))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no count, expected a number of at least 1")
    return int(text)


def _build(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    from hone.compiler.build import BuildFailed
    from hone.compiler.cuda_target import CudaTarget
    from hone.compiler.templates.cutlass.prebuild import plan
    from hone.compiler.templates.cutlass.toolchain import find_toolchain

    cuda_home = os.environ.get("CUDA_HOME")
    home = Path(cuda_home) if cuda_home else None
    try:
        target = CudaTarget.typical(arguments.arch)
        toolchain = find_toolchain(home)
        toolchain.check_supports(target.arch)
        planned = plan(target, arguments.family.split(","), arguments.dtype.split(","), home)[: arguments.limit]
    except ValueError as problem:
        raise InvalidRequest(str(problem)) from problem
    except BuildFailed as problem:
        raise NotFound(str(problem)) from problem
    if not planned:
        print(f"nothing to build: no template of {arguments.family} takes {arguments.dtype} on sm_{target.arch}")
        return 0
    if arguments.dry_run:
        _print_plan(planned, target, arguments.json)
        return 0
    print(f"{len(planned)} kernels for sm_{target.arch} with nvcc {toolchain.version}, into {cache.path}")
    return _build_all(cache, planned, target)


def _build_all(cache: KernelsCache, planned: Sequence[PlannedKernel], target: CudaTarget) -> int:
    """Builds what the cache lacks, two at a time; what was built stays, whenever this ends."""
    from hone.compiler.build import BuildFailed
    from hone.compiler.templates.cutlass.published import BuildRefused, published_kernel, scope_of
    from hone.compiler.templates.cutlass.toolchain import ToolchainMissing
    from hone.kernels import Entry

    missing, known = [], list[tuple[str, float]]()
    for one in planned:
        digest = one.template.digest(one.workload, one.candidate, target)
        entry = cache.get("kernels", digest, scope_of(target))
        if isinstance(entry, Entry):
            known.append((one.template.name, float(entry.manifest.get("compile_seconds") or 0.0)))
        else:
            missing.append(one)
    num_present = len(known)
    if num_present:
        print(f"{num_present} are there already")
    estimate = _Estimate([one.template.name for one in missing], known)
    if missing:
        print(f"{len(missing)} are to be built: {estimate.left()}", flush=True)
    started, num_failed, num_done = time.monotonic(), 0, 0
    pool = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="nvcc")
    try:
        running: dict[Future[Any], PlannedKernel] = {}
        waiting = iter(missing)
        while True:
            # Two at a time are handed out, so that an interruption leaves at most two to wait for.
            for one in waiting:
                running[pool.submit(published_kernel, cache, one.template, one.workload, one.candidate, target)] = one
                if len(running) == _NUM_COMPILERS:
                    break
            if not running:
                break
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                one, problem = running.pop(future), future.exception()
                num_done += 1
                told = f"[{num_present + num_done}/{len(planned)}] {one}"
                estimate.done(one.template.name, time.monotonic() - started)
                if problem is None:
                    print(f"{told}  {estimate.left()}", flush=True)
                elif isinstance(problem, BuildFailed):
                    num_failed += 1
                    again = " (as before)" if isinstance(problem, BuildRefused) else ""
                    print(f"{told}  FAILED{again}: {problem}", file=sys.stderr, flush=True)
                    if isinstance(problem, ToolchainMissing) or isinstance(problem.__cause__, OSError):
                        return 1  # a full disk or a missing compiler fails all the others too
                else:
                    raise problem
    finally:
        pool.shutdown(cancel_futures=True)
    seconds = time.monotonic() - started
    print(f"built {num_done - num_failed} kernels in {seconds:.0f} s, {num_present} were there, {num_failed} failed")
    if num_failed:
        print(f"compilers' words on those that failed are in {cache.path / scope_of(target) / 'quarantine'}")
    return 1 if num_failed else 0


class _Estimate:
    """How long the rest takes: by what kernels of a template took before, and by how that has held since."""

    def __init__(self, waiting: Sequence[str], known: Sequence[tuple[str, float]]) -> None:
        """`waiting` are templates' names, one for each kernel; `known`, seconds of kernels that are there."""
        self._seconds: dict[str, float] = {}
        for name in set(waiting):
            took = [seconds for other, seconds in known if other == name and seconds > 0]
            usual = _USUAL_3X_SECONDS if name.endswith("3x") else _USUAL_SECONDS
            self._seconds[name] = sum(took) / len(took) if took else usual
        self._left = sum(self._seconds[name] for name in waiting)
        self._finished, self._pace = 0.0, 1.0 / _NUM_COMPILERS

    def done(self, name: str, elapsed: float) -> None:
        """One is done, `elapsed` seconds after the first began."""
        self._left -= self._seconds[name]
        self._finished += self._seconds[name]
        self._pace = elapsed / self._finished

    def left(self) -> str:
        seconds = self._left * self._pace
        if seconds < 1.0:
            return "done" if self._left < 1.0 else "a second left"
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def _print_plan(planned: Sequence[PlannedKernel], target: CudaTarget, as_json: bool) -> None:
    if as_json:
        fields = [{"workload": one.workload.fields(), "candidate": one.candidate.fields()} for one in planned]
        print(json.dumps({"arch": target.arch, "kernels": fields}, indent=2))
        return
    for one in planned:
        print(one)
    print(f"{len(planned)} kernels for sm_{target.arch}")


def _list(cache: KernelsCache, arguments: argparse.Namespace) -> int:
    from hone.cli.cache import format_size
    from hone.kernels import Entry

    rows: list[dict[str, Any]] = []
    for listed in cache.entries():
        scope = listed.name.scope
        if listed.name.kind != "kernels" or not scope.startswith("sm_"):
            continue
        if arguments.arch is not None and scope != f"sm_{arguments.arch}":
            continue
        found = cache.peek(listed.name)
        if isinstance(found, Entry):
            rows.append(_described(found))
    rows.sort(key=lambda row: (row["arch"], row["template"], row["candidate"]))
    if arguments.json:
        print(json.dumps({"path": str(cache.path), "kernels": rows}, indent=2))
        return 0
    if rows:
        print(f"{'ARCH':<8} {'DIGEST':<16} {'REGISTERS':>9} {'SHARED':>10} {'SPILLS':>8} {'SIZE':>10}  KERNEL")
    for row in rows:
        shared = format_size(row["shared_bytes"]) if row["shared_bytes"] is not None else "-"
        tail = f" +{row['epilogue']}" if row["epilogue"] else ""
        print(
            f"{row['arch']:<8} {row['digest'][:16]} {row['registers']:>9} {shared:>10}"
            f" {format_size(row['spill_bytes']):>8} {format_size(row['size_bytes']):>10}"
            f"  {row['candidate']} {row['dtype']}{tail}"
        )
    print(f"{len(rows)} {'kernel' if len(rows) == 1 else 'kernels'} in {cache.path}")
    return 0


def _described(entry: Entry) -> dict[str, Any]:
    """What a kernel takes of the GPU: its entry function with the most registers stands for it."""
    told = entry.manifest
    resources = told.get("resources", [])
    candidate, workload = told["candidate"], told["workload"]
    parameters = ", ".join(f"{name}={value}" for name, value in candidate["parameters"].items())
    return {
        "arch": entry.scope,
        "digest": entry.digest,
        "template": candidate["template"],
        "candidate": f"{candidate['template']}({parameters})",
        "dtype": workload["inputs"][0][1],
        "epilogue": "+".join(step[0] for step in workload["epilogue"]),
        "registers": max((one["registers"] for one in resources), default=0),
        "shared_bytes": told.get("shared_bytes"),
        "spill_bytes": max((one["spill_store_bytes"] + one["spill_load_bytes"] for one in resources), default=0),
        "size_bytes": entry.size_bytes,
        "compile_seconds": told.get("compile_seconds"),
    }
