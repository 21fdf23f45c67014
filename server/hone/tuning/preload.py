"""Compilers that the tuning child starts give way as its own threads do (see `yielding`). In the child only."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from pathlib import Path

from hone.compiler.build import BuildFailed
from hone.compiler.templates.cpp.compiler import host_compiler

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).parent / "preloaded.cpp"
_VARIABLE = "LD_PRELOAD"
_TRIAL_SECONDS = 10.0


def programs_give_way() -> bool:
    """Programs that this process starts from now on yield while they run. False where that cannot be had, which only
    serving's latency suffers from. The library for it lies in the child's own temporary folder, and goes with it."""
    try:
        library = _build(Path(tempfile.mkdtemp(prefix="preload-")) / "giveway.so")
    except (OSError, BuildFailed) as problem:
        _log.info("compilers do not yield to serving: %s", problem)
        return False
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(library) if not before else f"{library}:{before}"
    return True


def _build(library: Path) -> Path:
    """Raises OSError and BuildFailed, also where programs do not run as before with the library in them."""
    if set(str(library)) & set(" :"):
        raise OSError(f"the loader takes no path with a space or a colon: {library}")
    compiler = host_compiler(())
    compiler.compile(_SOURCE.read_text(encoding="utf-8"), library)
    command = [compiler.command, "--version"]
    plain, loaded = (
        subprocess.run(command, capture_output=True, check=False, timeout=_TRIAL_SECONDS, env={**os.environ, **more})
        for more in ({}, {_VARIABLE: str(library)})
    )
    if (loaded.returncode, loaded.stdout, loaded.stderr) != (plain.returncode, plain.stdout, plain.stderr):
        raise OSError(f"{Path(compiler.command).name} does not run with it: {loaded.stderr!r}")
    return library
