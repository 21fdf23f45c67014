"""The tuning child: `python -m hone.tuning.worker LIFE EVENTS`, two inherited descriptors; the job is a line on stdin.

It leads its own process group, runs at low priority, and ends with that group when the server does, however the server
ends: LIFE is a pipe that the server holds open. The kernel itself kills the group when the pipe closes, which needs no
thread and no interpreter lock in here; a thread watches the pipe too, for kernels that do not. Whatever libraries and
compilers print goes to stderr; events are lines on EVENTS.

Only the standard library is imported before the job is known: thread counts are read by libraries when they load.
"""

from __future__ import annotations

import faulthandler
import fcntl
import logging
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hone.tuning.activity import ActivityView
from hone.tuning.room import Forwarding
from hone.tuning.wire import MAX_SPEC_BYTES, Garbage, Message, decode, encode
from hone.tuning.yielding import give_way

Emit = Callable[..., None]
"""`emit(event, **fields)` sends one event."""
Job = Callable[[Message, Emit], None]

#: fcntl.F_SETSIG, which the standard library does not name.
_F_SETSIG = 10
#: Names by which libraries and compilers take their number of threads.
_BUILD_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_RUN_THREADS = ("TVM_NUM_THREADS",)


def main(job: Job | None = None, arguments: list[str] | None = None) -> NoReturn:
    """Run the job that stdin tells, then end the process without unwinding (native libraries may crash at exit)."""
    life, events = (int(text) for text in (sys.argv[1:] if arguments is None else arguments))
    die_with(life)
    faulthandler.enable(sys.stderr)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    code = 0
    emit = _emitter(events)
    try:
        spec = _read_spec()
        settle_down(spec)
        if spec.get("activity") is not None:
            give_way(ActivityView(int(spec["activity"])).read)
        logging.getLogger("hone").addHandler(Forwarding(emit))
        (job or _tune)(spec, emit)
        emit("done")
    except BaseException as problem:  # every end of this process is told, then it ends
        logging.getLogger(__name__).exception("the job failed")
        with suppress(OSError, Garbage):
            emit("failed", reason=f"{type(problem).__name__}: {problem}"[:2000])
        code = 1
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def die_with(life: int) -> None:
    """Kill this process's group as soon as the other end of the pipe `life` is closed."""
    if os.getpgrp() != os.getpid():
        raise RuntimeError("a tuning process must lead its own process group")
    with suppress(OSError):
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_kill_group_at_end, args=(life,), name="life", daemon=True).start()


def settle_down(spec: Message) -> None:
    """Low priority, first to go when memory runs out, no core dumps, and the threads that the job allows."""
    os.nice(int(spec.get("nice", 19)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for names, field in ((_BUILD_THREADS, "build_threads"), (_RUN_THREADS, "run_threads")):
        if field in spec:
            os.environ.update(dict.fromkeys(names, str(int(spec[field]))))


def _tune(spec: Message, emit: Emit) -> None:
    from hone.tuning.specialize import run

    run(spec, emit)


def _kill_group_at_end(life: int) -> None:
    poll = select.poll()
    poll.register(life, select.POLLIN | select.POLLHUP)
    poll.poll()  # nobody ever writes
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _read_spec() -> Message:
    line = sys.stdin.buffer.readline(MAX_SPEC_BYTES + 1)
    if not line.endswith(b"\n"):
        raise Garbage(
            f"expected a line of at most {MAX_SPEC_BYTES} bytes on stdin, found {len(line)} bytes without end"
        )
    return decode(line)


def _emitter(descriptor: int) -> Emit:
    lock = threading.Lock()

    def emit(event: str, **fields: Any) -> None:
        data = memoryview(encode({"event": event, **fields}))
        with lock:
            while data:
                data = data[os.write(descriptor, data) :]

    return emit


if __name__ == "__main__":
    main()
