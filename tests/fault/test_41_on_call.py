"""Fault 41: all handlers of a topic are busy, or nobody who handles it is left: the on-call is told."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fault.conftest import Build, Verdict
from fault.kit.owners import operator_of
from harness import forks
from harness.metrics import ANY_ADDRESS, address
from harness.programs import need
from harness.prometheus import Prometheus
from harness.secured import root_url
from harness.system import DaemonProcess, System
from harness.tables import raw, task_tables

from benchmarks.local import MariaDB
from toc import NewTask
from toc.model.sharding import table_of_job
from toc.observe.exposition import decode
from toc.observe.metrics import OVERDUE, SLOTS
from toc.operate import doctor

TOLD_SECONDS = 60
"""Within a minute of the time at which a task was due."""


def ask(daemon: DaemonProcess, path: str) -> str:
    with urllib.request.urlopen(f"http://{address(daemon.told())}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def value(daemon: DaemonProcess, *key: str) -> float:
    """What a metric of the daemon tells now."""
    return decode(ask(daemon, "/metrics")).get(key, [0.0])[0]


def unowned(daemon: DaemonProcess, topic: str) -> float:
    """How many slots of a topic nobody owns, as the daemon tells that leads."""
    return value(daemon, SLOTS.metric.name, topic, "unowned")


def told(system: System, *words: str) -> Any:
    """What a command says to a program."""
    done = forks.run([*words, "--json"], env=system.env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def system(build: Build) -> System:
    return build(hosts=True)


def busy(system: System, tasks: int) -> Path:
    """Tasks that are due at once and whose handlers go on until a file is there."""
    enough = system.directory / "enough"
    wait = {"until": str(enough)}
    system.client.submit_many([NewTask("test.sync", n, 0.3, attribute=wait) for n in range(tasks)])
    return enough


def test_every_measure_tells_of_what_is_due_and_not_started(
    system: System, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = verdict(41, "nobody starts what is due", "what each measure says")
    daemon = system.start(processes=1, threads=4, env=ANY_ADDRESS)
    long_one = system.client.submit("test.async", biz_id=1, delay=0.1, attribute={"sleep": 15})
    system.wait(lambda: bool(system.starts(long_one)), "a handler runs that was started in time", 10)
    monkeypatch.setattr(doctor, "OVERDUE_MS", 3000)

    def overdue(topic: str) -> float:
        return value(daemon, OVERDUE.metric.name, topic)

    def found() -> list[str]:
        return [each.what for each in doctor.examine(system.center) if each.part == "tasks"]

    with system.recorder.fault("other", note="handlers that go on"):
        enough = busy(system, 30)
        system.wait(lambda: overdue("test.sync") > 3, "the metric tells of what waits in the worker", 10)
        slots = told(system, "slots", "--topic", "test.sync")
        prepared, scheduled = (sum(slot[name] for slot in slots) for name in ("prepared", "scheduled"))
        line.prove(
            prepared > 10 and not scheduled,
            f"{prepared} taken by a worker that runs 3 at once, {scheduled} left",
        )
        (seen,) = [topic for topic in told(system, "top")["topics"] if topic["topic"] == "test.sync"]
        assert seen["overdue"] > 3
        (said,) = found()
        assert re.match(r"\d+ tasks are overdue, the first by \d+ s", said)
        assert int(said.split()[0]) == prepared - 3, "those that run are not overdue, however long they do"
        assert overdue("test.async") == 0, "it was started in time"
        enough.touch()
        system.wait(lambda: overdue("test.sync") == 0, "it is over", 10)
        assert found() == ["none is overdue by more than 3 s"]

    with (
        system.recorder.fault("other", note="all drained"),
        operator_of(system) as operator,
    ):
        operator.want("drain", daemon.host, by="ann")
        system.wait(
            lambda: unowned(daemon, "test.sync") == 8, "the leader tells of slots without an owner", 10
        )
        system.client.submit("test.sync", biz_id=1, delay=0.1)
        system.wait(lambda: overdue("test.sync") > 1, "and how long a task has been due there", 10)
        operator.unwant("drain", daemon.host)
        system.wait(lambda: overdue("test.sync") == 0, "it runs", 10)
    judged = line.judge(system, within=5)
    assert not judged.duplicates


@pytest.mark.slow
def test_what_waits_for_a_locked_table_is_overdue(system: System, mariadb: MariaDB, verdict: Verdict) -> None:
    line = verdict(41, "nobody starts what is due", "somebody has locked its table")
    daemon = system.start(processes=1, env=ANY_ADDRESS)

    def overdue() -> float:
        return value(daemon, OVERDUE.metric.name, "test.sync")

    with system.recorder.fault("other", note="a locked table"), raw(root_url(mariadb)) as stranger:
        job_id = system.client.submit("test.sync", biz_id=1, delay=3)  # locked before it is due
        table = task_tables(system.settings)[table_of_job(job_id, system.settings.tables)]
        stranger.exec_driver_sql(f"LOCK TABLES {table} WRITE")
        system.wait(lambda: overdue() > 6, "the metric goes on to grow", 20)
        line.prove(not system.starts(job_id), f"overdue by {overdue()} s and not started")
    system.wait(lambda: overdue() == 0, "it is over", 20)
    line.judge(system, within=10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_within_a_minute_an_alert_names_the_topic(system: System, verdict: Verdict, tmp_path: Path) -> None:
    need("prometheus")
    line = verdict(41, "nobody starts what is due", "Prometheus with the rules and intervals of deploy/")
    daemon = system.start(processes=2, env=ANY_ADDRESS, app="fault.apps.older:center")
    with Prometheus(tmp_path / "prometheus", [address(daemon.told())], hurry=False) as prometheus:
        system.wait(
            lambda: prometheus.values('up{job="toc"}', "instance") == {address(daemon.told()): 1.0},
            "it collects",
            60,
        )

        def fires(topic: str) -> bool:
            wanted = {"topic": topic, "severity": "critical"}.items()
            alerts = prometheus.ask("alerts")["alerts"]
            return any(one["state"] == "firing" and wanted <= one["labels"].items() for one in alerts)

        def alarm(what: str, topic: str, due: float) -> None:
            system.wait(lambda: fires(topic), what, 2 * TOLD_SECONDS)
            line.prove(True, f"{what}: told after {time.time() - due:.0f} s")
            line.within(time.time() - due, TOLD_SECONDS)

        with (
            system.recorder.fault("other", note="handlers of a minute, no handler, all drained"),
            operator_of(system) as operator,
        ):
            enough, due = busy(system, 60), time.time() + 0.3
            system.client.submit("test.batch", biz_id=1, delay=0.3)
            alarm("60 handlers of a minute", "test.sync", due)
            alarm("a topic that no host handles", "test.batch", due)
            operator.want("drain", daemon.host, by="ann")
            enough.touch()
            system.wait(lambda: unowned(daemon, "test.async") == 8, "nobody owns its slots", 30)
            due = time.time() + 0.3
            system.client.submit("test.async", biz_id=1, delay=0.3)
            alarm("every host drained", "test.async", due)
            operator.unwant("drain", daemon.host)
            system.start("host-b", processes=1)
        judged = line.judge(system, within=10)
        assert not judged.duplicates
