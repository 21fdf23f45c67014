"""What a tuned engine declines, the baseline answers: with its own error, or with its own result; nobody is blamed."""

from __future__ import annotations

import pytest

from hone.engines.cuda_runtime import CudaError
from hone.errors import DeviceLost, EngineError, InputsDeclined
from hone.specialization import Observers, Signature, Specialization, VersionRef
from tests.unit.serving.conftest import rows
from tests.unit.serving.fakes import FakeEngine


class Declines(FakeEngine):
    """A specialization that leaves numbers above 5 to the baseline."""

    def run(self, inputs, outputs):
        if inputs["IN"].max() > 5:
            raise InputsDeclined("an index is out of range")
        return [inputs["IN"] * 10 for _ in outputs]


class Heard:
    def __init__(self) -> None:
        self.num_failed = 0
        self.declined_by: list[tuple[VersionRef, int]] = []

    def failed(self, ref, generation, reason):
        self.num_failed += 1

    def declined(self, ref, generation):
        self.declined_by.append((ref, generation))

    def wants_sample(self, ref, generation):
        return False


async def test_the_baseline_answers_what_is_declined(serve):
    heard = Heard()
    served = serve(observers=Observers(watcher=heard))
    signature = Signature.of([("IN", "FP32", (1, 4))])
    served.model.slot.promote([Specialization(signature, Declines(shape=(1, 4)), "digest", 1)])
    assert (await served.ask(rows(1, 2)).future)["OUT"].tolist() == rows(1, 20).tolist()
    assert heard.declined_by == []

    assert (await served.ask(rows(1, 7)).future)["OUT"].tolist() == rows(1, 14).tolist()
    assert heard.declined_by == [(served.model.ref, 1)]

    served.engine.fail_if = lambda array: True
    with pytest.raises(EngineError, match="told to fail"):
        await served.ask(rows(1, 7)).future
    assert len(heard.declined_by) == 2
    assert heard.num_failed == 0
    served.engine.fail_if = None

    assert (await served.ask(rows(1, 3)).future)["OUT"].tolist() == rows(1, 30).tolist()


class Raises(FakeEngine):
    """A specialization that cannot run."""

    def __init__(self, problem):
        super().__init__(shape=(1, 4))
        self.problem = problem

    def run(self, inputs, outputs):
        raise self.problem


async def test_a_lost_gpu_is_held_against_nobody(serve):
    heard = Heard()
    served = serve(observers=Observers(watcher=heard))
    signature = Signature.of([("IN", "FP32", (1, 4))])
    served.model.slot.promote([Specialization(signature, Raises(DeviceLost("by another")), "digest", 1)])
    assert (await served.ask(rows(1, 7)).future)["OUT"].tolist() == rows(1, 14).tolist()
    assert (heard.num_failed, heard.declined_by) == (0, [])


async def test_who_broke_the_gpu_is_told_of_whatever_the_baseline_says(serve):
    heard = Heard()
    served = serve(observers=Observers(watcher=heard))
    served.engine.fail_if = lambda array: True
    signature = Signature.of([("IN", "FP32", (1, 4))])
    problem = CudaError("cudaStreamSynchronize", 700, "an illegal memory access was encountered")
    served.model.slot.promote([Specialization(signature, Raises(problem), "digest", 1)])
    with pytest.raises(EngineError, match="told to fail"):
        await served.ask(rows(1, 7)).future
    assert heard.num_failed == 1
