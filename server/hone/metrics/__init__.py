"""Metrics: what is counted while serving, and how it is told to Prometheus and to Triton's clients."""

from hone.metrics.collector import Metrics
from hone.metrics.endpoint import MetricsEndpoint
from hone.metrics.exposition import CONTENT_TYPE
from hone.metrics.statistics import ENGINE_BOUNDS_US, FAILURE_REASONS, LATENCY_BOUNDS_US, MemoryUsage, ModelStatistics

__all__ = [
    "CONTENT_TYPE",
    "ENGINE_BOUNDS_US",
    "FAILURE_REASONS",
    "LATENCY_BOUNDS_US",
    "MemoryUsage",
    "Metrics",
    "MetricsEndpoint",
    "ModelStatistics",
]
