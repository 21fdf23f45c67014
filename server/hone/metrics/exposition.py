"""Writing a registry as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest

from hone.metrics.families import TextFamily

#: As Triton sends it. Prometheus reads it as its text format 0.0.4.
CONTENT_TYPE = "text/plain; charset=utf-8"

#: Text is handed out in pieces of about this size, so that no scrape holds the event loop for more than about 1 ms.
_PIECE_CHARACTERS = 128 * 1024


def expose(registry: CollectorRegistry) -> Iterator[bytes]:
    """The text of everything in the registry, in pieces of whole lines.

    Other work may run between two pieces: each histogram and each line is consistent in itself, the text as a whole is
    not one instant.
    """
    parts: list[str] = []
    size = 0
    for part in _lines(registry):
        parts.append(part)
        size += len(part)
        if size >= _PIECE_CHARACTERS:
            yield "".join(parts).encode()
            parts.clear()
            size = 0
    if parts:
        yield "".join(parts).encode()


def _lines(registry: CollectorRegistry) -> Iterator[str]:
    for metric in registry.collect():
        if not isinstance(metric, TextFamily):
            yield _foreign(metric)
            continue
        texts = metric.iter_text()
        first = next(texts, None)
        if first is not None:
            yield metric.header()
            yield first
            yield from texts


def _foreign(metric: Metric) -> str:
    """A family of prometheus-client's own making, in its own text, without the series of creation times."""
    shown = Metric(metric.name, metric.documentation, metric.type)
    shown.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
    return generate_latest(_One(shown)).decode()


class _One:
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return (self._metric,)
