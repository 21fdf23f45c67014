"""Metric families that can write themselves: Triton's exact names, fast enough for thousands of models.

prometheus-client appends `_total` and `_created` to counters and wants an object per sample. These families are
ordinary `Metric`s to whoever walks the registry (their samples are made when asked for), and write their own text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client import Metric
from prometheus_client.samples import Sample

from hone.metrics.statistics import ModelStatistics

Number: TypeAlias = int | float

#: Label that distinguishes series of one model version within a family, and its value; None where there is one series.
Extra: TypeAlias = tuple[str, str] | None

#: What distinguishes it, hits of each bucket (not cumulative), and the sum in ns.
Histogram: TypeAlias = tuple[Extra, Sequence[int], int]


def escape_label(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def label_text(labels: Mapping[str, str]) -> str:
    """`model="digits",version="1"`: in the order of the names, as Triton's library writes them."""
    return ",".join(f'{name}="{escape_label(value)}"' for name, value in sorted(labels.items()))


class ModelSeries:
    """A model version's statistics with the labels they are exported under."""

    __slots__ = ("_texts", "labels", "response_cache", "statistics")

    def __init__(self, statistics: ModelStatistics, labels: Mapping[str, str], *, response_cache: bool) -> None:
        self.statistics = statistics
        self.labels = dict(labels)
        self.response_cache = response_cache
        self._texts: dict[Extra, str] = {}

    def labels_with(self, extra: Extra) -> dict[str, str]:
        return self.labels if extra is None else {**self.labels, extra[0]: extra[1]}

    def text(self, extra: Extra) -> str:
        """Label text; sorted and escaped once, since every scrape writes it again."""
        text = self._texts.get(extra)
        if text is None:
            text = self._texts[extra] = label_text(self.labels_with(extra))
        return text


class TextFamily(Metric):
    """A family whose samples and text are made on demand from what is current."""

    def __init__(self, name: str, documentation: str, typ: str) -> None:
        # Metric.__init__ assigns `samples`, which is computed here.
        self.name = name
        self.documentation = documentation
        self.unit = ""
        self.type = typ

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        return list(self.iter_samples())

    def header(self) -> str:
        return f"# HELP {self.name} {escape_help(self.documentation)}\n# TYPE {self.name} {self.type}\n"

    def iter_samples(self) -> Iterator[Sample]:
        raise NotImplementedError

    def iter_text(self) -> Iterator[str]:
        """Pieces of one or more whole lines, without the header. Nothing is written of a family without series."""
        raise NotImplementedError


class ValueFamily(TextFamily):
    """A counter or gauge of every model version. `read` yields the series a version has in this family."""

    def __init__(
        self,
        name: str,
        documentation: str,
        typ: str,
        series: Iterable[ModelSeries],
        read: Callable[[ModelSeries], Iterable[tuple[Extra, Number]]],
    ) -> None:
        super().__init__(name, documentation, typ)
        self._series = series
        self._read = read

    def iter_samples(self) -> Iterator[Sample]:
        for series in self._series:
            for extra, value in self._read(series):
                yield Sample(self.name, series.labels_with(extra), value)

    def iter_text(self) -> Iterator[str]:
        name, read = self.name, self._read
        for series in self._series:
            for extra, value in read(series):
                yield f"{name}{{{series.text(extra)}}} {value}\n"


class HistogramFamily(TextFamily):
    """A histogram of every model version, in us. `read` yields the histograms that a version has in this family."""

    def __init__(
        self,
        name: str,
        documentation: str,
        series: Iterable[ModelSeries],
        bounds_us: Sequence[int],
        read: Callable[[ModelStatistics], Iterable[Histogram]],
    ) -> None:
        super().__init__(name, documentation, "histogram")
        self._series = series
        self._read = read
        self._buckets = (*(str(bound) for bound in bounds_us), "+Inf")
        lines = [f'{name}_bucket{{%s,le="{bucket}"}} %d\n' for bucket in self._buckets]
        self._template = "".join((*lines, f"{name}_sum{{%s}} %d\n", f"{name}_count{{%s}} %d\n"))

    def _histograms(self) -> Iterator[tuple[ModelSeries, Extra, Sequence[int], int]]:
        """With cumulative counts, and the sum in us."""
        for series in self._series:
            for extra, counts, sum_ns in self._read(series.statistics):
                yield series, extra, tuple(accumulate(counts)), sum_ns // 1_000

    def iter_samples(self) -> Iterator[Sample]:
        for series, extra, cumulative, sum_us in self._histograms():
            labels = series.labels_with(extra)
            for bucket, count in zip(self._buckets, cumulative, strict=True):
                yield Sample(f"{self.name}_bucket", {**labels, "le": bucket}, count)
            yield Sample(f"{self.name}_sum", labels, sum_us)
            yield Sample(f"{self.name}_count", labels, cumulative[-1])

    def iter_text(self) -> Iterator[str]:
        template = self._template
        for series, extra, cumulative, sum_us in self._histograms():
            values: list[str | int] = [series.text(extra)] * (2 * len(cumulative) + 4)
            values[1::2] = (*cumulative, sum_us, cumulative[-1])
            yield template % tuple(values)


def latencies(phase: int) -> Callable[[ModelStatistics], Iterable[Histogram]]:
    """A phase (an index into PHASES) of every protocol used so far."""
    # Snapshots, here and below: one may be used for the first time while the text is being sent.
    return lambda statistics: [
        (("protocol", protocol), told.counts[phase], told.sums_ns[phase])
        for protocol, told in tuple(statistics.latencies.items())
    ]


def requests_by_engine(statistics: ModelStatistics) -> Iterable[Histogram]:
    return [
        (("engine", engine), told.request_counts, told.request_ns)
        for engine, told in tuple(statistics.engines.items())
        if any(told.request_counts)
    ]


def executions_by_engine(statistics: ModelStatistics) -> Iterable[Histogram]:
    return [
        (("engine", engine), told.execution_counts, told.execution_ns)
        for engine, told in tuple(statistics.engines.items())
        if any(told.execution_counts)
    ]


class GaugeFamily(TextFamily):
    """A gauge or counter of the machine: label sets (none but for GPUs) and values, already read."""

    def __init__(
        self, name: str, documentation: str, typ: str, values: Sequence[tuple[Mapping[str, str], Number]]
    ) -> None:
        super().__init__(name, documentation, typ)
        self._values = values

    def iter_samples(self) -> Iterator[Sample]:
        for labels, value in self._values:
            yield Sample(self.name, dict(labels), value)

    def iter_text(self) -> Iterator[str]:
        for labels, value in self._values:
            text = f"{{{label_text(labels)}}}" if labels else ""
            yield f"{self.name}{text} {value}\n"
