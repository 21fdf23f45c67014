"""Requests that take as long as a test needs, to models of `repository.counting`."""

from __future__ import annotations

import re
import threading
from typing import Any

from tests.protocol.wire import Answer, Client, Input, raw_input, refused
from tests.running import RunningServer, wait_until

#: Turns of the models' loop: a second or more, and none.
LONG, SHORT = 1_500_000, 0


def turns(number: int) -> list[Input]:
    return [raw_input("IN", "FP32", [[number]])]


class Background:
    """A request on a connection of its own, in a thread; `answer` is None until it is there."""

    def __init__(self, client: Any, *args: Any, **options: Any) -> None:
        self._client = type(client)(client.port)
        self.answer: Answer | None = None
        self._thread = threading.Thread(target=self._run, args=args, kwargs=options)
        self._thread.start()

    def _run(self, *args: Any, **options: Any) -> None:
        self.answer = self._client.infer(*args, **options)
        self._client.close()

    def join(self) -> Answer:
        self._thread.join()
        assert self.answer is not None, "the request raised"
        return self.answer

    def wait_running(self, client: Client, model: str) -> bool:
        """Wait until this long request runs; False if it was answered instead."""
        wait_until(lambda: self.answer is not None or running(client, model), "the long request runs")
        return self.answer is None


def running(client: Client, model: str) -> bool:
    """Whether the model's instance is busy: a probe that may wait for a moment only is turned away."""
    answer = client.infer(model, turns(SHORT), parameters={"timeout": 30_000})
    return not answer.ok and "timeout" in answer.error


def occupy(client: Client, model: str) -> Background:
    """A long request that runs now, so that what comes next has to wait."""
    while True:
        first = Background(client, model, turns(LONG))
        if first.wait_running(client, model):
            return first
        # It came while a probe of ours filled the queue.
        refused(first.join(), 503, "UNAVAILABLE", "Exceeds maximum queue size")


def pending(server: RunningServer, model: str) -> float:
    """Requests in the model's queue."""
    found = re.search(rf'nv_inference_pending_request_count{{model="{model}",version="1"}} (\S+)', server.metrics())
    return float(found[1]) if found else 0


def failures(server: RunningServer, model: str, reason: str) -> float:
    pattern = rf'nv_inference_request_failure{{model="{model}",reason="{reason}",version="1"}} (\S+)'
    found = re.search(pattern, server.metrics())
    assert found, f"no failure counter of {model}"
    return float(found[1])
