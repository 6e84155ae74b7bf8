"""Metrics in Prometheus' text formats: from numbers to text and back. The only importer of prometheus_client.

The numbers come from several processes (``toc.observe.board``), so only the library's formats are used, not
its counters: OpenMetrics for clients that ask for it, else the older text format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from toc.observe.board import Metric, MetricKind, Values
from toc.observe.metrics import METRICS


class _Numbers(Collector):
    def __init__(self, values: Values) -> None:
        self._values = values

    def collect(self) -> Iterator[Family]:
        for name, series in groupby(sorted(self._values.items()), key=lambda one: one[0][0]):
            yield _family(METRICS[name], [(labels, cells) for (_, *labels), cells in series])


def _family(metric: Metric, series: Iterable[tuple[Sequence[str], list[float]]]) -> Family:
    unit = "seconds" if metric.name.endswith("_seconds") else ""
    if metric.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=unit)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for labels, (*counts, total) in series:
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            histogram.add_metric(labels, buckets, sum_value=total)
        return histogram
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels, unit=unit)
    for labels, (value,) in series:
        family.add_metric(labels, value)
    return family


_PROCESS = ProcessCollector(registry=None)


def encode(values: Values, accept: str) -> tuple[bytes, str]:
    """Return the numbers, and those of this process, in the format that the header ``accept`` asks for.

    The second value is the content type.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(values))
    registry.register(_PROCESS)
    write, content_type = choose_encoder(accept)
    return write(registry), content_type


def decode(text: str) -> Values:
    """Parse a text that ``encode`` made (the older format). Skips metrics that toc does not declare.

    Raises ValueError when it is not such a text.
    """
    values: Values = {}
    for family in text_string_to_metric_families(text):
        metric = METRICS.get(family.name)
        if metric is None:
            continue
        histogram = metric.kind is MetricKind.HISTOGRAM
        for sample in family.samples:
            key = (metric.name, *(sample.labels.get(label, "") for label in metric.labels))
            if not histogram:
                values[key] = [sample.value]
                continue
            cells = values.setdefault(key, [0.0] * metric.cells)
            if sample.name.endswith("_sum"):
                cells[-1] = sample.value
            elif sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                if bound == float("inf"):
                    cells[-2] = sample.value
                elif bound in metric.buckets:
                    cells[metric.buckets.index(bound)] = sample.value
    for key, cells in values.items():
        if METRICS[key[0]].kind is MetricKind.HISTOGRAM:  # each bucket of the text includes those below it
            counts = cells[:-1]
            cells[:-1] = [count - below for count, below in zip(counts, [0.0, *counts], strict=False)]
    return values
