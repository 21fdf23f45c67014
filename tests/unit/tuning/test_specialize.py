"""The child's job with a baseline, a compile step and measurements that a test scripts."""

from __future__ import annotations

import os
from contextlib import contextmanager

import numpy as np
import pytest

from hone.errors import EngineError
from hone.specialization import Signature
from hone.tuning import specialize, trial
from hone.tuning.inputs import Domain, InputSet, draw
from hone.tuning.measure import Comparison, Plan, median_of
from hone.tuning.running_time import RunningTime
from hone.tuning.samples import pack
from hone.tuning.specialize import Compiled, NotCompiled, specialize_all
from hone.types import TensorSpec
from tests import models
from tests.unit.tuning.fakes import Engine


def compared(ratio: float, provisional: bool = False, spread: float = 0.0) -> Comparison:
    times = median_of([1e6] * 20, 0.01)
    ratios = median_of(np.linspace(ratio - spread, ratio + spread, 20).tolist(), 0.01)
    return Comparison(times, median_of([ratio * 1e6] * 20, 0.01), ratios, 20, 20, 0, provisional)


class Compiler:
    """Makes the engines that the test wants: `engine(signature)`; remembers what was published."""

    def __init__(self) -> None:
        self.engine = lambda signature: Engine(factor=2.0)
        self.published: dict[str, dict] = {}
        self.built: list[tuple[str, str]] = []
        self.made: list[Engine] = []
        self.problem = ""
        self.is_open = False

    def build(self, signature, digest, seconds, tell):
        assert seconds > 0
        tell(0.5, "compiling", best="1 us")
        self.built.append(("build", digest))
        return self._made(signature, digest)

    def load(self, digest):
        self.built.append(("load", digest))
        return self._made(Signature.of([("IN", "FP32", (1, 4))]), digest)

    def _made(self, signature, digest):
        made = self.engine(signature)
        if isinstance(made, NotCompiled):
            return made
        self.made.append(made)

        def publish(told):
            self.published[digest] = dict(told)
            return self.problem

        return Compiled(made, publish, {"candidates_built": 2}, is_open=self.is_open)


class Ledger:
    def __init__(self) -> None:
        self.known_digests: dict = {}
        self.refusals: dict[str, tuple[str, str]] = {}
        self.locked: list[str] = []

    @contextmanager
    def lock(self, digest, waiting):
        self.locked.append(digest)
        waiting()
        yield

    def known(self, digest):
        return self.known_digests.get(digest)

    def keep_refusal(self, digest, outcome, reason, verdict):
        self.refusals[digest] = (outcome, reason)


class Job:
    """Runs `specialize_all`; measurements are scripted by ratio, since a test must not depend on the machine."""

    def __init__(self, folder, monkeypatch, onnx_bytes=None, *, ratio=0.5, rows=(1, 2, 4), max_batch_size=4, **fields):
        path = folder / "model.onnx"
        path.write_bytes(onnx_bytes or models.scale(2.0))
        self.compiler, self.ledger, self.events = Compiler(), Ledger(), []
        self.ratio = ratio
        self.padded: list[tuple[int, int]] = []
        self.pays = lambda rows, bucket: True
        self.spec = {
            "path": str(path),
            "max_batch_size": max_batch_size,
            "precision": "f32",
            "tolerance": None,
            "margin": 0.03,
            "seconds": 60.0,
            "run_threads": 1,
            "tasks": [
                {
                    "signature": Signature.of([("IN", "FP32", (n, 4))]).to_json(),
                    "digest": f"digest {n}",
                    "mode": "build",
                }
                for n in rows
            ],
            **fields,
        }
        job = self

        def compare(self, baseline, candidate, plan):
            inputs = self.inputs()[0]
            baseline(inputs)
            candidate(inputs)
            self.tell(0.5)
            return job.measured()

        def compare_padded(self, num_rows, plan):
            job.padded.append((num_rows, self.signature.rows))
            return compared(0.5 if job.pays(num_rows, self.signature.rows) else 1.2)

        self.baseline = Engine(factor=2.0)
        monkeypatch.setattr(specialize.OnnxRuntimeEngine, "load", lambda path, settings: self.baseline)
        monkeypatch.setattr(trial.Trial, "_compare", compare)
        monkeypatch.setattr(trial.Trial, "_compare_padded", compare_padded)

    def measured(self):
        return compared(self.ratio)

    def run(self):
        specialize_all(
            self.spec,
            lambda event, **fields: self.events.append({"event": event, **fields}),
            self.compiler,
            self.ledger,
        )
        return [event for event in self.events if event["event"] == "specialized"]


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Job(tmp_path, monkeypatch)


