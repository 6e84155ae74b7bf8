"""Metrics in Prometheus' text formats, and in JSON for toc's own commands. Imports prometheus_client alone.

The numbers come from several processes (``toc.observe.board``), so only the library's formats are used, not
its counters: OpenMetrics for clients that ask for it, else the older text format.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from toc.model.documents import parse
from toc.observe.board import BOARD_BYTES, Metric, MetricKind, Values
from toc.observe.metrics import METRICS

JSON = "application/json"
MAX_BYTES = 16 * BOARD_BYTES
"""Longest answer of a daemon, which has several boards."""


_PROCESS = ProcessCollector(registry=None)


class _Numbers(Collector):
    def __init__(self, values: Values) -> None:
        self._values = values

    def collect(self) -> Iterator[Family]:
        for name, series in groupby(sorted(self._values.items()), key=lambda one: one[0][0]):
            yield _family(METRICS[name], [(labels, cells) for (_, *labels), cells in series])
        yield from _PROCESS.collect()


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


def encode(values: Values, accept: str) -> tuple[bytes, str]:
    """Return the numbers, and those of this process, in the format that the header ``accept`` asks for.

    The second value is the content type. JSON, without those of this process, is for toc's own commands.
    """
    if accept == JSON:
        return json.dumps(list(values.items())).encode(), JSON
    write, content_type = choose_encoder(accept)
    return write(_Numbers(values)), content_type


def decode(data: bytes) -> Values:
    """Return the numbers that ``encode`` wrote as JSON. Skips metrics that toc does not declare.

    Raises ValueError, TypeError or LookupError when it is not such a text.
    """
    return {tuple(key): cells for key, cells in parse(data, most=MAX_BYTES) if key[0] in METRICS}
