"""Does toc stay as fast with 100,000,000 rows? ``python -m benchmarks.rows --directory D [--rows N]``

Fills D (benchmarks.filled) unless it is filled, and measures, each of ``WHAT`` or those that are named:

lateness    at 1,000 a second, with these rows and with 10,000, in turn; submits a second
burst       50,000 due at one instant: tasks a second until all are finished
rest        processor time of a daemon and the servers without tasks
passes      of the sweep and of the walk that counts what comes due: time, rows, processor time of MariaDB
purge       rows a second that the retention deletes, and lateness meanwhile
backup      of one of eight databases by mariadb-dump into a pipe: its rate, and lateness meanwhile
old         lateness of rows that were made weeks ago, with nothing of them in MariaDB's memory

New tasks have texts as biz_ids, as the rows have: their places in the index by biz_id are anywhere. A quarter
of an hour of the rows is within the horizon, and further ones enter it as time goes by. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import processes, stats
from benchmarks.catalog import ENTRIES
from benchmarks.filled import DATABASES, TABLES, TOPICS, Rows, connect, database, fill, filled, renew
from benchmarks.peer import NS
from benchmarks.scale import idle, settle
from benchmarks.system import System, warn
from toc import Settings, TimeoutCenter
from toc.maintenance.due_walk import ROWS, SHARE
from toc.maintenance.sweep import Sweep, SweepCounts
from toc.maintenance.sweeper import FULL, OVERDUE, SOON, Round
from toc.model.due import FAR
from toc.model.task import TaskStatus
from toc.operate import admin
from toc.store.tasks.scan import Place, Position

TEXTS = 1 << 46
"""What benchmarks.peers.toc does with numbers that have this bit: texts."""
WHAT = ["lateness", "burst", "rest", "passes", "purge", "backup", "old"]
FEW = 10_000
RATE = 1000
BURST = 50_000
INDEXED_MS = 900_000
"""How much of the rows is within the horizon when a measurement begins."""
PURGED, PURGED_TABLES = 200_000, 4
LONG_AGO_MS = 10 * 86_400_000
WALKED = 4
"""Tables through which the walk is measured."""
OLD_LEAD = 120
"""Seconds in which a server with the old rows must have stopped and started."""
PENDING, PROCESSED = int(TaskStatus.PENDING), int(TaskStatus.PROCESSED)
NAMES = [f"toc_{table % DATABASES}.timeout_task_{table:04d}" for table in range(TABLES)]


class Measured:
    """A filled database with the other servers, a peer, and a client of this process."""

    def __init__(self, rows: Rows, system: System) -> None:
        assert system.servers is not None
        self.rows = rows
        self.system = system
        system.numbers(random.randrange(1 << 40))  # other numbers than those of what a former run has left
        self.servers = system.servers
        environment = self.servers.environment
        self._url = environment["TOC_DATABASE_URLS"]
        self.settings = Settings(
            database_urls=[self._url],
            databases=DATABASES,
            tables=TABLES,
            redis_url=environment["TOC_REDIS_URL"],
        )
        with TimeoutCenter(self.settings) as center:
            horizon = max(60, (rows.first_due - time.time_ns() // 1_000_000 + INDEXED_MS) // 1000)
            for topic in center.store.topics.list():  # the sweep reads as far as the longest of all
                center.store.topics.alter(topic.name, horizon=horizon)
            self.refill = _timed(self, lambda: {"rows": admin.refill(center).rows})
            """How long it took to fill the index with what is within the horizon, from rows on the disk."""

    def ask(self, statement: str) -> list[Any]:
        """Return the rows of a statement's answer."""
        with connect(self._url) as connection, connection.cursor() as cursor:
            cursor.execute("SET SESSION time_zone='+00:00'")
            cursor.execute(statement)
            return list(cursor.fetchall())

    def count(self, where: str) -> int:
        """Count rows of all tables."""
        counts = " UNION ALL ".join(f"SELECT COUNT(*) AS n FROM {name} WHERE {where}" for name in NAMES)
        return int(self.ask(f"SELECT SUM(n) FROM ({counts}) AS counts")[0][0])

    def database_seconds(self) -> float:
        """Return the processor time of MariaDB."""
        return processes.cpu_seconds(self.servers.pids()["mariadb"])

    def start(self) -> None:
        """Start two worker processes; wait until they have started tasks, and rest."""
        self.system.start(2)
        self.system.submit(1000, time.time_ns() + NS, 0, bits=TEXTS)
        settle(self.system, most=20)

    @contextmanager
    def pool(self, into: dict[str, Any]) -> Iterator[None]:
        """Add to the result what happens in the buffer pool meanwhile."""
        before, began = self._pool(), time.monotonic()
        yield
        asked, read = (after - earlier for after, earlier in zip(self._pool(), before, strict=True))
        into["hit_rate"] = 1 - read / max(asked, 1)
        into["pages_read"] = read
        into["pages_read_a_second"] = read / (time.monotonic() - began)

    def _pool(self) -> list[int]:
        found = dict(self.ask("SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_read%'"))
        return [int(found[f"Innodb_buffer_pool_{name}"]) for name in ("read_requests", "reads")]


