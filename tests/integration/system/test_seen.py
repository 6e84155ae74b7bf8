"""What operators see of a system: what comes due when, the metrics of a daemon, the trace of a task."""

import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from harness import forks
from harness.console import Browser
from harness.gateway import Gateway
from harness.metrics import ANY_ADDRESS, address
from harness.patience import until
from harness.system import DaemonProcess, System
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks.local import RedisServer
from toc import NewTask, Settings, TaskStatus, TimeoutCenter
from toc.coordination.operator import Operator
from toc.model.access import Action
from toc.model.errors import ConfigError, StoreUnavailable
from toc.model.minute import MINUTE_MS, Minute, write
from toc.model.topic import TopicType
from toc.observe import metrics
from toc.observe.metrics import METRICS
from toc.observe.tracing import is_traced, trace_id
from toc.operate import cluster as operate_cluster
from toc.operate.due import hour, lateness_record
from toc.operate.operation import Doing, Record
from toc.operate.top import Top
from toc.store.records.cluster import MinuteRow
from toc.store.servers.server import Locked
from toc.store.tasks import batch
from toc.worker.daemon.monitor import Monitor

# What comes due when, as operators see it: at the command line, over HTTP, with and without an index.

SYNC, ASYNC = "test.sync", "test.async"


def last_hour(system: System) -> Record:
    """What is told of the last hour when the present minute is over."""
    found = hour(system.center.store.minutes, system.center.clock.now_ms() + MINUTE_MS)
    return lateness_record(found, lambda _: True, whole=True)


def submit(system: System, topic: str, *delays: float) -> None:
    tasks = [NewTask(topic, biz_id=number, delay=delay) for number, delay in enumerate(delays)]
    system.center.submit_many(tasks)


