"""A tuning child that does what the job says instead of tuning: `python tuning_worker.py LIFE EVENTS`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hone.tuning import worker
from hone.tuning.running_time import RunningTimeView


def started_compiler() -> int:
    """A process of the child's, as a compiler would be. Its number."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def run(spec, emit):
    if spec.get("compiler"):
        emit("compiler", pid=started_compiler())
    emit("stage", stage=spec.get("stage", "working"), paced=spec.get("paced", False))
    match spec["job"]:
        case "echo":
            emit("echo", value=spec["value"], threads=os.environ.get("TVM_NUM_THREADS"), nice=os.nice(0))
        case "segfault":
            emit("kept", value=1)
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError("told to fail")
        case "burn":
            while True:
                pass
        case "hang":
            time.sleep(600)
        case "hang holding the interpreter":
            ctypes.PyDLL(None).pause()
        case "ignore signals":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        case "memory":
            emit("compiler", pid=subprocess.Popen([sys.executable, "-c", EATER, str(spec["num_bytes"])]).pid)
            time.sleep(600)
        case "garbage":
            os.write(int(sys.argv[2]), spec["bytes"].encode())
            time.sleep(600)
        case "endless line":
            while True:
                os.write(int(sys.argv[2]), b"x" * 65536)
        case "endless events":
            while True:
                emit("more", text="x" * 60000)
        case "print":
            print("libraries print what they like")
            os.write(2, b"on both streams\n")
        case "done, then hang":
            emit("done")
            time.sleep(600)
        case "running time":
            view = RunningTimeView(spec["running_time"])
            while not view.read():
                time.sleep(0.01)
            emit("ran", seconds=view.read())
        case "count":
            path = Path(spec["path"])
            for number in range(10**9):
                path.write_text(str(number), encoding="ascii")
                time.sleep(0.001)
        case "compute and sleep":
            for _ in range(int(spec["num"])):
                end = time.monotonic() + 0.2
                while time.monotonic() < end:
                    pass
                began = time.monotonic()
                ctypes.CDLL(None).usleep(900_000)  # a signal with a handler ends it early
                emit("slept", whole=time.monotonic() - began > 0.8)
        case other:
            raise AssertionError(other)


EATER = "import sys, time; data = b'x' * int(sys.argv[1]); time.sleep(600)"

if __name__ == "__main__":
    worker.main(run)
