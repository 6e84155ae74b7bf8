"""Faults 41, 51 and 58: the on-call is told, mixed versions are named,
a step of the ladder is taken under load."""

import json
import re
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fault.conftest import Case
from fault.kit.load import Load
from fault.kit.owners import operator_of
from harness import forks, secured
from harness.history import Client
from harness.metrics import ANY_ADDRESS, address
from harness.programs import need
from harness.prometheus import Prometheus
from harness.secured import root_url
from harness.system import DaemonProcess, System
from harness.tables import raw, task_tables

from benchmarks.local import ZooKeeper
from toc import NewTask, TimeoutCenter
from toc.coordination.assignment import PROTOCOL
from toc.model.errors import ConfigError
from toc.model.sharding import table_of_job
from toc.observe.exposition import JSON, decode
from toc.observe.metrics import OVERDUE, SLOTS
from toc.operate import doctor, doctor_tasks

# Fault 41: all handlers of a topic are busy, or nobody who handles it is left: the on-call is told.

TOLD_SECONDS = 60
"""Within a minute of the time at which a task was due."""


def value(daemon: DaemonProcess, *key: str) -> float:
    """What a metric of the daemon tells now."""
    asked = urllib.request.Request(f"http://{address(daemon.told())}/metrics", headers={"Accept": JSON})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return decode(answer.read()).get(key, [0.0])[0]


def unowned(daemon: DaemonProcess, topic: str) -> float:
    """How many slots of a topic nobody owns, as the daemon tells that leads."""
    return value(daemon, SLOTS.metric.name, topic, "unowned")


