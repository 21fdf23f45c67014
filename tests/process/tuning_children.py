"""What the tests of tuning children share: a child with a job of `tuning_worker`, and who is left of its group."""

from __future__ import annotations

import sys
from pathlib import Path

from hone.tuning import group
from hone.tuning.child import Child
from hone.tuning.child_process import JobResult, Limits
from tests.running import wait_until

COMMAND = (sys.executable, str(Path(__file__).with_name("tuning_worker.py")))
GENEROUS = Limits(seconds=120.0, memory_bytes=4 << 30, silence_seconds=120.0)


class Ran:
    """A child and all that came of it."""

    def __init__(self, job: str, limits: Limits = GENEROUS, **fields) -> None:
        self.events: list[dict] = []
        pacer = fields.pop("pacer", None)
        starvation = fields.pop("starvation", None)
        on_tick = fields.pop("on_tick", lambda: None)
        descriptors = fields.pop("descriptors", ())
        self.child = Child(
            {"job": job, "build_threads": 1, "run_threads": 2, **fields},
            limits,
            on_event=self.events.append,
            on_tick=on_tick,
            pacer=pacer,
            starvation=starvation,
            descriptors=descriptors,
            command=COMMAND,
        )

    def run(self) -> JobResult:
        return self.child.run()

    def named(self, event: str) -> list[dict]:
        return [message for message in self.events if message["event"] == event]

    def assert_gone(self) -> None:
        """The group is empty when `run` returns: nothing to wait for."""
        assert self.child.pid is not None
        assert group.members(self.child.pid) == []
        for event in self.named("compiler"):
            assert not Path(f"/proc/{event['pid']}").exists() or is_zombie(event["pid"])


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: all(is_zombie(pid) for pid in pids), f"processes {pids} are gone")