def test_right_and_faster_is_published_with_its_verdict(job):
    outcomes = job.run()
    assert [(o["index"], o["outcome"], o["reason"]) for o in outcomes] == [(i, "passed", "") for i in range(3)]
    told = job.compiler.published["digest 2"]
    assert told["verdict"]["speedup"] == 2.0
    assert told["verdict"]["max_error"] == 0.0
    assert told["signature"] == [["IN", "FP32", [2, 4]]]
    assert Domain.from_json(told["domains"]["IN"]).shape == (2, 4)
    assert outcomes[0]["report"] == {"candidates_built": 2}
    assert job.ledger.locked == ["digest 1", "digest 2", "digest 4"]
    assert all(engine.closed for engine in job.compiler.made)


def test_progress_rises_and_measuring_says_that_it_paces_itself(job):
    job.run()
    stages = [event for event in job.events if event["event"] == "stage"]
    progress = [event["progress"] for event in stages]
    assert progress == sorted(progress)
    assert max(progress) < 1, "that it is done is told by its outcome alone"
    assert {event["stage"].split(" for ")[0] for event in stages if event.get("paced")} == {
        "measuring",
        "measuring padded batches",
    }
    assert {event["index"] for event in stages if "index" in event} == {0, 1, 2}


def test_wrong_numbers_are_refused_remembered_and_not_published(job):
    job.compiler.engine = lambda signature: Engine(factor=2.01)
    outcomes = job.run()
    assert {o["outcome"] for o in outcomes} == {"refused"}
    assert "elements are off by more than 0.001" in outcomes[0]["reason"]
    assert job.compiler.published == {}
    assert job.ledger.refusals["digest 1"] == ("refused", outcomes[0]["reason"])
    assert all(engine.closed for engine in job.compiler.made)


def test_a_tolerance_of_the_model_lets_them_pass(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, tolerance=0.1)
    job.compiler.engine = lambda signature: Engine(factor=2.01)
    assert {o["outcome"] for o in job.run()} == {"passed"}


def test_an_engine_that_is_wrong_on_some_inputs_only_is_found(job):
    class WrongOnNegatives(Engine):
        def run(self, inputs, outputs):
            return [np.abs(array) for array in super().run(inputs, outputs)]

    job.compiler.engine = lambda signature: WrongOnNegatives()
    assert {o["outcome"] for o in job.run()} == {"refused"}


def test_an_engine_that_fails_is_refused(job):
    def broken(signature):
        engine = Engine()
        engine.broken = True
        return engine

    job.compiler.engine = broken
    assert "it failed on synthetic inputs 0: told to fail" in job.run()[0]["reason"]


def test_an_engine_that_fails_while_it_is_measured_is_refused(job):
    def fails():
        raise EngineError("out of memory")

    job.measured = fails
    assert "it failed while it was measured: out of memory" in job.run()[0]["reason"]


def test_not_faster_is_refused_and_remembered(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, ratio=1.0)
    outcomes = job.run()
    assert "not faster by 3%: baseline 1 ms, tuned 1 ms" in outcomes[0]["reason"]
    assert set(job.ledger.refusals) == {"digest 1", "digest 2", "digest 4"}


@pytest.mark.parametrize(
    "measured",
    [
        compared(1.0, provisional=True),
        compared(0.7, spread=0.6),  # perhaps much faster, perhaps slower
    ],
)
def test_refusals_that_noise_decided_are_marked_and_not_remembered(job, measured):
    job.measured = lambda: measured
    [outcome, *_] = job.run()
    assert (outcome["outcome"], outcome["verdict"]["inconclusive"]) == ("refused", True)
    assert job.ledger.refusals == {}


@pytest.mark.parametrize("factor, ratio", [(2.01, 0.5), (2.0, 1.0)], ids=["wrong", "not faster"])
def test_a_refusal_of_what_more_time_may_have_made_better_is_not_remembered(tmp_path, monkeypatch, factor, ratio):
    job = Job(tmp_path, monkeypatch, ratio=ratio)
    job.compiler.engine = lambda signature: Engine(factor=factor)
    job.compiler.is_open = True
    [outcome, *_] = job.run()
    assert (outcome["outcome"], outcome["verdict"]["inconclusive"]) == ("refused", True)
    assert job.ledger.refusals == {}


