"""What one child was asked for and what it has told so far."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hone.tuning.inputs import InputSet
from hone.tuning.jobs import Task
from hone.tuning.samples import pack
from hone.tuning.wire import Garbage, Message

_OUTCOMES = ("passed", "refused", "unsupported", "failed")


class Making:
    """Takes a child's events apart. `heard` gets all but outcomes, `specialized` each task with its outcome once."""

    def __init__(
        self,
        tasks: Sequence[Task],
        heard: Callable[[Message], None],
        specialized: Callable[[Task, Mapping[str, Any]], None],
    ) -> None:
        self._tasks = list(tasks)
        self._heard = heard
        self._specialized = specialized
        self._told: set[int] = set()
        self._at = 0
        self._begun = False
        self._samples: int | None = None

    def samples_descriptor(self, sets: Sequence[InputSet]) -> int | None:
        """Real inputs for the child, in memory; None where there are none."""
        self._samples = pack(sets) if sets else None
        return self._samples

    def on_event(self, event: Message) -> None:
        """Raises Garbage for what no honest child says."""
        if event["event"] == "specialized":
            index = event.get("index")
            if type(index) is not int or not 0 <= index < len(self._tasks) or index in self._told:
                raise Garbage(f"expected the outcome of one of {len(self._tasks)} tasks, once, found index {index!r}")
            if event.get("outcome") not in _OUTCOMES:
                raise Garbage(f"expected an outcome of {', '.join(_OUTCOMES)}, found {event.get('outcome')!r}")
            self._specialized(self._tasks[index], event)
            self._told.add(index)  # only now: what goes wrong in there leaves it untold
            return
        index = event.get("index")
        if type(index) is int and 0 <= index < len(self._tasks):
            self._at, self._begun = index, True
        self._heard(event)

    def left(self) -> tuple[list[Task], list[Task]]:
        """Tasks without an outcome: those to blame for the child's end, and those that another child may do.

        A child that ended before it began its first task would end so again: then all are to blame.
        """
        untold = [i for i in range(len(self._tasks)) if i not in self._told]
        if not self._begun and not self._told:
            return [self._tasks[i] for i in untold], []
        blamed = [i for i in untold if i == self._at] or untold[:1]
        return [self._tasks[i] for i in blamed], [self._tasks[i] for i in untold if i not in blamed]

    def close(self) -> None:
        if self._samples is not None:
            os.close(self._samples)
            self._samples = None
