"""Numbers in shared memory, added up over processes, as Prometheus reads them."""

import mmap
import os
from collections.abc import Iterator

import pytest
from harness.threads import at_once
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from toc.observe import metrics
from toc.observe.board import BOARD_BYTES, Count, Distribution, MetricKind, SharedMetrics, Values
from toc.observe.exposition import JSON, decode, encode
from toc.observe.metrics import METRICS, add_up

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@pytest.fixture
def boards() -> Iterator[tuple[SharedMetrics, SharedMetrics]]:
    """The same memory as its writer and its reader have it."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, BOARD_BYTES)
    yield SharedMetrics(mmap.mmap(descriptor, BOARD_BYTES)), SharedMetrics(mmap.mmap(descriptor, BOARD_BYTES))
    os.close(descriptor)


def lateness(board: SharedMetrics, topic: str) -> Distribution:
    metric = METRICS["toc_lateness_seconds"]
    return Distribution(metric, board.place((metric.name, topic), metric.cells))


def tries(board: SharedMetrics, topic: str, outcome: str) -> Count:
    metric = METRICS["toc_tries"]
    return Count(metric, board.place((metric.name, topic, outcome), metric.cells))


def test_a_sum_never_shrinks_when_two_clocks_disagree(boards: tuple[SharedMetrics, SharedMetrics]) -> None:
    late = lateness(boards[0], "t")
    late.observe([-0.002])
    late.observe([-0.003])
    (cells,) = boards[1].read().values()
    assert cells[0] == 2
    assert cells[-1] == 0


def test_threads_that_count_the_same_lose_nothing(boards: tuple[SharedMetrics, SharedMetrics]) -> None:
    count = tries(boards[0], "t", "processed")

    def add() -> None:
        for _ in range(5000):
            count.add()

    at_once([add] * 4)
    assert boards[1].read() == {("toc_tries", "t", "processed"): [20_000]}


def test_a_board_that_is_full_takes_no_more_and_stays_readable() -> None:
    small = bytearray(128)
    ours, theirs = SharedMetrics(small), SharedMetrics(small)
    tries(ours, "t", "processed").add(2)
    with pytest.raises(MemoryError):
        lateness(ours, "t")
    tries(ours, "t", "failed").add(1)
    assert [list(cells) for cells in theirs.read().values()] == [[2], [1]]


def test_processes_are_added_up_and_the_gauges_of_those_that_ended_are_not() -> None:
    one: Values = {("toc_tries", "t", "failed"): [2.0], ("toc_running_handlers", "t"): [5.0]}
    one["toc_loop_busy_seconds", "poll"] = [3.0]
    two: Values = {("toc_tries", "t", "failed"): [1.0], ("toc_running_handlers", "t"): [4.0]}
    two["toc_loop_busy_seconds", "poll"] = [1.0]
    total: Values = {}
    add_up(total, one)
    add_up(total, two)
    assert total["toc_tries", "t", "failed"] == [3]
    assert total["toc_running_handlers", "t"] == [9]
    assert total["toc_loop_busy_seconds", "poll"] == [3]
    assert one["toc_tries", "t", "failed"] == [2], "what is added up is left as it was"
    ended: Values = {}
    add_up(ended, one, ended=True)
    assert ended == {("toc_tries", "t", "failed"): [2]}


def test_whatever_is_counted_begins_at_nothing() -> None:
    values = metrics.beginning(["a", "b"], ["b"])
    counted = {
        name
        for name, metric in METRICS.items()
        if metric.kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM)
        and not {"call", "target", "cause"} & set(metric.labels)
    }
    assert {key[0] for key in values} == counted
    assert not any(map(any, values.values()))
    assert {key[1:] for key in values if key[0] == "toc_tries"} >= {("a", "dead"), ("b", "processed")}
    assert [key[1:] for key in values if key[0] == "toc_lateness_seconds"] == [("b",)]
    add_up(values, {("toc_tries", "a", "dead"): [1.0]})
    assert values["toc_tries", "a", "dead"] == [1]


def some_values() -> Values:
    values: Values = {}
    for number, metric in enumerate(METRICS.values(), start=1):
        for label in ("a", 'b"\\\n{ü}'):
            labels = [label, *metric.labels[1:]][: len(metric.labels)]
            values[metric.name, *labels] = [float(number + cell) for cell in range(metric.cells)]
    return values


def test_commands_get_all_numbers_that_their_version_knows() -> None:
    values = some_values()
    body, content_type = encode({**values, ("toc_of_another_version",): [1.0]}, JSON)
    assert (decode(body), content_type) == (values, JSON)
    for other in (b"", b"# HELP", b"{}x", b'{"a": 1}', b"[1]", b'[["", 1, 2]]', b"[" * 9000, b"\xff"):
        with pytest.raises((ValueError, TypeError, LookupError)):
            decode(other)


def test_every_metric_is_valid_openmetrics() -> None:
    body, content_type = encode(some_values(), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}  # type: ignore[no-untyped-call]
    for metric in METRICS.values():
        family = families[metric.name]
        kind = "gauge" if metric.kind is MetricKind.HIGHEST else metric.kind
        assert (family.type, family.documentation) == (kind, metric.help)
        assert family.unit == ("seconds" if metric.name.endswith("_seconds") else "")
        counts = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        if metric.kind is MetricKind.HISTOGRAM:
            number = list(METRICS).index(metric.name) + 1
            assert counts[0] == sum(number + cell for cell in range(metric.cells - 1))
    assert families["process_cpu_seconds"].samples[0].value > 0
