"""That a request fits its model: rows 15 to 25 of the error table, and reshape."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from hone.errors import InvalidRequest, ServerStopping
from tests.unit.serving.conftest import BATCHING, request_of, rows
from tests.unit.serving.fakes import FakeEngine

THREE = """
name: "m" platform: "onnxruntime_onnx"
input { name: "A" data_type: TYPE_FP32 dims: 4 } input { name: "B" data_type: TYPE_INT32 dims: -1 }
input { name: "C" data_type: TYPE_FP32 dims: 1 optional: true }
output { name: "X" data_type: TYPE_FP32 dims: 4 } output { name: "Y" data_type: TYPE_FP32 dims: 4 }
"""
A, B, C = ("FP32", np.zeros(4, np.float32)), ("INT32", np.zeros(3, np.int32)), ("FP32", np.zeros(1, np.float32))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"A": A},
            r"inputs between 2 and 3 but got 1 inputs for model 'm'. Got input\(s\) \['A'\], but missing",
        ),
        (
            {},
            r"expected number of inputs between 2 and 3 but got 0 inputs for model 'm'. Got input\(s\) \[\],",
        ),
        ({"A": A, "B": B, "Z": C}, "unexpected inference input 'Z' for model 'm'"),
        ({"A": A, "B": A}, "inference input 'B' data-type is 'FP32', but model 'm' expects 'INT32'"),
        (
            {"A": ("FP32", np.zeros(5, np.float32)), "B": B},
            r"unexpected shape for input 'A' for model 'm'. Expected \[4\], got \[5\]",
        ),
        ({"A": ("FP32", np.zeros((1, 4), np.float32)), "B": B}, r"Expected \[4\], got \[1,4\]"),
    ],
)
async def test_inputs_that_do_not_fit_are_named(serve, arrays, message):
    model = serve(THREE).model
    with pytest.raises(InvalidRequest, match=message):
        model.admit(request_of(arrays), asyncio.get_running_loop().create_future())


async def test_optional_inputs_may_be_left_out_or_given(serve):
    model = serve(THREE).model
    for arrays in ({"A": A, "B": B}, {"B": B, "C": C, "A": A}):
        pending = model.admit(request_of(arrays), asyncio.get_running_loop().create_future())
        assert set(pending.arrays) == set(arrays)
        assert pending.output_names == ("X", "Y")


async def test_outputs_are_checked_and_keep_their_order(serve):
    model = serve(THREE).model
    future = asyncio.get_running_loop().create_future()
    assert model.admit(request_of({"A": A, "B": B}, ("Y", "X")), future).output_names == ("Y", "X")
    with pytest.raises(InvalidRequest, match="unexpected inference output 'Q' for model 'm'"):
        model.admit(request_of({"A": A, "B": B}, ("Q",)), future)
    with pytest.raises(InvalidRequest, match="output 'X' already exists in request"):
        model.admit(request_of({"A": A, "B": B}, ("X", "X")), future)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.float32(1), "input 'IN' has no shape but model requires batch dimension"),
        (rows(9), "inference request batch-size must be <= 8 for 'm', got 9"),
        (rows(0), "inference request batch-size must be >= 1 for 'm', got 0"),
        (rows(1, width=5), r"Expected \[-1,4\], got \[1,5\]. NOTE: Setting a non-zero max_batch_size"),
        (np.zeros(4, np.float32), r"Expected \[-1,4\], got \[4\]"),
    ],
)
async def test_batches_that_do_not_fit_are_told(serve, array, message):
    served = serve(BATCHING)
    with pytest.raises(InvalidRequest, match=message):
        served.admit(np.asarray(array))


async def test_inputs_of_one_request_agree_on_the_batch_size(serve):
    two = BATCHING + 'input { name: "IN2" data_type: TYPE_FP32 dims: 4 }'
    model = serve(two).model
    arrays = {"IN": ("FP32", rows(2)), "IN2": ("FP32", rows(3))}
    with pytest.raises(InvalidRequest, match="input 'IN2' batch size does not match other inputs for 'm'"):
        model.admit(request_of(arrays), asyncio.get_running_loop().create_future())


async def test_reshape_changes_what_engine_and_client_see_without_copying(serve):
    served = serve(
        """name: "m" max_batch_size: 8
        input { name: "IN" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } }
        output { name: "OUT" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } }""",
        FakeEngine(shape=(-1,)),
    )
    array = np.array([[1.0], [2.0]], np.float32)
    pending = served.ask(array)
    outputs = await pending.future
    assert served.engine.batches == [(2,)]
    assert served.engine.addresses == [array.ctypes.data]
    assert served.model.output_shape("OUT", outputs["OUT"]) == (2, 1)


async def test_reshape_carries_variable_dimensions_in_order(serve):
    served = serve(
        """name: "m" input { name: "IN" data_type: TYPE_FP32 dims: [-1, 2, -1] reshape { shape: [1, -1, -1, 2] } }
        output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }"""
    )
    assert served.admit(np.zeros((3, 2, 5), np.float32)).arrays["IN"].shape == (1, 3, 5, 2)


async def test_a_retired_model_takes_no_lease_and_closes_after_the_last(serve):
    served = serve(BATCHING)
    lease = served.model.acquire()
    retiring = asyncio.create_task(served.model.retire())
    await asyncio.sleep(0)
    with pytest.raises(ServerStopping):
        served.model.acquire()
    assert not served.engine.closed
    with lease:
        pass
    await retiring
    assert served.engine.closed


async def test_engines_are_closed_while_the_event_loop_goes_on(serve):
    served = serve(BATCHING)
    loop, went_on = asyncio.get_running_loop(), threading.Event()
    close = served.engine.close

    def waits_for_the_loop():
        loop.call_soon_threadsafe(went_on.set)
        assert went_on.wait(30)
        close()

    served.engine.close = waits_for_the_loop
    await served.model.retire()
    assert went_on.is_set()
    assert served.engine.closed
