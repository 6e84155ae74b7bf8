"""From submit to the last try, a task is one trace: on real servers, with spans of both sides."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import forks
from harness.system import System
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from toc import NewTask, TaskStatus, TimeoutCenter
from toc.model.errors import ConfigError, StoreUnavailable
from toc.observe.tracing import Tracing, is_traced, trace_id

CANARY = "canary-7f3a"
Span = dict[str, Any]

exported = InMemorySpanExporter()
"""What this process wrote."""


@pytest.fixture(scope="module", autouse=True)
def _provider() -> Iterator[None]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    trace.set_tracer_provider(provider)  # once per process: it cannot be taken back
    yield
    provider.shutdown()


@pytest.fixture
def center(system: System) -> Iterator[TimeoutCenter]:
    """A service that submits, with traces."""
    exported.clear()
    system.create_topics(retries=3, backoff_base=0.05, backoff_cap=0.1)
    with TimeoutCenter(system.settings.model_copy(update={"traces": 1.0})) as traced:
        yield traced


def ours() -> list[Span]:
    return [json.loads(span.to_json(indent=None)) for span in exported.get_finished_spans()]


def named(spans: list[Span], name: str) -> list[Span]:
    return sorted((span for span in spans if span["name"] == name), key=lambda span: str(span["start_time"]))


def linked(span: Span) -> set[str]:
    return {link["context"]["span_id"] for link in span["links"]}


def test_submit_and_every_try_of_a_task_are_one_trace_that_tells_nothing_of_the_task(
    system: System, center: TimeoutCenter, tmp_path: Path
) -> None:
    directory = tmp_path / "spans"
    directory.mkdir()
    env = {"TOC_TRACES": "1", "TOC_TEST_SPANS": str(directory)}
    daemon = system.start(processes=1, app="harness.traced:center", env=env)
    carried = {"canary": CANARY}
    with trace.get_tracer("web").start_as_current_span("request"):
        failing = center.submit("test.sync", biz_id=CANARY, delay=0.1, attribute={**carried, "fail": 3})
        again = center.submit("test.async", biz_id=CANARY, delay=0.1, attribute={**carried, "again": 1})
        many = center.submit_many(
            [
                NewTask("test.batch", CANARY, 0.3, attribute=carried),
                NewTask("test.batch", CANARY, 0.3, attribute={**carried, "dead": 1}),
            ]
        )
    job_ids = [failing, again, *many]

    def ended() -> bool:
        tasks = [center.get(job_id) for job_id in job_ids]
        return all(task is not None and task.status is not TaskStatus.PENDING for task in tasks)

    system.wait(ended, "all have ended", 30)
    daemon.terminate()
    assert daemon.process.wait(60) == 0, daemon.log.read_text()
    lines = [line for file in directory.iterdir() for line in file.read_text().splitlines()]
    theirs = [json.loads(line) for line in lines]  # exported though the worker has ended at once

    [request] = named(ours(), "request")
    for job_id in job_ids:
        mine = [span for span in ours() + theirs if span["context"]["trace_id"] == f"0x{trace_id(job_id)}"]
        [sent] = [span for span in mine if span["name"].startswith("send ")]
        tries = [span for span in mine if span["name"].startswith("process ")]
        above = {span["parent_id"] for span in [sent, *tries]}
        assert len(above) == 1
        assert linked(sent) == {request["context"]["span_id"]}
        assert sent["context"]["span_id"] in linked(request)
        assert {span["attributes"]["messaging.message.id"] for span in [sent, *tries]} == {str(job_id)}
        assert all(span["start_time"] >= sent["start_time"] for span in tries)
    assert len(linked(request)) == 4

    tries = named(theirs, "process test.sync")
    assert [span["attributes"]["toc.attempt"] for span in tries] == [1, 2, 3]
    assert {span["attributes"]["toc.outcome"] for span in tries} == {"failed"}
    assert {span["status"]["status_code"] for span in tries} == {"ERROR"}
    assert {span["attributes"]["error.type"] for span in tries} == {"ValueError"}
    tries = named(theirs, "process test.async")
    assert [span["attributes"]["toc.outcome"] for span in tries] == ["retry", "processed"]
    assert [span["status"]["status_code"] for span in tries] == ["ERROR", "UNSET"]
    tries = named(theirs, "process test.batch")
    assert sorted(span["attributes"]["toc.outcome"] for span in tries) == ["dead", "processed"]
    inside = {span["parent_id"] for span in named(theirs, "inside")}
    single = {
        span["context"]["span_id"] for span in theirs if span["name"][8:] in ("test.sync", "test.async")
    }
    assert inside == single | {None}, "what a handler traces stands under its try, but for a batch"
    assert CANARY not in json.dumps(ours() + theirs)


def test_a_submit_that_fails_is_a_span_with_an_error_and_its_class_alone(
    center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_one: object) -> int:
        raise StoreUnavailable(f"all about {CANARY}")

    monkeypatch.setattr(center.store, "put", refuse)
    with pytest.raises(StoreUnavailable):
        center.submit("test.sync", biz_id=1, delay=60)
    [span] = ours()
    assert (span["status"]["status_code"], span["attributes"]["error.type"]) == ("ERROR", "StoreUnavailable")
    assert CANARY not in json.dumps(span)


def test_the_command_line_tells_the_trace_of_a_task(system: System, center: TimeoutCenter) -> None:
    job_id = center.submit("test.sync", biz_id=1, delay=60)
    for share, expected in (("1", trace_id(job_id)), ("0", None)):
        done = forks.run(["get", str(job_id), "--json"], env=system.env | {"TOC_TRACES": share})
        assert json.loads(done.stdout).get("trace_id") == expected


def test_a_share_of_all_tasks_is_traced_the_same_everywhere() -> None:
    job_ids = range(10_000)
    tenth = {job_id for job_id in job_ids if is_traced(job_id, 0.1)}
    assert 850 < len(tenth) < 1150
    assert tenth < {job_id for job_id in job_ids if is_traced(job_id, 0.5)}
    assert not any(is_traced(job_id, 0.0) for job_id in job_ids)
    assert all(is_traced(job_id, 1.0) for job_id in job_ids)


def test_without_opentelemetry_traces_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert Tracing.of(0.0) is None
    with pytest.raises(ConfigError, match=r"pip install 'timeout-center\[otel\]'"):
        Tracing.of(0.5)
