"""A file that grows from one poll to the next is left alone until it has stopped growing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper

from tests import models
from tests.process.support import answers, is_known, is_serving, let_polls_pass, num_loads
from tests.running import run_server, wait_until

#: Far more than the writer waits between two writes, also on a machine that does many other things.
INTERVAL_SECONDS = 0.8


def large_scale(factor: float) -> bytes:
    """OUT = factor * IN, with a megabyte of weights."""
    weights = np.zeros(256 * 1024, dtype=np.float32)
    weights[0] = factor
    return models.model(
        [helper.make_node("ReduceSum", ["weights"], ["factor"]), helper.make_node("Mul", ["IN", "factor"], ["OUT"])],
        {"IN": ("FP32", ("batch", 4))},
        {"OUT": ("FP32", ("batch", 4))},
        [numpy_helper.from_array(weights, "weights")],
    )


class SlowCopy:
    """Appends to a file every few milliseconds, until told to write the rest at once."""

    def __init__(self, target: Path, content: bytes) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self._target, self._content = target, content
        self._finish = threading.Event()
        self._thread = threading.Thread(target=self._copy)
        self._thread.start()

    def _copy(self) -> None:
        with self._target.open("wb") as file:
            position = 0
            while not self._finish.is_set():
                file.write(self._content[position : position + 16])
                file.flush()
                position += 16
                time.sleep(0.005)
            file.write(self._content[position:])

    def finish(self) -> None:
        self._finish.set()
        self._thread.join()


def test_a_new_model_is_taken_once_it_is_complete(repository: Path) -> None:
    flags = ("--model-control-mode=poll", f"--repository-poll-secs={INTERVAL_SECONDS}")
    with run_server(repository, *flags) as server:
        copy = SlowCopy(repository / "growing" / "1" / "model.onnx", large_scale(3.0))
        try:
            let_polls_pass(server, repository, "first")
            assert not is_serving(server, "growing")
        finally:
            copy.finish()
        wait_until(lambda: is_serving(server, "growing"), "the complete model is taken")
        assert answers(server, "growing", 3.0)
        wait_until(lambda: num_loads(server, "growing") == 1, "the log tells so")
        assert "model growing:" not in server.log, "no half of it was ever tried"


def test_a_served_model_answers_as_before_while_it_is_copied_over(repository: Path) -> None:
    models.write_model(repository, "m", large_scale(2.0))
    flags = ("--model-control-mode=poll", f"--repository-poll-secs={INTERVAL_SECONDS}")
    with run_server(repository, *flags) as server:
        copy = SlowCopy(repository / "m" / "1" / "model.onnx", large_scale(5.0))
        try:
            let_polls_pass(server, repository, "first")
            assert answers(server, "m", 2.0)
            assert is_known(server, "m")
        finally:
            copy.finish()
        wait_until(lambda: answers(server, "m", 5.0), "the new content is taken")
        wait_until(lambda: num_loads(server, "m") == 2, "the log tells so")
        assert "model m:" not in server.log, "no half of it was ever tried"
