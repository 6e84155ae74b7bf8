"""Jobs whose ids are chosen by their callers, who keep them unique over all topics of a dialect. A push of an
id that is pending in its topic replaces that job.

A job is a task without a limit of tries; its biz_id is the caller's id. The attribute of the task keeps what
the caller gave: the id, the topic, the delay, and the ttr, which applies to every hand-out of the job.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

from toc.dialects.dialect_tasks import key_for, topic_for
from toc.dialects.port import Dialect
from toc.model.clock import from_ms, to_ms
from toc.model.errors import BodyGone, InvalidBizId
from toc.model.pull import PullRow
from toc.model.sharding import MAX_KEY_BYTES
from toc.model.task import UNLIMITED, DialectTask, NewTask, OnConflict, TaskRow, TaskStatus, decode_attribute
from toc.pull.handed_out import HandedOut

RETENTION_SECONDS = 86_400
SHORTEST_TTR_MS = 1000
NO_JOB = "its attribute is not that of a job"
KEY = "job"
"""What follows the dialect's name in the dedup_keys of jobs."""
CONTENT_TYPE = "text/plain; charset=utf-8"


_SAID = {"id": str, "topic": str, "delay": int, "ttr": int}
"""What the attribute of a job holds."""


class Job(NamedTuple):
    """A job as its caller pushed it. Durations are ms; ``due`` is when it is first due, in ms."""

    id: str
    topic: str
    delay: int
    ttr: int
    body: str
    due: int

    def task(self, dialect: str, prefix: str) -> NewTask:
        """Return it as the task of a dialect whose topics' names begin with ``prefix``."""
        body = self.body.encode()
        return DialectTask(
            topic_for(self.topic, prefix),
            key_for(self.id),
            action_time=from_ms(self.due),
            attribute={"id": self.id, "topic": self.topic, "delay": self.delay, "ttr": self.ttr},
            dedup_key=f"{dialect}:{KEY}",
            tries=UNLIMITED,
            body=body or None,
            content_type=CONTENT_TYPE if body else None,
            on_conflict=OnConflict.REPLACE,
        )


class JobDialect(Dialect):
    """A dialect of jobs; the names of their topics begin with ``prefix``."""

    prefix: ClassVar[str]

    def due(self, delay: int) -> int:
        """Return when a job is due that is pushed now (ms): never early."""
        return self.service.center.clock.now_ms() + 1 + delay

    async def push(self, job: Job) -> None:
        """Store a job, or replace the one of its id that is pending in its topic."""
        if len(job.id.encode()) > MAX_KEY_BYTES:
            raise InvalidBizId(f"an id may have {MAX_KEY_BYTES} bytes")
        task = job.task(self.name, self.prefix)
        await self.tasks.put(task)

    async def pop(self, topics: list[str], *, wait: float = 0.0) -> tuple[HandedOut, Job] | None:
        """Hand out the first job that is due, of the first of these topics that has any."""
        names = [topic_for(topic, self.prefix) for topic in topics]
        end = time.monotonic() + wait
        while got := await self.tasks.pull(names, _ttr, wait=max(end - time.monotonic(), 0.0)):
            for one, body in await self.tasks.bodies(got):
                job = _job(one.task.attribute, body, to_ms(one.task.action_time))
                if job is not None:
                    return one, job
                await self.service.pulls.bury([one], NO_JOB)
        return None

    async def finish(self, job_id: str) -> None:
        """End a job that was handed out since it was pushed."""
        for row in await self._pending(job_id):
            await self.tasks.end(row)

    async def delete(self, job_id: str) -> None:
        """End a job."""
        for row in await self._pending(job_id):
            await self.tasks.cancel(row)

    async def get(self, job_id: str) -> Job | None:
        """Return a job that has not ended. Raises UnreadableTask or StoreUnavailable."""
        while rows := await self._pending(job_id):
            row = rows[-1]
            with suppress(BodyGone):  # replaced between the two reads, or ended
                body = await self.tasks.body(row)
                return _job(decode_attribute(row.attribute), body, row.action_time)
        return None

    async def _pending(self, job_id: str) -> list[TaskRow]:
        if not job_id or len(job_id.encode()) > MAX_KEY_BYTES:
            return []
        rows = await self.tasks.find_own(key_for(job_id), f"{self.name}:{KEY}")
        return [row for row in rows if row.status == TaskStatus.PENDING]


def _job(said: Mapping[str, Any], body: bytes, due: int) -> Job | None:
    """Return the job of a task, None if its attribute tells none."""
    if {name: type(said.get(name)) for name in _SAID} != _SAID:
        return None
    return Job(said["id"], said["topic"], said["delay"], said["ttr"], body.decode(errors="replace"), due)


def _ttr(row: PullRow) -> int:
    """Return the ttr of a job; a short one if the row tells none."""
    with suppress(ValueError):
        ttr = decode_attribute(row.attribute).get("ttr")
        if type(ttr) is int:
            return max(ttr, 1)
    return SHORTEST_TTR_MS
