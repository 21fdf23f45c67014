"""Tensor bytes in and out of protobuf messages without the copies that the generated code makes.

A field `raw_input_contents` is kept by the generated parser in memory of its own and copied again when it is read; for
large tensors that is most of the cost of a request. `split_raw_inputs` walks the top level of a ModelInferRequest and
takes the tensors out as views. It understands only the plain form that every serializer writes (one-byte tags of known
fields, all length-delimited) and says None to anything else, valid or not, which is then the generated parser's to
judge: so the two can never disagree about what a message means.
"""

from __future__ import annotations

from typing import TypeAlias

from hone.protos import service_pb

Buffer: TypeAlias = bytes | memoryview

_LENGTH_DELIMITED = 2


def _tag(message: str, field: str) -> int:
    number: int = service_pb.DESCRIPTOR.message_types_by_name[message].fields_by_name[field].number
    return number << 3 | _LENGTH_DELIMITED


_RAW_INPUT_TAG = _tag("ModelInferRequest", "raw_input_contents")
#: All fields of the request are length-delimited and numbered 1 to 7.
_PLAIN_TAGS = frozenset(
    _tag("ModelInferRequest", field.name) for field in service_pb.ModelInferRequest.DESCRIPTOR.fields
)
_RAW_OUTPUT_TAG = bytes([_tag("ModelInferResponse", "raw_output_contents")])
_STREAM_RESPONSE_TAG = bytes([_tag("ModelStreamInferResponse", "infer_response")])

#: A length of more bits cannot be that of a field: messages end at 2 GiB.
_MAX_LENGTH_BITS = 35


def split_raw_inputs(message: bytes) -> tuple[bytes, list[Buffer]] | None:
    """The message without its raw inputs, and those as views of `message`; None where it is not in plain form.

    Nothing else is checked: the remainder is for the generated parser.
    """
    view = memoryview(message)
    end = len(message)
    raw: list[Buffer] = []
    rest: list[Buffer] = []
    rest_start = position = 0
    while position < end:
        tag_at = position
        tag = message[position]
        if tag not in _PLAIN_TAGS:
            return None
        position += 1
        length = shift = 0
        while True:
            if position >= end or shift >= _MAX_LENGTH_BITS:
                return None
            byte = message[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        start = position
        position += length
        if position > end:
            return None
        if tag == _RAW_INPUT_TAG:
            raw.append(view[start:position])
            if rest_start < tag_at:
                rest.append(view[rest_start:tag_at])
            rest_start = position
    if rest_start < end:
        rest.append(view[rest_start:end])
    return b"".join(rest), raw


def append_raw_output(parts: list[Buffer], content: Buffer) -> int:
    """Append one `raw_output_contents` field to the pieces of a ModelInferResponse; returns its size in bytes."""
    head = _RAW_OUTPUT_TAG + _varint(len(content))
    parts += (head, content)
    return len(head) + len(content)


def stream_response(parts: list[Buffer]) -> bytes:
    """A ModelStreamInferResponse holding the ModelInferResponse whose pieces are `parts`."""
    size = sum(map(len, parts))
    return b"".join((_STREAM_RESPONSE_TAG, _varint(size), *parts))


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