def test_whoever_may_see_one_topic_is_told_of_no_other(system: System) -> None:
    system.create_topics()
    submit(system, SYNC, 1800)
    submit(system, ASYNC, 1800, 1800)
    with Gateway(system) as gateway:
        gateway.make_token("one", "read", topics=(SYNC,))
        system.wait(
            lambda: not gateway.call("GET", "/v1/due").body["missing"], "its worker has counted all", 60
        )
        all_ = gateway.call("GET", "/v1/due").body
        assert {one["topic"]: one["hour"] for one in all_["topics"]} == {SYNC: 1, ASYNC: 2}
        assert all_["others"]["hour"] == 0
        first = datetime.fromisoformat(all_["minutes_from"])
        assert first.second == first.microsecond == 0
        assert len(all_["total"]["minutes"]) == 60

        def drawn() -> bool:
            bars = re.findall(r'data-values="([^"]+)"', Browser(gateway).get("").html)
            total = gateway.call("GET", "/v1/due").body["total"]
            parts = total["minutes"], total["hours"][:24], total["hours"]
            return bars == [",".join(map(str, part)) for part in parts]

        assert until(drawn), "the console draws these numbers"
        mine = gateway.call("GET", "/v1/due", token="one").body
        assert [one["topic"] for one in mine["topics"]] == [SYNC]
        assert mine["others"] is None
        assert mine["total"]["hour"] == 1
        assert gateway.call("GET", f"/v1/due?topic={SYNC}", token="one").body["total"]["hour"] == 1
        hidden = gateway.call("GET", f"/v1/due?topic={ASYNC}", token="one")
        assert (hidden.status, hidden.body["type"]) == (404, "/docs#unknown-topic")
        what_if = gateway.call("GET", "/v1/due:what-if?pause=3600&rate=10", token="one").body
        assert (what_if["waiting"], what_if["capacity"]) == (1, None), "of its own topic alone"
        assert 0 < what_if["drain_seconds"] < 1
        assert what_if["best_minute"] is None, "of several topics that is no measure"
        first_ms = (system.center.clock.now_ms() // MINUTE_MS - 5) * MINUTE_MS
        for member, minute, starts in (("h1.a", 0, 30), ("h2.a", 0, 12), ("h1.a", 1, 40)):
            text = write(Minute({SYNC: [starts], ASYNC: [500]}, 900))
            system.center.store.minutes.keep([MinuteRow(first_ms + minute * MINUTE_MS, member, text)])
        of_one = gateway.call("GET", f"/v1/due:what-if?topic={SYNC}&pause=3600", token="one").body
        assert (of_one["capacity"], of_one["best_minute"]) == (None, 42), "of all workers, in one minute"
        hidden = gateway.call("GET", f"/v1/due:what-if?topic={ASYNC}&pause=60", token="one")
        assert (hidden.status, hidden.body["type"]) == (404, "/docs#unknown-topic")
        for pause in (0, 7 * 86_400 + 1):
            refused = gateway.call("GET", f"/v1/due:what-if?pause={pause}")
            assert (refused.status, refused.body["field"]) == (422, "pause")


def test_what_was_late_shortly_before_a_stop_is_counted(alone: System) -> None:
    alone.create_topics(topic_type=TopicType.INSTANT)
    daemon = alone.start(processes=1)
    at = datetime.now(UTC) - timedelta(seconds=4)
    job_ids = alone.center.submit_many([NewTask(SYNC, biz_id=number, action_time=at) for number in range(5)])
    alone.wait(lambda: not alone.pending(job_ids), "all have run", 60)
    daemon.stop()
    shown = forks.run(["late", "--topic", SYNC, "--json"], env=alone.env, directory=alone.directory)
    (cause,) = json.loads(shown.stdout)["causes"]
    assert (cause["cause"], cause["tasks"]) == ("stored_late", 5)


@pytest.mark.parametrize("kind", ["system", "alone"])
def test_a_daemon_tells_what_its_processes_did_each_minute(kind: str, request: pytest.FixtureRequest) -> None:
    system: System = request.getfixturevalue(kind)
    system.create_topics()
    daemon = system.start("h1")
    ids = system.center.submit_many([NewTask(SYNC, biz_id=number, delay=0.1) for number in range(20)])
    system.wait(lambda: not system.pending(ids), "all have run", 60)
    daemon.stop()
    record = last_hour(system)
    assert [(one["topic"], one["starts"], one["processed"]) for one in record["topics"]] == [(SYNC, 20, 20)]
    assert sum(map(sum, record["total"]["lateness"])) == 20
    assert record["capacity"] in range(10, 21), "in one minute or two"
    assert [one["member"].partition(".")[0] for one in record["members"]] == ["h1"]
    shown = forks.run(["lateness"], env=system.env, directory=system.directory)
    assert shown.returncode == 0, shown.stderr
    assert "wrote its numbers" in shown.stderr


# What a daemon shows over HTTP, on real servers: the counts are those of what ran.

Numbers = dict[tuple[str, ...], float]


def ask(daemon: DaemonProcess, path: str, accept: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address(daemon.told())}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def scrape(daemon: DaemonProcess) -> Numbers:
    """Every sample, by its name and label values, without buckets."""
    status, text = ask(daemon, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert status == 200
    return {
        (sample.name, *(sample.labels[label] for label in METRICS[family.name].labels)): sample.value
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
        if family.name in METRICS and not sample.name.endswith("_bucket")
    }


def total(numbers: Numbers, *key: str) -> float:
    """The sum of the samples whose names and labels begin so."""
    return sum(value for found, value in numbers.items() if found[: len(key)] == key)


def test_counts_are_those_of_what_ran_also_after_a_worker_process_was_killed(cluster: System) -> None:
    cluster.create_topics(retries=3, backoff_base=0.05, backoff_cap=0.1)
    daemon = cluster.start(processes=2, env=ANY_ADDRESS)
    center = cluster.center
    for number in range(60):
        center.submit("test.sync", biz_id=number, delay=0.2)
        center.submit("test.async", biz_id=number, delay=0.2)
    for number in range(5):
        center.submit("test.sync", biz_id=number, delay=0.2, attribute={"fail": 1})
        center.submit("test.doomed", biz_id=number, delay=0.2)
    center.submit("test.batch", biz_id=1, delay=0.2)
    ran = {
        ("toc_tries_total", "test.sync", "processed"): 65,
        ("toc_tries_total", "test.sync", "failed"): 5,
        ("toc_tries_total", "test.async", "processed"): 60,
        ("toc_tries_total", "test.batch", "processed"): 1,
        ("toc_tries_total", "test.doomed", "failed"): 10,
        ("toc_tries_total", "test.doomed", "dead"): 5,
        ("toc_lateness_seconds_count", "test.sync"): 70,
        ("toc_handler_duration_seconds_count", "test.doomed"): 15,
    }

    def counted() -> Numbers:
        numbers = scrape(daemon)
        return {key: numbers.get(key, 0) for key in ran}

    cluster.wait(lambda: counted() == ran, f"{ran} is counted", 40)
    assert sum(event.event == "start" for event in cluster.history()) == 70 + 60 + 1 + 15
    steps = ("prepare", "read", "finish", "commit")  # the last after the rows that are counted above
    cluster.wait(
        lambda: all(scrape(daemon)["toc_step_duration_seconds_sum", step] > 0 for step in steps), "steps", 10
    )
    numbers = scrape(daemon)
    assert numbers["toc_lateness_seconds_sum", "test.sync"] > 0

    # What the killed had counted stays.
    killed = daemon.workers()
    before = total(numbers, "toc_step_duration_seconds_count", "prepare")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    cluster.wait(lambda: scrape(daemon).get(("toc_worker_exits_total", "died")) == 2, "both are gone", 30)
    cluster.wait(lambda: ask(daemon, "/readyz")[0] == 200, "others have taken over", 40)
    assert counted() == ran
    assert total(scrape(daemon), "toc_step_duration_seconds_count", "prepare") >= before

    job_id = center.submit("test.sync", biz_id=1, delay=0.1, attribute={"die": 1})
    ran["toc_tries_total", "test.sync", "processed"] += 1
    ran["toc_tries_total", "test.sync", "crashed"] = 1
    ran["toc_lateness_seconds_count", "test.sync"] += 1  # that of the try whose end was seen
    cluster.wait(lambda: counted() == ran, f"{ran} is counted", 30)
    assert len(cluster.starts(job_id)) == 2

    def servers() -> Numbers:
        return {key: value for key, value in scrape(daemon).items() if key[0].endswith("_up")}

    assert sorted(servers().values()) == [1, 1, 1, 1, 1], "three Redis nodes, a database, ZooKeeper"
    cluster.wait(lambda: scrape(daemon).get(("toc_dead_tasks", "test.doomed")) == 5, "the dead are seen", 10)
    owned = "toc_slots", "test.sync", "owned"
    cluster.wait(lambda: scrape(daemon).get(owned) == 8, "the others have its slots", 10)

    # A drained host is ready all the same.
    assert scrape(daemon)["toc_drained",] == 0
    settings = cluster.settings
    with Operator(settings.zookeeper or "", cluster=settings.cluster) as operator:
        operator.want("drain", daemon.host, by="ann")
    cluster.wait(lambda: scrape(daemon)["toc_drained",] == 1, "it says so", 30)
    cluster.wait(lambda: ask(daemon, "/readyz") == (200, "ok\n"), "it is ready", 30)


def test_probes_tell_what_is_wrong(system: System, clean_redis: RedisServer) -> None:
    system.create_topics()
    daemon = system.start(processes=1, env=ANY_ADDRESS)
    system.wait(lambda: ask(daemon, "/readyz") == (200, "ok\n"), "it is ready", 10)
    assert ask(daemon, "/livez") == (200, "ok\n")
    assert ask(daemon, "/")[0] == 404
    clean_redis.kill()
    try:
        system.wait(lambda: ask(daemon, "/readyz")[0] == 503, "Redis is missed", 10)
        system.wait(lambda: "cannot be reached" in ask(daemon, "/readyz")[1], "and it says so", 10)
        up = ("toc_redis_up", f"127.0.0.1:{clean_redis.port}")
        system.wait(lambda: scrape(daemon).get(up) == 0, "the metrics tell", 10)
        assert ask(daemon, "/livez") == (200, "ok\n"), "no restart brings Redis back"
    finally:
        clean_redis.start()
    system.wait(lambda: ask(daemon, "/readyz")[0] == 200, "it is ready again", 10)
    enough = system.directory / "enough"
    job_id = system.center.submit("test.sync", biz_id=1, delay=0.1, attribute={"until": str(enough)})
    system.wait(lambda: bool(system.starts(job_id)), "it runs", 5)
    daemon.terminate()
    system.wait(lambda: "it is stopping" in ask(daemon, "/readyz")[1], "it says that it stops", 3)
    assert ask(daemon, "/livez")[0] == 200
    enough.touch()
    assert daemon.process.wait(60) == 0


def test_a_daemon_that_cannot_listen_says_so_and_does_not_start(system: System) -> None:
    system.create_topics()
    first = system.start(processes=1, env=ANY_ADDRESS)
    second = DaemonProcess(
        system.directory,
        "host-b",
        {**system.env, "TOC_METRICS_ADDRESS": address(first.told())},
        app="harness.app:center",
        processes=1,
        threads=1,
    )
    assert second.process.wait(60) == 2
    assert "Address already in use" in second.log.read_text()


# From submit to the last try, a task is one trace: on real servers, with spans of both sides.

CANARY = "canary-7f3a"
Span = dict[str, Any]

exported = InMemorySpanExporter()
"""What this process wrote."""


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    trace.set_tracer_provider(provider)  # once per process: it cannot be taken back
    yield exported
    provider.shutdown()


@pytest.fixture
def center(system: System, exporter: InMemorySpanExporter) -> Iterator[TimeoutCenter]:
    """A service that submits, with traces."""
    exporter.clear()
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
    with TimeoutCenter(Settings(traces=0)) as center:
        assert center.tracing is None
    with (
        TimeoutCenter(Settings(traces=0.5)) as center,
        pytest.raises(ConfigError, match=r"pip install 'timeout-center\[otel\]'"),
    ):
        assert center.tracing


def test_slots_are_counted_by_redis_while_the_first_database_is_away(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.create_topics()
    away = Mock(side_effect=StoreUnavailable("the first"))
    monkeypatch.setattr(system.center.store.identity, "indexed", away)
    assert not [one for one in Top(system.center).look().trouble if "could not be read" in one]
    assert away.called


def test_without_an_index_a_table_without_an_answer_hides_the_counts_alone_and_few_rows_are_read(
    alone: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    center = alone.center
    alone.create_topics()
    count, monitor = center.store.count_by_slot, Monitor(center, alone.settings)
    monitor.tell(replace(monitor._state, owned=frozenset(center.catalog.known()["test.sync"].slots())))

    def fail(*_: object, **__: object) -> None:
        raise Locked("a table")

    monkeypatch.setattr(center.store, "count_by_slot", fail)
    monitor._look(monitor._look_at_index)
    values = monitor.values()
    assert values[metrics.PAUSED.metric.name, "test.sync"] == [0.0]
    assert values[metrics.UNSEEN.metric.name,] == [float(len(monitor._state.owned))]
    assert b"Redis" not in monitor._readyz("").body
    slots = operate_cluster.slots.do(Doing(center, "ann@h", Action.READ_CLUSTER))["slots"]
    assert {(slot["scheduled"], slot["overdue"]) for slot in slots} == {(None, None)}

    monkeypatch.setattr(center.store, "count_by_slot", count)
    monitor._look(monitor._look_at_index)
    assert monitor.values()[metrics.UNSEEN.metric.name,] == [0.0]
    monitor.stop()
    assert not operate_cluster.slots.do(Doing(center, "ann@h", Action.READ_CLUSTER))["more"]
    monkeypatch.setattr(batch, "SLOT_ROWS", 1)
    monkeypatch.setattr(batch, "LEAST_ROWS", 1)
    submit(alone, SYNC, *[1800] * 40)
    found = operate_cluster.slots.do(Doing(center, "ann@h", Action.READ_CLUSTER))
    assert found["more"]
    assert 0 < sum(slot["scheduled"] for slot in found["slots"]) < 40
    assert any("there may be more" in one for one in Top(center).look().trouble)