def told(system: System, *words: str) -> Any:
    """What a command says to a program."""
    done = forks.run([*words, "--json"], env=system.env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def system(case: Case) -> System:
    return case.build(hosts=True)


def busy(system: System, tasks: int) -> Path:
    """Tasks that are due at once and whose handlers go on until a file is there."""
    enough = system.directory / "enough"
    wait = {"until": str(enough)}
    system.client.submit_many([NewTask("test.sync", n, 0.3, attribute=wait) for n in range(tasks)])
    return enough


def test_every_measure_tells_of_what_is_due_and_not_started(
    system: System, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = case.verdict(41, "nobody starts what is due", "what each measure says")
    daemon = system.start(processes=1, threads=4, env=ANY_ADDRESS)
    long_one = system.client.submit("test.async", biz_id=1, delay=0.1, attribute={"sleep": 15})
    system.wait(lambda: bool(system.starts(long_one)), "a handler runs that was started in time", 10)
    monkeypatch.setattr(doctor_tasks, "OVERDUE_MS", 3000)

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
        assert re.match(r"\d+ tasks? overdue, the first by \d+ s", said)
        assert int(said.split()[0]) == prepared - 3, "those that run are not overdue, however long they do"
        assert overdue("test.async") == 0, "it was started in time"
        enough.touch()
        system.wait(lambda: overdue("test.sync") == 0, "it is over", 10)
        assert found() == ["none is overdue by more than 3 s"]

    with system.recorder.fault("other", note="all drained"), operator_of(system) as operator:
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
def test_what_waits_for_a_locked_table_is_overdue(system: System, case: Case) -> None:
    line = case.verdict(41, "nobody starts what is due", "somebody has locked its table")
    daemon = system.start(processes=1, env=ANY_ADDRESS)

    def overdue() -> float:
        return value(daemon, OVERDUE.metric.name, "test.sync")

    with system.recorder.fault("other", note="a locked table"), raw(root_url(case.mariadb)) as stranger:
        job_id = system.client.submit("test.sync", biz_id=1, delay=3)  # locked before it is due
        table = task_tables(system.settings)[table_of_job(job_id, system.settings.tables)]
        stranger.exec_driver_sql(f"LOCK TABLES {table} WRITE")
        system.wait(lambda: overdue() > 6, "the metric goes on to grow", 20)
        line.prove(not system.starts(job_id), f"overdue by {overdue()} s and not started")
    system.wait(lambda: overdue() == 0, "it is over", 20)
    line.judge(system, within=10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_within_a_minute_an_alert_names_the_topic(system: System, case: Case) -> None:
    need("prometheus")
    line = case.verdict(41, "nobody starts what is due", "Prometheus with the rules and intervals of deploy/")
    daemon = system.start(processes=2, env=ANY_ADDRESS, app="fault.apps.older:center")
    with Prometheus(case.path / "prometheus", [address(daemon.told())], hurry=False) as prometheus:
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


# Fault 51: members of two protocol versions are mixed: those that must be upgraded are named.


def test_a_member_that_announces_a_lower_protocol_is_named_until_it_is_gone(
    case: Case, zookeeper: ZooKeeper, zookeeper_root: str
) -> None:
    system = case.build(hosts=True)
    system.start("new-host", processes=1)
    workers = f"/toc/{zookeeper_root}/workers"
    onlooker = secured.zookeeper_client(zookeeper)
    onlooker.start()

    def named() -> set[str]:
        return {line.of for line in doctor.examine(system.center) if f"others have {PROTOCOL}" in line.what}

    try:
        (ours,) = system.wait(
            lambda: onlooker.exists(workers) and onlooker.get_children(workers), "its worker registers", 20
        )
        announced = json.loads(onlooker.get(f"{workers}/{ours}")[0])
        assert announced["protocol"] == PROTOCOL
        assert not named()
        older = announced | {"host": "old-host", "topics": [], "protocol": PROTOCOL - 1}
        onlooker.create(f"{workers}/old-host-0", json.dumps(older).encode(), ephemeral=True)
        system.wait(lambda: named() == {"old-host"}, "it is named", 20)
        onlooker.delete(f"{workers}/old-host-0")
        assert not named()
    finally:
        onlooker.stop()
        onlooker.close()


# Fault 58: a step up or down the ladder (the database alone, with an index, with ZooKeeper) under load.

STAY_SECONDS = 1.0


def test_up_and_down_the_ladder_nothing_is_lost_early_or_run_twice(
    case: Case, zookeeper: ZooKeeper, zookeeper_root: str
) -> None:
    """Submits and cancels go on, also of an application that was started without an index and stays so."""
    line = case.verdict(58, "steps up and down the ladder under load")
    system = case.build(case.redis.url, topic_prepare_timeout=5)
    alone = {"TOC_REDIS_URL": ""}
    cluster = {"TOC_ZOOKEEPER": zookeeper.url, "TOC_CLUSTER": zookeeper_root}
    steps: list[tuple[str, dict[str, str]]] = [
        ("", {}), ("off", alone), ("on", {}), ("", cluster), ("off", alone), ("on", cluster), ("off", alone)
    ]  # fmt: skip
    refused = 0

    def run(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
        return forks.run(words, env={**system.env, **env}, directory=system.directory)

    def refuses(env: dict[str, str], text: str) -> bool:
        wrong = run(env, "worker", "--app", "harness.app:center")
        assert wrong.returncode == ConfigError.exit_code, wrong.stderr
        return text in wrong.stderr

    with ExitStack() as stack:
        stack.enter_context(Load(system.client, rate=40, ahead=(0.1, 4.0)))
        for number, (to, env) in enumerate(steps):
            if to:
                done = run(cluster if steps[number - 1][1] is cluster else {}, "index", to)
                assert done.returncode == 0, done.stderr
                against = f"run `toc index {'on' if to == 'off' else 'off'}`"
                refused += refuses({} if to == "off" else alone, against)
            host = f"host-{number}"
            daemon = system.start(host, processes=2, env=env)
            if number == 1:
                settings = system.settings.model_copy(update={"redis_url": None})
                client = Client(stack.enter_context(TimeoutCenter(settings)), system.recorder)
                stack.enter_context(Load(client, rate=20, ahead=(0.1, 4.0), first=2_000_000))
            time.sleep(STAY_SECONDS)
            other, how = ({}, "with") if env is cluster else ({**env, **cluster}, "without")
            alive = f"alive {how} ZooKeeper"
            system.wait(lambda: alive in run(other, "doctor").stdout, "the rows tell of it", 30)  # noqa: B023 - called at once
            refused += refuses(other, f"gateways on {host} are alive {how} ZooKeeper")
            if number < len(steps) - 1:
                for its in (env, other) if env is cluster else ({}, cluster):
                    against = run(its, "index", "on" if env is alone else "off").stderr
                    assert f"alive on {host}: stop them" in against
                with system.recorder.fault("other", note="no worker is there"):
                    daemon.terminate()
                    daemon.await_end()
    line.prove(refused == 12, f"{len(steps) - 1} steps, {refused} daemons of the wrong rung refused")
    line.judge(system, within=10, but="X")  # an index that is off does not follow
