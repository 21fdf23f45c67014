"""Datatypes under their two names: the protocol's (`FP32`, `BYTES`) and config.pbtxt's (`TYPE_FP32`, `TYPE_STRING`)."""

from __future__ import annotations

from hone.protos import config_pb
from hone.types import BYTES, NUMPY_DTYPES

_CONFIG_DATATYPES: dict[str, int] = {
    datatype: config_pb.DataType.Value("TYPE_STRING" if datatype == BYTES else f"TYPE_{datatype}")
    for datatype in NUMPY_DTYPES
}
_PROTOCOL_DATATYPES = {number: datatype for datatype, number in _CONFIG_DATATYPES.items()}


def config_datatype(datatype: str) -> int:
    """Number of config.pbtxt's enum for a datatype of the protocol."""
    return _CONFIG_DATATYPES[datatype]


def protocol_datatype(number: int) -> str:
    """Datatype of the protocol for a number of config.pbtxt's enum. Raises KeyError for TYPE_INVALID."""
    return _PROTOCOL_DATATYPES[number]


def datatype_name(number: int) -> str:
    """How config.pbtxt writes the number; open enums may hold numbers without a name."""
    try:
        return str(config_pb.DataType.Name(number))
    except ValueError:
        return str(number)
