"""What happened, as its witnesses wrote it down: calls, handler starts and ends, faults.

A directory of JSON lines; each process appends to a file of its own. A line is one write(2) made before the
handler goes on or the call returns, so it is in the page cache and survives the death of its process. A
thread syncs the file every few milliseconds for all lines written meanwhile: that bounds what the death of
the machine could take, at a cost that does not grow with the load. An acknowledgement counts only if its line
is there: a call whose line is missing counts as unknown, never as acknowledged.

    {"e": "start", "job": 17, "try": 1, "v": 0, "biz": 42, "wall": ns, "mono": ns, "pid": 9}
    {"e": "end", "job": 17, "out": "ok", ...}         ok, raise, dead (Dead raised), die (kills its process)
    {"e": "acked", "job": 17, "try": 1, ...}          a consumer's ack was answered, in time
    {"e": "invoke", "call": 3, "op": "submit", ...}   then ok, fail (nothing was done) or unknown
    {"e": "fault", "id": 1, "kind": "kill", "pids": [9], ...}  then fault_end with the same id
    {"e": "seen", "job": 17, "status": 2, "v": 0}     what a read showed

The start of what a consumer has pulled has ``until``: when its lease ends (ns of the wall clock).
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from sqlalchemy import Connection

from harness.rows import known
from toc import CancelOutcome, NewTask, RescheduleOutcome, Task, TimeoutCenter
from toc.model.clock import Duration, seconds_of, to_ms
from toc.model.errors import InvalidInput, NotInFuture, PartialSubmit, StoreUnavailable, SubmitUnknown
from toc.model.scores import store_score
from toc.model.task import TaskRow
from toc.operate import bulk_jobs as bulk

T = TypeVar("T")

SYNC_SECONDS = 0.01

FAULTS = {
    "kill": "processes ended at once (SIGKILL, forced stop, a crash); their pids must be told",
    "pause": "processes stopped (SIGSTOP), held entries may time out",
    "cut": "processes cut off from Redis or MySQL; no pids: all",
    "left": "a consumer left before its answer, or in the middle of it",
    "redis_loss": "a Redis node lost writes (failover, wipe, old snapshot)",
    "redis_down": "Redis out of reach, nothing lost",
    "store_down": "MySQL out of reach, slow or read-only",
    "zk_down": "ZooKeeper out of reach",
    "stop": "orderly stop (SIGTERM)",
    "move": "slots moved between workers",
    "clock": "a clock was shifted",
    "full": "a server's memory or disk was full",
    "other": "anything else",
}


class Event(NamedTuple):
    """Start or end of a handler, ``at`` in nanoseconds since 1970; ``outcome`` of ends only."""

    event: str
    job_id: int
    attempt: int
    at: int
    pid: int
    outcome: str = ""


class Fault:
    """A fault that has begun; ``end`` when its cause is gone. As a context manager it ends with the block."""

    def __init__(self, history: History, number: int) -> None:
        self._history = history
        self._number = number
        self._ended = False

    def end(self, *, pids: Sequence[int] = ()) -> None:
        """From now on everything can recover. May be called twice. ``pids`` that were not known before."""
        if not self._ended:
            self._ended = True
            self._history.write("fault_end", id=self._number, pids=list(pids))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class History:
    """Appends to this process's file of ``directory``. Thread-safe; a forked child opens its own file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._pid = 0
        self._file = -1
        self._number = 0
        self._dirty = threading.Event()
        self._closed = threading.Event()
        self._syncing: threading.Thread | None = None

    def write(self, event: str, **fields: object) -> None:
        """Append one event with the time and this process's id."""
        line = {"e": event, **fields, "wall": time.time_ns(), "mono": time.monotonic_ns(), "pid": os.getpid()}
        self._append(json.dumps(line))

    def started(self, task: Task) -> None:
        """A handler begins to run this task."""
        biz = task.biz_id if isinstance(task.biz_id, int) else json.dumps(task.biz_id)
        self._append(
            f'{{"e":"start","job":{task.job_id},"try":{task.attempt},"v":{task.version},"biz":{biz},'
            f'"wall":{time.time_ns()},"mono":{time.monotonic_ns()},"pid":{os.getpid()}}}'
        )

    def ended(self, task: Task, outcome: str) -> None:
        """A handler is about to return (ok), raise (raise), raise Dead (dead) or end its process (die)."""
        self._append(
            f'{{"e":"end","job":{task.job_id},"try":{task.attempt},"out":"{outcome}",'
            f'"wall":{time.time_ns()},"mono":{time.monotonic_ns()},"pid":{os.getpid()}}}'
        )

    def fault(self, kind: str, *, pids: Sequence[int] = (), note: str = "") -> Fault:
        """A fault begins; call this just before it is done. ``kind`` is one of FAULTS."""
        if kind not in FAULTS:
            raise ValueError(f"{kind!r} is not a kind of fault: {', '.join(FAULTS)}")
        number = self.number()
        self.write("fault", id=number, kind=kind, pids=list(pids), note=note)
        return Fault(self, number)

    def seen(self, row: TaskRow) -> None:
        """A read showed this row; what has ended must never change again."""
        self.write("seen", job=row.job_id, status=row.status, v=row.version)

    def number(self) -> int:
        """A number that this process has not used yet."""
        with self._lock:
            self._number += 1
            return self._number

    def close(self) -> None:
        """Sync and close. May be called twice; a later event opens another file."""
        self._closed.set()
        self._dirty.set()
        if self._syncing is not None and self._pid == os.getpid():
            self._syncing.join()
        with self._lock:
            if self._file >= 0:
                os.fsync(self._file)
                os.close(self._file)
            self._file, self._pid, self._syncing = -1, 0, None

    def _append(self, line: str) -> None:
        if self._pid != os.getpid():
            self._open()
        os.write(self._file, line.encode() + b"\n")
        if not self._dirty.is_set():
            self._dirty.set()

    def _open(self) -> None:
        with self._lock:
            if self._pid == os.getpid():
                return
            path = self.directory / f"{os.getpid()}-{secrets.token_hex(3)}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._closed.clear()
            self._syncing = threading.Thread(target=self._sync, name="history-sync", daemon=True)
            self._syncing.start()
            self._pid = os.getpid()

    def _sync(self) -> None:
        while not self._closed.is_set():
            self._dirty.wait()
            self._dirty.clear()  # before the sync: a line written during it wakes us again
            os.fdatasync(self._file)
            self._closed.wait(SYNC_SECONDS)


