"""The one place that imports tritonclient: its generated messages, so that they are registered once per process.

That also runs the client package's own `__init__` (about 0.1 s, mostly ml_dtypes, which the server needs anyway): a
second copy of the messages would clash with it in protobuf's registry as soon as somebody imports both.
"""

from __future__ import annotations

from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as service_pb

__all__ = ["config_pb", "service_pb"]
