"""What a daemon shows over HTTP, on real servers: the counts are those of what ran."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

from harness.metrics import ANY_ADDRESS, address
from harness.system import DaemonProcess, System
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from benchmarks.local import RedisServer
from toc.coordination.operator import Operator
from toc.observe.metrics import METRICS

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

    # What the killed had counted stays, and nothing of it is left behind but that.
    killed = daemon.workers()
    before = total(numbers, "toc_step_duration_seconds_count", "prepare")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    cluster.wait(lambda: scrape(daemon).get(("toc_worker_exits_total", "died")) == 2, "both are gone", 30)
    cluster.wait(lambda: ask(daemon, "/readyz")[0] == 200, "others have taken over", 40)
    assert counted() == ran
    assert total(scrape(daemon), "toc_step_duration_seconds_count", "prepare") >= before

    def boards() -> int:
        return Path(f"/proc/{daemon.process.pid}/maps").read_text().count("memfd:toc-metrics")

    cluster.wait(lambda: boards() == len(daemon.workers()) == 2, "a board for each of those that live", 20)
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
    numbers = scrape(daemon)

    def clocks() -> list[float]:
        return [value for key, value in scrape(daemon).items() if key[0] == "toc_clock_difference_seconds"]

    # As well as a round trip can tell: one that took a second is half a second wrong, the next one is not.
    cluster.wait(lambda: all(abs(value) < 0.5 for value in clocks()), "the clocks agree", 30)
    assert len(clocks()) == 4, "three Redis nodes, a database"

    # A drained host is ready all the same.
    assert numbers["toc_drained",] == 0
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