def lines(directory: Path) -> Iterator[dict[str, Any]]:
    """Every event, file by file, each file in its order. A line that is there in part as yet is left out."""
    loads = json.loads
    for path in sorted(directory.glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield loads(line)


class Reader:
    """Reads a history that goes on, again and again: each line once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}
        self._found: list[tuple[int, Event]] = []

    def events(self) -> list[Event]:
        """Starts and ends of handlers so far, in the order in which they happened."""
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]  # a line that is there in part as yet is left for later
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in map(json.loads, whole.splitlines()):
                if line["e"] in ("start", "end"):
                    what = line["e"], line["job"], line["try"], line["wall"], line["pid"], line.get("out", "")
                    self._found.append((line["mono"], Event(*what)))
        self._found.sort(key=lambda pair: pair[0])
        return [event for _, event in self._found]


class Client:
    """The calls of one application, each with its outcome in the history. Raises what the SDK raises."""

    def __init__(self, center: TimeoutCenter, history: History) -> None:
        self.center = center
        self.history = history

    def submit(
        self,
        topic: str,
        *,
        biz_id: int | str,
        delay: Duration | None = None,
        action_time: datetime | None = None,
        **more: Any,
    ) -> int:
        """As TimeoutCenter.submit."""
        if action_time is None:
            return _in_time(lambda: self.submit(topic, biz_id=biz_id, action_time=_instant(delay), **more))
        with self._recorded("submit", due=[to_ms(action_time)], biz=[biz_id]) as answer:
            job_id = self.center.submit(topic, biz_id=biz_id, action_time=action_time, **more)
            answer["jobs"] = [job_id]
        return job_id

    def submit_many(self, tasks: Iterable[NewTask]) -> list[int]:
        """As TimeoutCenter.submit_many."""
        tasks = list(tasks)
        return _in_time(lambda: self._submit_many(tasks))

    def _submit_many(self, tasks: Iterable[NewTask]) -> list[int]:
        dated = [
            task._replace(action_time=task.action_time or _instant(task.delay), delay=None) for task in tasks
        ]
        dues = [to_ms(task.action_time) for task in dated if task.action_time is not None]
        with self._recorded("submit", due=dues, biz=[task.biz_id for task in dated]) as answer:
            answer["jobs"] = self.center.submit_many(dated)
        return list(answer["jobs"])

    def cancel(self, job_id: int) -> CancelOutcome:
        """As TimeoutCenter.cancel. An error leaves it unknown whether the task is cancelled."""
        with self._recorded("cancel", job=job_id) as answer:
            outcome = self.center.cancel(job_id)
            answer["outcome"] = outcome.value
        return outcome

    @contextmanager
    def cancelled_with(self, connection: Connection, job_ids: Sequence[int]) -> Iterator[list[CancelOutcome]]:
        """Cancel tasks in the transaction of a connection, which the block commits. The list has their
        outcomes then."""
        with ExitStack() as stack:
            answers = [stack.enter_context(self._recorded("cancel", job=job_id)) for job_id in job_ids]
            changes = [self.center.cancel(job_id, connection=connection) for job_id in job_ids]
            outcomes: list[CancelOutcome] = []
            yield outcomes
            for answer, change in zip(answers, changes, strict=True):
                outcomes.append(change.outcome)
                answer["outcome"] = change.outcome.value

    def reschedule(self, job_id: int, *, action_time: datetime) -> RescheduleOutcome:
        """As TimeoutCenter.reschedule."""
        with self._recorded("reschedule", job=job_id, due=to_ms(action_time)) as answer:
            outcome = self.center.reschedule(job_id, action_time=action_time)
            answer["outcome"] = outcome.value
        return outcome

    def redrive(self, job_ids: Sequence[int]) -> list[int]:
        """Make dead tasks pending again, as an operator does; returns those that were dead."""
        center = self.center
        with self._recorded("redrive", jobs=list(job_ids)) as answer:
            rows = center.store.redrive(job_ids, center.clock.now_ms()).whole().values()
            answer["jobs"] = [row.job_id for row in rows]
        for row in rows:
            topic = known(center.catalog.of_type(row.biz_type))
            score = store_score(row.next_time, topic.retries, 0)
            center.queues.redrive({topic.slot(row.slot_crc, row.slot_amount): [(row.job_id, score)]})
        return [row.job_id for row in rows]

    def purge_dead(self, job_ids: Sequence[int]) -> None:
        """Remove dead tasks for good, as an operator does."""
        with self._recorded("purge", jobs=list(job_ids)):
            bulk.purge_dead(self.center, job_ids)

    @contextmanager
    def _recorded(self, op: str, **asked: object) -> Iterator[dict[str, Any]]:
        """One call, from before it is made until its outcome is written. Yields what its answer says.

        What was refused, or a submit that the store could not take, has done nothing. Of other errors nobody
        can tell.
        """
        call, answer = self.history.number(), dict[str, Any]()
        self.history.write("invoke", call=call, op=op, **asked)
        how = "ok"
        try:
            yield answer
        except BaseException as exc:
            nothing_done = InvalidInput if op != "submit" else (InvalidInput, StoreUnavailable)
            how = "fail" if isinstance(exc, nothing_done) else "unknown"
            answer["error"] = type(exc).__name__
            if isinstance(exc, PartialSubmit):
                how, answer["jobs"], answer["maybe"] = "ok", exc.job_ids, bool(exc.unknown)
            elif isinstance(exc, SubmitUnknown):
                answer["jobs"] = [exc.job_id]
            raise
        finally:
            self.history.write(how, call=call, **answer)


def _instant(delay: Duration | None) -> datetime:
    assert delay is not None
    return datetime.now(UTC) + timedelta(seconds=seconds_of(delay))


def _in_time(submit: Callable[[], T]) -> T:
    """Submit what is dated by its delay. A machine that halts until that has passed gets two more tries."""
    for _ in range(2):
        with suppress(NotInFuture):
            return submit()
    return submit()