@pytest.mark.parametrize(
    "measured, certain",
    [
        (compared(0.6), True),
        (compared(0.6, provisional=True), False),
        (compared(0.6, spread=0.3), False),  # 1.1 to 3.3 times as fast: perhaps more than twice, perhaps less
    ],
)
def test_no_faster_than_the_plain_module_is_remembered_where_it_is_certain(job, measured, certain):
    job.measured = lambda: measured
    job.spec["tasks"] = [{**job.spec["tasks"][0], "plain_speedup": 2.0}]
    [outcome] = job.run()
    assert outcome["reason"].startswith("no faster than the module with plain schedules: 1.67 times")
    assert (outcome["outcome"], outcome["verdict"]["passed"]) == ("refused", False)
    assert outcome["verdict"]["inconclusive"] is not certain
    assert bool(job.ledger.refusals) is certain


def test_a_plain_module_that_is_gated_is_to_be_beaten_too(job):
    plain = {**job.spec["tasks"][0], "digest": "plain 1", "mode": "gate", "is_plain": True}
    job.spec["tasks"] = [plain, job.spec["tasks"][0]]
    outcomes = job.run()
    assert [outcome["outcome"] for outcome in outcomes] == ["passed", "refused"]
    assert outcomes[1]["reason"].startswith("no faster than the module with plain schedules: 2 times")


def test_provisional_verdicts_are_marked(job):
    job.measured = lambda: compared(0.5, provisional=True)
    assert job.run()[0]["verdict"]["provisional"] is True
    assert job.compiler.published["digest 1"]["verdict"]["provisional"] is True


def test_unsupported_is_remembered_with_its_operator_and_failed_is_not(job):
    results = {
        1: NotCompiled("unsupported", "no converter", "LSTM"),
        2: NotCompiled("failed", "g++ exited with 1"),
        4: Engine(),
    }
    job.compiler.engine = lambda signature: results[signature.rows]
    outcomes = job.run()
    assert [o["outcome"] for o in outcomes] == ["unsupported", "failed", "passed"]
    assert outcomes[0]["operator"] == "LSTM"
    assert job.ledger.refusals == {"digest 1": ("unsupported", "no converter")}


def test_what_another_server_made_meanwhile_is_taken(job):
    job.ledger.known_digests["digest 2"] = ("passed", "", {"speedup": 3.0})
    outcomes = job.run()
    assert outcomes[1]["verdict"] == {"speedup": 3.0}
    assert ("build", "digest 2") not in job.compiler.built


def test_gating_loads_and_judges_though_a_verdict_is_known(job):
    job.ledger.known_digests["digest 1"] = ("passed", "", {})
    job.spec["tasks"] = [{**job.spec["tasks"][0], "mode": "gate"}]
    assert job.run()[0]["outcome"] == "passed"
    assert job.compiler.built == [("load", "digest 1")]


def test_what_cannot_be_published_has_failed(job):
    job.compiler.problem = "full (no space left)"
    assert job.run()[0]["reason"] == "it passed, and could not be kept: full (no space left)"


# --- padding


def test_padding_is_searched_between_buckets_only(job):
    job.run()
    assert job.padded == [(3, 4)], "2 follows 1 and nothing lies between"
    assert job.compiler.published["digest 4"]["verdict"]["min_rows"] == 3


def test_padding_that_never_pays_leaves_the_bucket_alone(job):
    job.pays = lambda rows, bucket: False
    job.run()
    assert job.compiler.published["digest 4"]["verdict"]["min_rows"] == 4


def test_the_border_of_padding_is_found_by_halving(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, rows=(1, 2, 4, 8, 16, 32, 64), max_batch_size=64)
    job.pays = lambda rows, bucket: rows >= 0.7 * bucket
    job.run()
    assert job.compiler.published["digest 64"]["verdict"]["min_rows"] == 45
    assert len([1 for _, bucket in job.padded if bucket == 64]) <= 5


def test_a_larger_bucket_stands_in_for_a_smaller_that_failed(job):
    job.compiler.engine = lambda signature: Engine(factor=9.0 if signature.rows == 2 else 2.0)
    job.run()
    assert job.compiler.published["digest 4"]["verdict"]["min_rows"] == 2


def test_buckets_that_passed_before_count(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, rows=(4,), passed_rows=[1, 3])
    job.run()
    assert job.padded == []


def test_models_that_do_not_batch_have_no_padding(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, rows=(4,), max_batch_size=0)
    job.run()
    assert job.padded == []
    assert job.compiler.published["digest 4"]["verdict"]["min_rows"] == 0


# --- inputs


