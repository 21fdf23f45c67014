"""The models that the protocol is tried on: one repository of all kinds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests import models
from tests.protocol.wire import DATATYPES

LABELS = ("cat", "dog", "bird", "fish")

#: Dynamic batching whose queue holds one request.
SHORT_QUEUE = """
max_batch_size: 1
dynamic_batching { default_queue_policy { max_queue_size: 1 allow_timeout_override: true } }
"""
#: Dynamic batching whose requests wait 50 ms at most, or less if they say so.
IMPATIENT_QUEUE = """
max_batch_size: 1
dynamic_batching {
  default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 50000 allow_timeout_override: true }
}
"""
#: The same, without a timeout of its own.
PATIENT_QUEUE = """
max_batch_size: 1
dynamic_batching { default_queue_policy { timeout_action: REJECT allow_timeout_override: true } }
"""


def counting(dims: models.Dims = ("batch", 1)) -> bytes:
    """OUT = IN, after as many turns of a loop as the largest item says (about 1 µs each): requests as slow as asked."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["keep_going"], ["keep_going_out"]),
            helper.make_node("Neg", ["value"], ["negated"]),
            helper.make_node("Neg", ["negated"], ["value_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("keep_going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("keep_going_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value_out", TensorProto.FLOAT, None),
        ],
    )
    true = helper.make_tensor("true", TensorProto.BOOL, [], [True])
    return models.model(
        [
            helper.make_node("ReduceMax", ["IN"], ["largest"], keepdims=0),
            helper.make_node("Cast", ["largest"], ["count"], to=TensorProto.INT64),
            helper.make_node("Loop", ["count", "true", "IN"], ["OUT"], body=body),
        ],
        {"IN": ("FP32", dims)},
        {"OUT": ("FP32", dims)},
        [true],
    )


def sum_with_optional() -> bytes:
    """OUT = A + B + C + D, where D is 100 unless the request brings it."""
    shape = (4,)
    constant = numpy_helper.from_array(np.full(shape, 100, np.float32), "D")
    return models.model(
        [helper.make_node("Sum", ["A", "B", "C", "D"], ["OUT"])],
        dict.fromkeys("ABCD", ("FP32", shape)),
        {"OUT": ("FP32", shape)},
        [constant],
    )


def two_of_different_kind() -> bytes:
    """Two inputs, of which only the first dimension must agree."""
    return models.model(
        [helper.make_node("Identity", ["A"], ["C"]), helper.make_node("Identity", ["B"], ["D"])],
        {"A": ("FP32", ("batch", 2)), "B": ("BYTES", ("batch", 1))},
        {"C": ("FP32", ("batch", 2)), "D": ("BYTES", ("batch", 1))},
    )


def write_labelled(root: Path, name: str = "labelled") -> None:
    config = f"""
    max_batch_size: 4
    input {{ name: "IN" data_type: TYPE_FP32 dims: [ {len(LABELS)} ] }}
    output {{ name: "OUT" data_type: TYPE_FP32 dims: [ {len(LABELS)} ] label_filename: "labels.txt" }}
    """
    folder = models.write_model(root, name, models.identity(), config=config)
    (folder / "labels.txt").write_text("\n".join(LABELS) + "\n", encoding="utf-8")


def write_repository(root: Path) -> None:
    """Everything that the main server serves."""
    models.write_model(root, "add_sub", models.add_sub(), config="max_batch_size: 8")
    models.write_model(root, "plain", models.add_sub(dims=(2, 4)))
    for datatype in DATATYPES:
        models.write_model(root, f"identity_{datatype.lower()}", models.identity(datatype, ("batch", "n")))
    models.write_model(root, "grid", models.identity("FP32", (2, "n", "m")))
    models.write_model(root, "scalar", models.identity("FP32", ()))
    models.write_model(root, "number", models.identity("INT64", ("batch",)))
    models.write_model(root, "word", models.identity("BYTES", ("batch", 1)))
    models.write_model(root, "square", models.identity("INT32", (2, 2)))
    models.write_model(root, "mixed", two_of_different_kind())
    write_optional(root)
    write_labelled(root)
    levels = "max_batch_size: 4\ndynamic_batching { priority_levels: 2 default_priority_level: 1 }"
    models.write_model(root, "levels", models.identity(), config=levels)
    for version, factor in ((1, 2.0), (3, 3.0)):
        models.write_model(root, "versions", models.scale(factor), version=version, config="version_policy { all {} }")
    models.write_model(root, "broken", b"this is no model")
    for protocol in ("http", "grpc"):
        # One of each for each protocol: tests of one never wait for the other's.
        models.write_model(root, f"full_{protocol}", counting(), config=SHORT_QUEUE)
        models.write_model(root, f"impatient_{protocol}", counting(), config=IMPATIENT_QUEUE)
        models.write_model(root, f"patient_{protocol}", counting(), config=PATIENT_QUEUE)
        models.write_model(root, f"slow_{protocol}", counting(), config=PATIENT_QUEUE)


def write_optional(root: Path) -> None:
    tensors = "".join(
        f'input {{ name: "{name}" data_type: TYPE_FP32 dims: [ 4 ] {"optional: true" if name == "D" else ""} }}\n'
        for name in "ABCD"
    )
    config = tensors + 'output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }\n'
    models.write_model(root, "optional", sum_with_optional(), config=config)
