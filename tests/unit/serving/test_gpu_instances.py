"""`instance_group` on a server with GPUs: what a config may say, where instances run, which baseline they get."""

from __future__ import annotations

import threading

import pytest

from hone.engines.placed import PlacedEngine
from hone.errors import ConfigError
from hone.protos import config_pb
from hone.repository import complete
from hone.repository.validation import validate
from hone.serving.lifecycle import gpus_of
from hone.serving.model import num_instances, places_of
from hone.specialization import DEVICE_ORDINAL
from hone.types import TensorSpec
from tests.unit.tuning.fakes import Engine

KINDS = ("left", "left", "right")
CPU, GPU = config_pb.ModelInstanceGroup.KIND_CPU, config_pb.ModelInstanceGroup.KIND_GPU
X, Y = TensorSpec("x", "FP32", (1, 4)), TensorSpec("y", "FP32", (1, 4))


def config(*groups):
    made = config_pb.ModelConfig(name="m", max_batch_size=0)
    for group in groups:
        made.instance_group.add(**group)
    return made


def completed(*groups, num_gpus):
    return complete(config(*groups), [X], [Y], model="m", num_gpus=num_gpus)


def test_instances_are_on_the_gpus_that_are_named():
    whole = completed({"kind": GPU, "gpus": [2, 0], "count": 2}, num_gpus=3)
    assert places_of(whole, KINDS) == (("right", 2), ("left", 0), ("right", 2), ("left", 0))


def test_a_group_that_names_none_is_on_all():
    assert places_of(completed({"kind": GPU}, num_gpus=3), KINDS) == (("left", 0), ("left", 1), ("right", 2))


def test_who_says_nothing_is_on_gpus_where_there_are_any():
    assert places_of(completed(num_gpus=1), KINDS) == (("left", 0),)
    assert places_of(completed(num_gpus=0)) == (("cpu", 0),)


def test_groups_may_be_of_both_kinds():
    whole = completed({"kind": CPU, "count": 2}, {"kind": GPU, "gpus": [1]}, num_gpus=2)
    assert places_of(whole, KINDS) == (("cpu", 0), ("cpu", 0), ("left", 1))


@pytest.mark.parametrize(
    ("group", "num_gpus", "told"),
    [
        ({"kind": GPU}, 0, "instance_group[0].kind"),
        ({"kind": GPU, "gpus": [2]}, 2, "expected numbers of 0 to 1, found [2]: this server has 2 NVIDIA GPUs"),
        ({"kind": GPU, "gpus": [-1]}, 1, "this server has 1 NVIDIA GPU"),
        ({"kind": CPU, "gpus": [0]}, 2, "expected none, found [0]"),
    ],
)
def test_what_is_not_there_is_refused(group, num_gpus, told):
    with pytest.raises(ConfigError) as raised:
        validate(config(group), "m", num_gpus)
    assert told in str(raised.value)


def test_the_baseline_is_on_gpus_only_where_all_instances_are():
    assert gpus_of(config({"kind": GPU, "gpus": [1, 0]}), 2) == [0, 1]
    assert gpus_of(config({"kind": GPU}), 2) == [0, 1]
    assert gpus_of(config(), 2) == [0, 1]
    assert gpus_of(config({"kind": GPU, "gpus": [1]}, {"kind": CPU}), 2) == []
    assert gpus_of(config({"kind": GPU, "gpus": [1]}), 0) == []


def test_the_cpus_threads_are_shared_by_the_instances_on_it():
    assert num_instances(config({"kind": CPU, "count": 2}, {"kind": GPU, "count": 3})) == 2
    assert num_instances(config({"kind": GPU, "count": 3})) == 3
    assert num_instances(config()) == 1


def test_a_thread_runs_its_own_devices_engine():
    engines = {0: Engine(1.0), 1: Engine(2.0)}
    placed = PlacedEngine(engines)
    found = {}

    def work(ordinal):
        DEVICE_ORDINAL.set(ordinal)
        found[ordinal] = placed.instantiate()

    threads = [threading.Thread(target=work, args=(ordinal,)) for ordinal in (0, 1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: engines[0], 1: engines[1], 5: engines[0]}
    placed.close()
    assert all(engine.closed for engine in engines.values())