@contextmanager
def measured(directory: Path, fresh: Path, pool: str) -> Iterator[Measured]:
    """Run the servers of a filled directory, from when what was in memory before is there again."""
    rows = filled(directory)
    assert rows is not None
    entry = next(each for each in ENTRIES if each.name == "toc")
    entry = replace(entry, environment={**entry.environment, "BENCH_TOPICS": str(TOPICS)})
    server = database(directory, pool).start()
    renew(server.url, fresh)
    with System(entry, server) as system:
        one = Measured(rows, system)
        status = "SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_load_status'"
        until = time.monotonic() + 120
        while one.ask(status)[0][1].startswith("Loading") and time.monotonic() < until:
            time.sleep(1)
        yield one


def lateness(one: Measured, seconds: int) -> dict[str, Any]:
    """Measure the lateness of new tasks, and the rate of their submit."""
    submits: dict[str, Any] = {}
    with one.pool(submits):
        due = one.system.submit_ahead(RATE * seconds, NS // RATE, bits=TEXTS)
    found = {"submits_a_second": one.system.rate, "pages_read_a_submit": submits["pages_read"] / len(due)}
    time.sleep(max(0, min(due.values()) - time.time_ns()) / NS)
    with one.pool(found):
        one.system.await_starts(due)
    return stats.lateness(due, one.system.started(due)) | found


def in_turn(few_rows: Measured, many_rows: Measured, turns: int, seconds: int) -> dict[str, Any]:
    """Measure the lateness of both, one after the other, each time with workers that have just started."""
    found: dict[str, list[dict[str, Any]]] = {"few": [], "many": []}
    both = [("few", few_rows), ("many", many_rows)]
    for turn in range(turns):
        for name, one in both if turn % 2 == 0 else reversed(both):
            one.start()
            found[name].append(lateness(one, seconds))
            one.system.stop()
            warn(f"  {name}: {json.dumps(found[name][-1])}")
    medians = {name: stats.medians(results) for name, results in found.items()}
    ratios = [many["p99"] / few["p99"] for few, many in zip(found["few"], found["many"], strict=True)]
    return {
        "ratios_of_p99": ratios,
        "median_ratio": statistics.median(ratios),
        "medians": medians,
        "turns": found,
    }


def burst(one: Measured) -> dict[str, Any]:
    """Run tasks that are due at one instant, to the end of the last."""
    due = one.system.submit_ahead(BURST, 0, bits=TEXTS)
    found: dict[str, Any] = {}
    at = next(iter(due.values()))
    with one.pool(found):
        one.system.await_starts(due, most=120)
        left = f"status={PENDING} AND next_time<={_instant(at // 1000)}"
        until = time.monotonic() + 60
        while one.count(left) and time.monotonic() < until:
            time.sleep(0.1)
        finished = time.time_ns()
    starts = [min(times) for times in one.system.started(due).values()]
    seconds = (finished - min(starts)) / NS
    return {"tasks": BURST, "lost": BURST - len(starts), "finished_a_second": BURST / seconds} | found


def passes(one: Measured) -> dict[str, Any]:
    """Time a round of each pass of the sweep, and the walk, both without their rests."""
    found: dict[str, Any] = {}
    with TimeoutCenter(one.settings) as center:
        center.catalog.refresh()
        sweep = Sweep(center.store, center.queues, center.catalog, center.clock)

        def round_of(each: Round) -> dict[str, Any]:
            each.start(time.monotonic(), range(TABLES))
            counts, steps = SweepCounts(), 0
            while each.left:
                counts, steps = counts.plus(each.step().counts), steps + 1
            return {"rows": counts.rows, "steps": steps}

        rounds = {
            name: Round(plan, sweep, time.monotonic())
            for name, plan in (("soon", SOON), ("overdue", OVERDUE), ("full", FULL))
        }
        _, due = one.system.submit(RATE * 10, time.time_ns() + 10 * NS, NS // RATE, bits=TEXTS)
        time.sleep(max(0, min(due.values()) - NS - time.time_ns()) / NS)
        for each in rounds.values():
            round_of(each)  # from then on it knows which tables hold rows
        for name, each in rounds.items():
            found[name] = _timed(one, partial(round_of, each))

        def walk() -> dict[str, Any]:
            counted = pages = 0
            now = time.time_ns() // 1_000_000
            for table in random.sample(range(TABLES), WALKED):
                at: Position | None = Position(now)
                while at is not None:
                    page = dict(center.store.due_counts.page({table: Place(at, now)}, FAR, ROWS))[table]
                    counted, pages, at = counted + sum(page.groups.values()), pages + 1, page.following
            return {"rows": counted, "steps": pages}

        found["walk"] = _timed(one, walk)
        found["walk"]["round_in_hours"] = found["walk"]["seconds"] * TABLES / WALKED / SHARE / 3600
    return found


def _timed(one: Measured, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    began, before = time.monotonic(), one.database_seconds()
    with one.pool(result):
        done = act()
    seconds = time.monotonic() - began
    return done | {"seconds": seconds, "database_cpu_seconds": one.database_seconds() - before} | result


def purge(one: Measured, seconds: int) -> dict[str, Any]:
    """Let rows have ended long ago; measure how fast they are deleted, and lateness. What is left is pending
    again."""
    ended = time.time_ns() // 1_000_000 - LONG_AGO_MS
    instant = _instant(1000 * ended)
    old = f"status={PROCESSED} AND next_time={instant}"
    some = NAMES[:PURGED_TABLES]
    for name in some:
        one.ask(
            f"UPDATE {name} SET status={PROCESSED},next_time={instant} WHERE status={PENDING} "
            f"ORDER BY job_id LIMIT {PURGED // PURGED_TABLES}"
        )
    one.start()
    before, began = one.count(old), time.monotonic()
    result = lateness(one, seconds)
    rate = (before - one.count(old)) / (time.monotonic() - began)
    one.system.stop()
    for name in some:
        one.ask(f"UPDATE {name} SET status={PENDING},next_time=action_time WHERE {old}")
    return {"deleted_a_second": rate, "lateness": result}


def backup(one: Measured, seconds: int) -> dict[str, Any]:
    """Dump a database into a pipe as long as lateness is measured, or to its end."""
    one.start()
    url = one.settings.database_urls[0]
    secret, _, address = url.partition("root:")[2].partition("@")
    host, _, port = address.partition(":")
    command = ["mariadb-dump", "--no-defaults", "--single-transaction", "--quick", f"-h{host}", f"-P{port}"]
    total = {"bytes": 0, "rows": 0}
    dump = subprocess.Popen(
        [*command, "-uroot", "toc_0"], stdout=subprocess.PIPE, env={**os.environ, "MYSQL_PWD": secret}
    )
    began = time.monotonic()
    ended: list[float] = []

    def read() -> None:
        assert dump.stdout is not None
        while data := dump.stdout.read(1 << 20):
            total["bytes"] += len(data)
            total["rows"] += data.count(b"\n(")
        ended.append(time.monotonic())

    reader = threading.Thread(target=read)
    reader.start()
    result = lateness(one, seconds)
    complete = bool(ended)
    dump.terminate()
    dump.wait()
    reader.join()
    took = ended[0] - began
    one.system.stop()
    rates = {f"{name}_a_second": count / took for name, count in total.items()}
    return {"seconds": took, "complete": complete, **rates, "lateness": result}


def old(one: Measured, seconds: int) -> dict[str, Any]:
    """Have rows from everywhere come due, which are in the index and on the disk, but not in memory."""
    due_ns = time.time_ns() // NS * NS + OLD_LEAD * NS
    count = RATE * seconds
    numbers = random.sample(range(one.rows.count // 4, one.rows.count), count)
    due = {number: due_ns + n * NS // RATE for n, number in enumerate(numbers)}
    tables: defaultdict[int, list[int]] = defaultdict(list)
    for number in numbers:
        tables[(one.rows.job_id(number) >> 12) % TABLES].append(number)
    for table, some in tables.items():
        ids = ",".join(str(one.rows.job_id(n)) for n in some)
        cases = " ".join(f"WHEN {one.rows.job_id(n)} THEN {due[n] // 1000}" for n in some)
        pending = f"status={PENDING} AND job_id IN ({ids})"
        there = {job_id for (job_id,) in one.ask(f"SELECT job_id FROM {NAMES[table]} WHERE {pending}")}
        one.ask(
            f"UPDATE {NAMES[table]} SET action_time={_instant(f'CASE job_id {cases} END')},"
            f"next_time=action_time WHERE {pending}"
        )
        for n in some:
            if one.rows.job_id(n) not in there:  # a former measurement has run it
                del due[n]
    with TimeoutCenter(one.settings) as center:
        admin.refill(center)
    one.servers.restart_database()
    one.system.start(2)
    if time.time_ns() > due_ns - 2 * NS:
        return {"left_out": f"the server was not ready within {OLD_LEAD} s"}
    found: dict[str, Any] = {}
    time.sleep((due_ns - time.time_ns()) / NS)
    with one.pool(found):
        one.system.await_starts(due)
    one.system.stop()
    return stats.lateness(due, one.system.started(due)) | found


def _instant(microseconds: int | str) -> str:
    return f"TIMESTAMP'1970-01-01 00:00:00'+INTERVAL {microseconds} MICROSECOND"


def sizes(one: Measured, directory: Path) -> dict[str, Any]:
    """Return what the rows take."""
    [(rows, indexes)] = one.ask(
        "SELECT SUM(data_length), SUM(index_length) FROM information_schema.tables "
        "WHERE table_name LIKE 'timeout\\_task\\_%'"
    )
    files = sum(path.stat().st_size for path in (directory / "mariadb" / "data").rglob("*.ibd"))
    each = {"bytes_of_a_row": float(rows) / one.rows.count, "of_its_indexes": float(indexes) / one.rows.count}
    return {"rows": one.rows.count, "table_files_gb": files / 1e9, **each}


def measure(directory: Path, what: list[str], turns: int, seconds: int, pool: str) -> dict[str, Any]:
    """Run what is wanted."""
    began = time.monotonic()
    found: dict[str, Any] = {"load": os.getloadavg(), "buffer_pool": pool}

    def done(name: str, result: Any) -> None:
        found[name] = result
        warn(f"[{time.monotonic() - began:4.0f} s] {json.dumps({name: result})}")

    beside = directory / "few"
    shutil.rmtree(beside, ignore_errors=True)
    fill(beside, FEW)
    with measured(directory, beside, pool) as many:
        done("size", sizes(many, directory))
        done("refill", many.refill)
        with measured(beside, beside, pool) as few:
            both = {"few": few, "many": many}
            if "lateness" in what:
                done("lateness", in_turn(few, many, turns, seconds))
            for name, act in (("burst", burst), ("rest", lambda one: idle(one.system))):
                if name in what:
                    results = {}
                    for which, one in both.items():
                        one.start()
                        results[which] = act(one)
                        one.system.stop()
                    done(name, results)
            if "passes" in what:
                done("passes", {name: passes(one) for name, one in both.items()})
        if "purge" in what:
            done("purge", purge(many, seconds))
        if "backup" in what:
            done("backup", backup(many, seconds))
        if "old" in what:
            done("old", old(many, seconds))
    shutil.rmtree(beside)
    return found | {"seconds": time.monotonic() - began, "load_at_the_end": os.getloadavg()}


def main() -> None:
    """Fill if needed, measure, and print JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rows")
    parser.add_argument("what", nargs="*", default=WHAT, metavar="WHAT", help=", ".join(WHAT))
    parser.add_argument("--directory", type=Path, required=True, help="on a disk; keeps the rows")
    parser.add_argument("--rows", type=float, default=1e8)
    parser.add_argument("--fill", action="store_true", help="only fill")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--pool", default="8G", help="of each MariaDB; less where memory is short")
    arguments = parser.parse_args()
    if unknown := set(arguments.what) - set(WHAT):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    directory = arguments.directory.absolute()
    if filled(directory) is None:
        fill(directory, int(arguments.rows))
    if not arguments.fill:
        result = measure(directory, arguments.what, arguments.turns, arguments.seconds, arguments.pool)
        json.dump(result, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
