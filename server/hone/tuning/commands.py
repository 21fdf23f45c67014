"""What people tell the tuner to do with a model version: start it, ask again, or hold it in one of several ways."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from hone.errors import InvalidRequest, Unavailable
from hone.tuning.book import Book, Place
from hone.tuning.child_process import JobCause
from hone.tuning.holding import HOLDS, KEEPING, OperatorHolds, held_then
from hone.tuning.jobs import JobQueue
from hone.tuning.lanes import Lanes
from hone.tuning.planner import Planner
from hone.tuning.record import Record

ACTIONS = ("start", "retune", *HOLDS)


class Commands:
    """Actions that wait for the tuner's thread, and how it carries them out. Any thread may `put` one."""

    def __init__(
        self,
        book: Book,
        planner: Planner,
        queue: JobQueue,
        lanes: Lanes,
        holds: OperatorHolds,
        *,
        drop: Callable[[Record, str, JobCause], None],
        plan: Callable[[Record], None],
    ) -> None:
        """`drop` returns a version to the baseline and ends the work on it; `plan` begins that again."""
        self._book, self._planner, self._queue, self._lanes, self._holds = book, planner, queue, lanes, holds
        self._drop, self._plan = drop, plan
        self._waiting: deque[tuple[Place, str, Future[None]]] = deque()

    def put(self, model: str, version: str, action: str) -> Future[None]:
        """See `specialization.TuningControl`. Raises InvalidRequest and NotFound."""
        if action not in ACTIONS:
            raise InvalidRequest(f"unknown tuning action '{action}', expected one of {', '.join(ACTIONS)}")
        done: Future[None] = Future()
        self._waiting.append((self._book.place_of(model, version), action, done))
        return done

    def leave(self) -> None:
        """The tuner ends: what waits is not done, and nobody waits for it."""
        while self._waiting:
            self._waiting.popleft()[2].set_result(None)

    def follow(self) -> None:
        while self._waiting:
            place, action, done = self._waiting.popleft()
            try:
                record = self._book.at(place)
                if record is not None:
                    self._follow(record, action)
                    self._book.tell(record)
            except Unavailable as problem:
                done.set_exception(problem)
            finally:
                if not done.done():
                    done.set_result(None)

    def _follow(self, record: Record, action: str) -> None:
        if action in HOLDS:
            self._hold(record, action)
            return
        self._check_startable(record, action)
        record.held = ""
        self._holds.drop(record.version.ref)
        record.num_starts += 1
        record.spent_seconds, record.num_remeasured, record.remeasure_at = {}, 0, 0.0
        if action == "retune":
            self._retune(record)
        else:
            self._planner.forget_failures(record)
            self._book.note(record, "started")
        record.state = "queued"
        self._plan(record)

    @staticmethod
    def _check_startable(record: Record, action: str) -> None:
        """Raises Unavailable with what hinders it."""
        model = record.version.ref.model
        if record.mode == "off":
            raise Unavailable(f"cannot {action} tuning of '{model}': {record.off}")
        if action == "retune" and record.mode != "on":
            raise Unavailable(
                f"cannot retune '{model}': its tuning is '{record.mode}' by the server's --tuning or its configuration,"
                " so that nothing is compiled or measured; expected 'on'"
            )

    def _retune(self, record: Record) -> None:
        """Ask again for everything, whatever was said before."""
        self._lanes.cancel(record.version.ref, "it is to be tuned anew", "retuned")
        self._queue.cancel(record.version.ref)
        self._book.note(record, "retuned")
        for job in self._planner.anew(record):
            self._queue.put(job)

    def _hold(self, record: Record, action: str) -> None:
        """Work on it no more until it is started again. What serves goes on serving, or is rolled back too."""
        record.held = held_then(record.held, action)
        self._holds.put(record.version.ref, record.held)
        self._book.note(record, action, reason=record.held)
        if record.held not in KEEPING:
            self._drop(record, record.held, "held")
        else:
            self._lanes.cancel(record.version.ref, record.held, "held")
            self._queue.cancel(record.version.ref)
        record.settle()
