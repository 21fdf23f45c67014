"""When the server is gone, however it went, so is the tuning child with everything it started."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from hone.tuning import group
from tests.process.tuning_children import COMMAND, wait_gone
from tests.running import wait_until

SERVER = """
import json, sys
from hone.tuning.child import Child
from hone.tuning.child_process import Limits
def tell(event):
    print(json.dumps(event), flush=True)
child = Child(json.loads(sys.argv[1]), Limits(600.0, 4 << 30, 600.0), on_event=tell, command=json.loads(sys.argv[2]))
child.run()
"""


@pytest.mark.parametrize("job", ["hang", "hang holding the interpreter", "ignore signals"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_of_the_group_is_left(job, number):
    import json

    spec = json.dumps({"job": job, "compiler": True})
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, spec, json.dumps(COMMAND)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        compiler = json.loads(server.stdout.readline())["pid"]
        assert json.loads(server.stdout.readline())["stage"] == "working"
        leader = wait_until(lambda: next(iter(group_of(compiler)), None), "the group is known")
        pids = group.members(leader)
        assert {leader, compiler} <= set(pids)
    finally:
        server.send_signal(number)
        server.wait(30)
        server.stdout.close()
    wait_gone(pids)


def group_of(pid: int) -> list[int]:
    import os

    return [os.getpgid(pid)]
