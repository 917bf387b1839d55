"""A Prometheus histogram for what happens thousands of times a second on the event loop."""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from services.common.telemetry import tracing


class LoopHistogram(Collector):
    """Exported like the library's own, without its locks and its search from the first bucket on: that took a tenth of
    what a streamed token costs here. Observed on one thread only; a scrape on another may miss the last observation.

    Args:
        name: of the series.
        documentation: for `# HELP`.
        labels: names of its labels.
        buckets: upper bounds, ascending, without infinity.
        registry: that exports it.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self.label_names = tuple(labels)
        self.bounds = tuple(buckets)
        self._series: dict[tuple[str, ...], LoopSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> LoopSeries:
        """The series of these values of its labels; keep it where it is observed often."""
        if (found := self._series.get(values)) is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"{self._name} has the labels {self.label_names}, not {len(values)}")
            found = self._series[values] = LoopSeries(self.bounds)
        return found

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Collects the samples for the registry."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self.label_names)
        for values, series in tuple(self._series.items()):
            family.add_metric(values, series.buckets(), series.sum)
        yield family


class LoopSeries:
    """One series of a LoopHistogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._traced: list[tuple[float, str, float] | None] = [None] * len(self._counts)
        """Exemplars: for each bucket the newest value of a trace that is kept, that trace's context, and when it
        was."""
        self.sum = 0.0

    def observe(self, value: float, traceparent: str = "") -> None:
        """Counts a value; one that equals a bound is in the bucket of that bound. Its trace becomes the exemplar."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += 1
        self.sum += value
        if tracing.sampled(traceparent):
            self._traced[bucket] = (value, traceparent, time.time())

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Counts up to each bound, as the library takes them."""
        found: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        bounds = map(floatToGoString, (*self._bounds, math.inf))
        for bound, count, traced in zip(bounds, itertools.accumulate(self._counts), self._traced, strict=True):
            if traced is None:
                found.append((bound, float(count)))
            else:
                value, traceparent, when = traced
                labels = {"trace_id": tracing.trace_id(traceparent)}
                found.append((bound, float(count), Exemplar(labels, value, when)))
        return found
