"""A whole system on real servers: its settings, its daemons, its history."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.local import MariaDB, RedisCluster, RedisServer
from harness import forks
from harness.checker import Limits, Verdict, check
from harness.final import read_final
from harness.history import Client, Event, History, Reader
from harness.patience import PATIENCE, pause
from harness.schema import make_tables
from harness.sessions import kill_session
from toc import Settings, TimeoutCenter, Topic
from toc.index.messages import Generation, Peek
from toc.model.errors import IndexUnavailable
from toc.model.task import TaskRow, TaskStatus
from toc.model.topic import Slot

Process = forks.Forked | subprocess.Popen[bytes]
TOPICS = ("test.sync", "test.async", "test.batch", "test.doomed")

T = TypeVar("T")


def buried(center: TimeoutCenter, slots: Iterable[Slot]) -> set[int]:
    """The job_ids in the DeadQueues of these slots, which can all be asked."""
    pages = center.queues.ids("dead", dict.fromkeys(slots, 0), 10_000).values()
    assert not any(isinstance(page, IndexUnavailable) for page in pages)
    return {job_id for page in pages if not isinstance(page, IndexUnavailable) for job_id in page}


class DaemonProcess:
    """One ``toc worker`` with its worker processes, as a host of the cluster.

    ``output``: what takes the place of its log, as a stream of harness.forks. ``whole``: its worker processes
    have interpreters of their own, as in production, which takes longer. ``gateway``: the port of the ``toc
    gateway`` that it is instead.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        env: Mapping[str, str],
        *,
        app: str | None,
        processes: int,
        threads: int,
        output: str | None = None,
        whole: bool = False,
        webhooks: bool = False,
        gateway: int | None = None,
    ) -> None:
        self.host = host
        self.log = directory / f"{host}.log"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0  # a host may be started again
        served = [*(["--app", app] if app else []), *(["--webhooks"] if webhooks else [])]
        words = ["worker", *served, "--processes", str(processes), "--threads", str(threads)]
        if gateway is not None:
            words = ["gateway", "--port", str(gateway)]
        env = {**env, "TOC_HOST": host}
        self.process = forks.start_daemon(words, env=env, log=self.log, output=output, whole=whole)

    def told(self) -> str:
        """What this start of the daemon has logged."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")  # the last character may still be written

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of this name that this start of the daemon, and its processes, have logged."""
        whole, _, _ = self.told().rpartition("\n")  # the last line may still be written
        lines = [json.loads(line) for line in whole.split("\n") if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def workers(self) -> list[int]:
        """The pids of its worker processes that live."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split() if not forks.helps(int(pid))]

    def kill(self) -> list[int]:
        """kill -9 of the daemon and all its processes; returns the pids of the workers."""
        workers = self.workers()
        kill_session(self.process.pid)
        self.process.wait()
        return workers

    def terminate(self) -> None:
        """SIGTERM to the daemon."""
        self.process.terminate()

    def await_end(self) -> None:
        """Wait until it has left; one that does not is killed."""
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            kill_session(self.process.pid)
            self.process.wait()

    def stop(self) -> None:
        """End whatever is left."""
        if self.process.poll() is None:
            self.process.terminate()
            self.await_end()


class Lateness(list[float]):
    """By how many milliseconds tasks started late, sorted. Of none, nothing can be asked."""

    def __init__(self, late: Iterable[float]) -> None:
        super().__init__(sorted(late))

    def __str__(self) -> str:
        if not self:
            return "no tasks"
        return f"{len(self)} tasks, p50 {self.p50:.1f}, p99 {self.p99:.1f}, most {self.most:.1f} ms late"

    @property
    def p50(self) -> float:
        return self[len(self) // 2]

    @property
    def p99(self) -> float:
        """What a hundredth of them exceed."""
        return self[len(self) * 99 // 100]

    @property
    def most(self) -> float:
        return self[-1]


class System:
    """Settings, schema, topics and daemons over servers that run already."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        self.history_directory = directory / "history"
        self.history_directory.mkdir()
        self.settings = Settings(**settings)
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TOC_")},
            **{f"TOC_{name.upper()}": _text(value) for name, value in settings.items()},
            "TOC_TEST_HISTORY": str(self.history_directory),
            "PYTHONPATH": str(Path(__file__).parent.parent),
        }
        make_tables(self.settings)
        self.center = TimeoutCenter(self.settings)
        self.center.store.identity.get()  # as `toc db upgrade` does: it says whether there is an index
        self._reader = Reader(self.history_directory)
        self.recorder = History(self.history_directory)
        """Where tests declare the faults that they do."""
        self.client = Client(self.center, self.recorder)
        """The SDK, its calls recorded. A test that asks for a verdict must make all its calls through it."""
        self.daemons: list[DaemonProcess] = []

    def create_topics(self, *, slots: int = 8, **policies: object) -> None:
        """The topics of the test app, with these policies."""
        for biz_type, name in enumerate(TOPICS, start=1):
            self.center.store.topics.create(Topic(name, biz_type, slots, **policies))  # type: ignore[arg-type]
        self.center.catalog.refresh()  # else the first call has two seconds for that, on whatever machine

    def start(
        self,
        host: str = "host-a",
        *,
        processes: int = 2,
        threads: int = 4,
        env: Mapping[str, str] | None = None,
        app: str | None = "harness.app:center",
        whole: bool = False,
        webhooks: bool = False,
    ) -> DaemonProcess:
        """Start a daemon, with these variables besides, and wait until its processes are ready."""
        daemon = DaemonProcess(
            self.directory,
            host,
            {**self.env, **(env or {})},
            app=app,
            processes=processes,
            threads=threads,
            whole=whole,
            webhooks=webhooks,
        )
        self.daemons.append(daemon)
        self.wait(
            lambda: daemon.told().count("worker_ready") >= processes or daemon.process.poll() is not None,
            f"{host} is ready",
            60,
        )
        assert daemon.process.poll() is None, daemon.log.read_text()
        return daemon

    def history(self) -> list[Event]:
        """Every start and end so far, in the order in which they happened."""
        return self._reader.events()

    def verdict(self, **limits: float | None) -> Verdict:
        """What the checker says of all that happened; ``limits`` as in harness.checker.Limits.

        An entry leaves its PrepareQueue in the moment after its row was written, and gets that moment.
        """
        until = time.monotonic() + 1.0
        while any(peek.prepared for peek in self.peeks()) and time.monotonic() < until:
            time.sleep(0.02)
        return check(self.history_directory, read_final(self.center), Limits(**limits))  # type: ignore[arg-type]

    def slots(self) -> list[Slot]:
        """Those of all topics."""
        return [slot for topic in self.center.store.topics.list() for slot in topic.slots()]

    def peeks(self, topic: str | None = None) -> list[Peek]:
        """What stands in the queues of all slots, or of a topic's, as far as they can be asked."""
        slots = self.slots() if topic is None else self.center.catalog.get(topic).slots()
        return [peek for peek in self.center.queues.peek(slots).values() if isinstance(peek, Peek)]

    def row(self, job_id: int) -> TaskRow:
        """The row of a task that there is."""
        row = self.center.store.get(job_id)
        assert row is not None, f"no row has the id {job_id}"
        return row

    def pending(self, job_ids: Collection[int]) -> list[int]:
        """Those of the tasks that have not ended yet."""
        rows = self.center.store.read_tries(job_ids).whole()
        return [job_id for job_id, row in rows.items() if row.status == TaskStatus.PENDING]

    def not_run_once(self, job_ids: Iterable[int]) -> dict[int, int]:
        """Those of the tasks whose handler started never or more than once, with how often."""
        counts = Counter(event.job_id for event in self.history() if event.event == "start")
        return {job_id: counts[job_id] for job_id in job_ids if counts[job_id] != 1}

    def starts(self, job_id: int) -> list[Event]:
        """The starts of one task's handler."""
        return [event for event in self.history() if event.job_id == job_id and event.event == "start"]

    def late(
        self, job_ids: Collection[int] | None = None, since: float = 0.0, before: float = inf
    ) -> Lateness:
        """How late those of these tasks, or of all, started that have run and were due between two instants
        (seconds since 1970)."""
        first: dict[int, int] = {}
        for event in self.history():
            if event.event == "start":
                first.setdefault(event.job_id, event.at)
        rows = read_final(self.center).rows if job_ids is None else self.center.store.read(job_ids).values()
        return Lateness(
            first[row.job_id] / 1e6 - row.action_time
            for row in rows
            if row.job_id in first and since * 1000 <= row.action_time < before * 1000
        )

    def wait(self, condition: Callable[[], T], what: str, seconds: float) -> T:
        """Wait until the condition holds, and return what it gave; fails with the daemons' logs otherwise.

        ``seconds`` is what it takes at the most where nothing else runs; a busy machine gets more. A test of
        how long something takes measures it.
        """
        seconds = max(seconds, PATIENCE)
        start = asked = time.monotonic()
        until = start + seconds
        while not (value := condition()):
            now = time.monotonic()
            if now > until:
                raise AssertionError(f"not within {seconds} s: {what}\n{self.logs()}")
            pause(now - asked, now - start)
            asked = time.monotonic()
        return value

    def whole(self) -> bool:
        """Whether every slot is recorded as built on the server that serves it."""
        found = self.center.queues.generations(self.slots()).values()
        return all(isinstance(one, Generation) and one.recorded == one.serving for one in found)

    def logs(self) -> str:
        """The last lines that the daemons wrote."""
        return "\n".join(
            f"--- {daemon.host}\n"
            + "\n".join(line[-900:] for line in daemon.log.read_text().splitlines()[-15:])
            for daemon in self.daemons
        )

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every daemon, all at once, and close every connection."""
        left = [daemon for daemon in self.daemons if daemon.process.poll() is None]
        for daemon in left:
            daemon.terminate()
        for daemon in left:
            daemon.await_end()
        self.recorder.close()
        self.center.close()


def _text(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


class NewSystem(Protocol):
    """Makes the system of a test, with these settings besides those of the fixture."""

    def __call__(self, **settings: object) -> System: ...


def small_system(
    directory: Path,
    redis: RedisServer | RedisCluster | None,
    mariadb: MariaDB,
    prefix: str,
    **settings: object,
) -> System:
    """A system on one Redis, or none, and two databases with eight tables, unless told otherwise. Stop it."""
    given = {
        "database_urls": [mariadb.url],
        "databases": 2,
        "tables": 8,
        "database_prefix": prefix,
        **({} if redis is None else {"redis_url": redis.url}),
        **settings,
    }
    return System(directory, **given)
