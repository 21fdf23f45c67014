"""Where fields of a protobuf text file stand."""

from __future__ import annotations

import pytest

from hone.cli import pbtxt

TEXT = """\
# a model
name: "m"  max_batch_size: 8;
input [
  { name: 'image' dims: [ 1, -1 ] },
  { name: "mask" "ed" dims: 3 dims: 4 }
]
optimization < graph { level: 1 } >
parameters { key: "b" value { string_value: "x" } }
parameters: { key: "a" value: { string_value: "y" } }
dynamic_batching { priority_queue_policy { key: 2 value { max_queue_size: 1 } } }
"""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("name", (2, 1)),
        ("max_batch_size", (2, 12)),
        ("input[0]", (4, 3)),
        ("input[0].dims[1]", (4, 30)),
        ("input[1].dims[1]", (5, 31)),
        ("optimization.graph.level", (7, 24)),
        ('parameters["a"]', (9, 1)),
        ('parameters["a"].value.string_value', (9, 33)),
        ("dynamic_batching.priority_queue_policy[2]", (10, 20)),
        ("dynamic_batching.priority_queue_policy[2].max_queue_delay", (10, 20)),
        ("input[1].reshape.shape", (5, 3)),
    ],
)
def test_places(path: str, place: tuple[int, int]) -> None:
    found = pbtxt.find(pbtxt.parse(TEXT), path)
    assert found is not None
    assert (found.line, found.column) == place


@pytest.mark.parametrize("path", ["output[0].name", "input[2]", 'parameters["c"]', "model_warmup"])
def test_what_was_not_written_has_no_place(path: str) -> None:
    assert pbtxt.find(pbtxt.parse(TEXT), path) is None


def test_adjacent_strings_are_one() -> None:
    found = pbtxt.find(pbtxt.parse(TEXT), "input[1].name")
    assert found is not None
    assert found.value == "masked"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a {\n b: 1\n", 2, "the end of the file"),
        ("a: [1, 2", 1, "has no end"),
        ("a: }", 1, "expected a value of 'a'"),
        ("a\nb: 1", 1, "expected ':'"),
        (": 1", 1, "expected a field's name"),
        ('a: "x\n', 1, "unexpected"),
        ("a {" * 200, 1, "nested deeper"),
    ],
)
def test_what_has_no_structure(text: str, line: int, message: str) -> None:
    with pytest.raises(pbtxt.Malformed, match=message) as refused:
        pbtxt.parse(text)
    assert refused.value.line == line