def test_real_samples_are_compared_first_with_their_rows_repeated(tmp_path, monkeypatch):
    descriptor = pack([InputSet("warm-up", {"IN": np.full((3, 4), 1e6, np.float32)})])
    job = Job(tmp_path, monkeypatch, rows=(2,), samples=descriptor)

    class WrongOnLarge(Engine):
        def run(self, inputs, outputs):
            return [np.minimum(array, 1e5) for array in super().run(inputs, outputs)]

    job.compiler.engine = lambda signature: WrongOnLarge()
    assert "on warm-up" in job.run()[0]["reason"]
    os.close(descriptor)


def test_without_inputs_there_is_no_verdict(tmp_path, monkeypatch):
    from onnx import helper

    nodes = [helper.make_node("Reshape", ["IN", "shape"], ["OUT"])]
    onnx_bytes = models.model(
        nodes, {"IN": ("FP32", (1, 4)), "shape": ("INT64", (2,))}, {"OUT": ("FP32", (None, None))}
    )
    job = Job(tmp_path, monkeypatch, onnx_bytes, max_batch_size=0)
    job.spec["tasks"] = [
        {
            "signature": Signature.of([("IN", "FP32", (1, 4)), ("shape", "INT64", (2,))]).to_json(),
            "digest": "d",
            "mode": "build",
        }
    ]
    [outcome] = job.run()
    assert "its outputs cannot be checked: input 'shape' tells Reshape a shape" in outcome["reason"]
    assert job.ledger.refusals == {}


def test_integers_are_drawn_closer_to_zero_where_the_model_refuses_them():
    class Picky(Engine):
        def run(self, inputs, outputs):
            if inputs["IN"].max() > 1:
                raise EngineError("index out of range")
            return super().run(inputs, outputs)

    spec = TensorSpec("OUT", "FP32", (4,))
    signature = Signature.of([("IN", "INT64", (4,))])
    found = trial.gather(Picky(), [spec], signature, {"IN": Domain("INT64", (4,), 0, 100)}, [], batching=False)
    assert found.domains["IN"].high == 1


def test_a_model_that_refuses_everything_says_what_would_help():
    class Refusing(Engine):
        def run(self, inputs, outputs):
            raise EngineError("never")

    spec = TensorSpec("OUT", "FP32", (4,))
    signature = Signature.of([("IN", "INT64", (4,))])
    found = trial.gather(Refusing(), [spec], signature, {"IN": Domain("INT64", (4,), 0, 100)}, [], batching=False)
    assert found.reason == "the baseline refuses made-up inputs (never); give model_warmup data"


def test_a_random_model_is_not_blamed_on_the_compiler(job):
    class Random:
        outputs = (TensorSpec("OUT", "FP32", (-1, 4)),)

        def instantiate(self):
            return self

        def run(self, inputs, outputs):
            return [np.random.default_rng().random((len(inputs["IN"]), 4), np.float32)]

    job.baseline = Random()
    [outcome, *_] = job.run()
    assert outcome["reason"].startswith("the baseline's own outputs change from run to run")


def test_inputs_that_are_measured_are_aligned(tmp_path):
    signature = Signature.of([("IN", "FP32", (3, 5))])
    domains = {"IN": Domain("FP32", (3, 5), -1, 1)}
    evidence = trial.Evidence((draw(domains, 0),), ([np.zeros(1)],), domains)
    subject = trial.Trial(Engine(), Engine(), [], signature, evidence, "f32", None)
    assert all(inputs["IN"].ctypes.data % 64 == 0 for inputs in subject.inputs())


def test_a_real_measurement_of_two_engines():
    signature = Signature.of([("IN", "FP32", (8, 4))])
    domains = {"IN": Domain("FP32", (8, 4), -1, 1)}
    evidence = trial.Evidence((draw(domains, 0),), ([np.zeros(1)],), domains)

    class Slow(Engine):
        def run(self, inputs, outputs):
            for _ in range(20):
                super().run(inputs, outputs)
            return super().run(inputs, outputs)

    plan = Plan(looks=(10,), seconds=5.0)
    subject = trial.Trial(Slow(), Engine(), [], signature, evidence, "f32", None, plan=plan)
    assert subject.measure().speedup > 2


# --- time


def test_time_is_shared_out_by_what_the_process_ran_not_by_the_clock(tmp_path, monkeypatch):
    given = []
    with RunningTime() as running:
        job = Job(tmp_path, monkeypatch, running_time=running.descriptor)
        build = job.compiler.build

        def waits_for_a_processor(signature, digest, seconds, tell):
            given.append(seconds)
            running.tell(10.0 * len(given))  # whatever time has passed on the wall
            return build(signature, digest, seconds, tell)

        monkeypatch.setattr(job.compiler, "build", waits_for_a_processor)
        running.tell(6.0)
        job.run()
    assert given == [(60 - 6) / 3, (60 - 10) / 2, 60 - 20]
