"""The one place that imports tritonclient: its generated messages, so that they are registered once per process.

Importing `tritonclient.grpc` would pull in its client; the generated modules alone cost a few milliseconds.
"""

from __future__ import annotations

from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as service_pb

__all__ = ["config_pb", "service_pb"]
