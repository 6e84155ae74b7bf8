"""Fault 11: MySQL hangs, or its disk is full."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load, tasks
from fault.kit.servers import fill

from benchmarks.local import MariaDB
from toc import NewTask
from toc.model import errors
from toc.store.servers.health import ALONE_SECONDS


@pytest.mark.slow
def test_a_database_that_hangs_fails_calls_fast_and_all_goes_on_when_it_answers(
    build: Build, resumed: MariaDB, verdict: Verdict
) -> None:
    line = verdict(11, "MySQL hangs (SIGSTOP)")
    system = build(connect_timeout=0.5, read_timeout=1.0, write_timeout=1.0)
    daemon = system.start()
    system.client.submit_many(tasks(300, ahead=(0.5, 4.0), fail=0.1))
    with Load(system.client, rate=100, ahead=(0.1, 1.0)) as load:
        load.more(50)
        with system.recorder.fault("store_down"):
            resumed.pause()
            began = time.monotonic()
            with pytest.raises(errors.StoreUnavailable):
                system.center.get(load.job_ids[0])
            failed_after = time.monotonic() - began
            system.wait(lambda: "rows_not" in daemon.log.read_text(), "the workers meet it", 60)
            resumed.resume()
        load.more(30)
    line.prove(
        failed_after > 0.3, f"a read failed after {failed_after:.1f} s; {load.errors.total()} calls failed"
    )
    line.within(failed_after, 3)
    # A submit whose answer is missing asks again for five seconds before it says that nobody knows.
    line.within(load.slowest, 9)
    line.judge(system, within=4)


@pytest.mark.parametrize("halt", [pytest.param(0.2, marks=pytest.mark.slow), 1.5])
def test_after_a_short_halt_of_the_only_database_server_no_task_waits_for_more_than_the_halt(
    build: Build, resumed: MariaDB, verdict: Verdict, halt: float
) -> None:
    line = verdict(11, f"MySQL halts for {halt} s")
    system = build()
    daemon = system.start()
    count, job_ids = 2_000, list[int]()
    for ahead in (4, 30):  # on a busy machine those of the first round may be due before all are stored
        began = time.time() + ahead
        due = datetime.fromtimestamp(began, UTC)
        job_ids = system.client.submit_many(
            [
                NewTask("test.async", n, action_time=due + timedelta(seconds=2.5 * n / count))
                for n in range(count)
            ]
        )
        if time.time() < began:
            break
    line.prove(time.time() < began, "all are stored ahead")
    with system.recorder.fault("store_down"):
        time.sleep(max(0.0, began + 0.3 - time.time()))
        resumed.pause()
        time.sleep(halt)
        resumed.resume()
    system.wait(lambda: not system.pending(job_ids), "all have run", 30)
    late = system.late(job_ids)
    away = daemon.log.read_text().count('"database_away"')
    line.prove(late.most > 500 * halt, f"marked as away {away} times; {late}")
    if halt + line.slack < ALONE_SECONDS:
        assert not away
    # What was postponed meanwhile would return in lumps, the last of them seconds later.
    line.on_time(late, most=1000 * (halt + 0.4))
    line.judge(system, within=4)


@pytest.mark.slow
def test_a_full_disk_fails_submits_by_name_and_nothing_that_was_acknowledged_suffers(
    build: Build, small_disk: Callable[[int], Path], verdict: Verdict
) -> None:
    line = verdict(11, "MySQL's disk is full")
    disk = small_disk(400)
    config = ["innodb_log_file_size=16M", "innodb_autoextend_increment=1"]
    with MariaDB(disk / "mariadb", buffer_pool="64M", config=config) as database:
        system = build(database_urls=[database.url])
        system.start()
        system.client.submit_many(tasks(500, ahead=(1.0, 8.0), fail=0.1))
        with Load(system.client, rate=100, ahead=(0.1, 2.0), attribute={"pad": "x" * 4000}) as load:
            load.more(50)
            with system.recorder.fault("full"):
                ballast = fill(disk)
                system.wait(lambda: load.errors["Refused"] > 20, "submits are refused", 40)
                ballast.unlink()
            load.more(100)
        line.prove(
            load.errors["Refused"] > 20,
            f"{load.errors['Refused']} submits refused: {str(load.raised['Refused']).partition(': ')[2]}",
        )
        line.judge(system, within=4)
        system.stop()
