"""The tables of bulk jobs: a row for each job, and one for each PART of its tasks.

A gateway process that works on a job holds a lease on its row, by the server's clock, under a random number
of its own (``owner``). Only under that number does it write how far it came, so a process that was late
writes nothing over the work of the one that took over.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import Select, and_, delete, exists, insert, or_, select, update

from toc.model.bulk import PART, BulkJob, BulkKind, BulkOutcome, BulkState
from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.errors import UnknownBulk, shown
from toc.observe.log import get_logger
from toc.store.records.table import RecordTable
from toc.store.servers.server import Duplicate, Lost
from toc.store.servers.shards import Shards

log = get_logger(__name__)

LEASE_MS = 15_000
"""How long a process may be silent until another takes its jobs over."""
PARTS_TOGETHER = 50
"""How many parts one round trip writes: 200 kB."""
ORPHAN_MS = 3_600_000
"""How old parts are without a job that are deleted: a job's row is written after its parts."""
PURGED_TOGETHER = 20
"""Most jobs that one purge deletes: large ones have many parts."""
MAX_ERROR = 1000


class Part(NamedTuple):
    """Tasks of a job in the order of their turns, and the outcomes of the first of them (STORED)."""

    job_ids: Sequence[int]
    outcomes: bytes


class BulkTable(RecordTable):
    """The bulk jobs. Any method raises StoreUnavailable or SchemaBehind."""

    in_schema = "timeout_bulk"

    def __init__(self, shards: Shards, clock: Clock) -> None:
        super().__init__(shards, clock)
        self._parts = shards.first["timeout_bulk_part"]

    def add(self, job: BulkJob, job_ids: Sequence[int]) -> BulkJob:
        """Add a job with its tasks, and return it as written. It begins once all is."""
        now = self._clock.now_ms()
        rows = [
            insert(self._parts).values(
                name=job.name, part=first // PART, gmt_create=now, outcomes=b"",
                job_ids=struct.pack(f"<{len(some)}Q", *some),
            )
            for first in range(0, len(job_ids), PART)
            if (some := job_ids[first : first + PART])
        ]  # fmt: skip
        for first in range(0, len(rows), PARTS_TOGETHER):
            together = [self._compiled(row) for row in rows[first : first + PARTS_TOGETHER]]
            self._server.run(together, transaction=True, again=False)
        row = insert(self._table).values(
            name=job.name, kind=job.kind.value, topic=job.topic, details=json.dumps(dict(job.details)),
            created_by=job.by, rate=job.rate, tasks=job.tasks, state=job.state.value, done=0, counts="{}",
            error="", gmt_create=now, gmt_modified=now,
        )  # fmt: skip
        try:
            self._write(row)
        except (Duplicate, Lost):
            if not self._rows(select(self._column.name).where(self._column.name == job.name)):
                raise
        return replace(job, created=now)

    def list(self, limit: int) -> list[BulkJob]:
        """Return the latest jobs, the newest first."""
        newest = self._column.gmt_create.desc(), self._column.name
        return list(self._jobs(self._select().order_by(*newest).limit(limit)))

    def get(self, name: str) -> BulkJob:
        """Return one. Raises UnknownBulk."""
        for job in self._jobs(self._select().where(self._column.name == name)):
            if job.name == name:  # MySQL takes one with a trailing space for the same
                return job
        raise UnknownBulk(f"there is no such bulk job: {shown(name)}")

    def part(self, name: str, number: int) -> Part:
        """Return one part of a job's tasks."""
        column = self._parts.c
        where = and_(column.name == name, column.part == number)
        for job_ids, outcomes in self._rows(select(column.job_ids, column.outcomes).where(where)):
            return Part(struct.unpack(f"<{len(job_ids) // 8}Q", job_ids), bytes(outcomes))
        return Part((), b"")

    # --- by operators

    def move(self, name: str, before: BulkState, after: BulkState) -> bool:
        """Stop or resume a job. False if it is not in the state ``before``."""
        where = self._column.name == name, self._column.state == before.value
        return self._change(*where, state=after.value, error="", gmt_modified=self._clock.now_ms()) == 1

    # --- by processes that work on them

    def claim(self, owner: int, only: str | None = None) -> Sequence[str]:
        """Claim the running jobs that nobody works on, or ``only`` that one. Returns their names."""
        column = self._column
        free = and_(
            column.state == BulkState.RUNNING.value,
            or_(column.lease_until.is_(None), column.lease_until < self._from_now(0)),
        )
        if only is not None:
            free = and_(column.name == only, free)
        found = [str(name) for (name,) in self._rows(select(column.name).where(free))]
        values = {"owner": owner, "lease_until": self._from_now(LEASE_MS)}
        return [name for name in found if self._change(column.name == name, free, **values) == 1]

    def save(
        self, job: BulkJob, owner: int, *, error: str | None = None, part: tuple[int, bytes] | None = None,
        state: BulkState | None = None,
    ) -> BulkState | None:  # fmt: skip
        """Write how far a claimed job came, with the outcomes of a ``part``, and keep its lease.

        ``error``: None leaves what there is.

        With a ``state`` the job ends so and is let go. Returns its state, which an operator may have
        changed; None if the lease has gone to another process: then nothing was written.
        """
        column, now = self._column, self._clock.now_ms()
        ours = and_(column.name == job.name, column.owner == owner)
        values: dict[str, Any] = {"done": job.done, "counts": json.dumps(dict(job.counts))}
        values |= {"gmt_modified": now, "lease_until": self._from_now(LEASE_MS)}
        values |= {} if error is None else {"error": error[:MAX_ERROR]}
        if state is not None:
            values |= {"state": state.value, "lease_until": self._from_now(0)}
            values |= {"ended": now} if state is BulkState.DONE else {}
        statements = [update(self._table).where(ours).values(values)]
        if part is not None:
            these = and_(self._parts.c.name == job.name, self._parts.c.part == part[0], exists().where(ours))
            statements.append(update(self._parts).where(these).values(outcomes=part[1]))
        compiled = [*map(self._compiled, statements), self._compiled(select(column.state).where(ours))]
        rows = self._server.run(compiled, transaction=True)[-1].rows
        return BulkState(rows[0][0]) if rows else None

    def let_go(self, name: str, owner: int) -> None:
        """Give a claimed job back, for others to claim at once."""
        self._change(self._column.name == name, self._column.owner == owner, owner=None, lease_until=None)

    def purge(self, keep: int) -> bool:
        """Delete jobs that were done or stopped more than ``keep`` ms ago, then parts without a job. Returns
        whether more may be left."""
        column, parts = self._column, self._parts.c
        old = and_(column.state != BulkState.RUNNING.value, column.gmt_modified < self._from_now(-keep))
        names = [name for (name,) in self._rows(select(column.name).where(old).limit(PURGED_TOGETHER))]
        if names:
            self._write(delete(self._table).where(column.name.in_(names)))
        old = parts.gmt_create < self._from_now(-ORPHAN_MS)
        orphan = and_(old, ~exists().where(column.name == parts.name))
        for (name,) in self._rows(select(parts.name).where(orphan).distinct().limit(PURGED_TOGETHER)):
            self._write(delete(self._parts).where(parts.name == name))
        return len(names) == PURGED_TOGETHER

    def _select(self) -> Select[Any]:
        return select(self._table, self._column.lease_until > self._from_now(0))

    def _jobs(self, wanted: Select[Any]) -> Iterator[BulkJob]:
        for *values, held in self._rows(wanted):
            row = dict(zip(self._column.keys(), values, strict=True))
            try:
                counts = {BulkOutcome(k).value: int(n) for k, n in parse_object(row["counts"]).items()}
                yield BulkJob(
                    row["name"], BulkKind(row["kind"]), row["topic"], parse_object(row["details"]),
                    row["created_by"], float(row["rate"]), int(row["tasks"]), BulkState(row["state"]),
                    int(row["done"]), counts, row["error"], bool(held), row["gmt_create"], row["ended"],
                )  # fmt: skip
            except (ValueError, TypeError) as exc:  # of a later version, or edited by hand
                log.warning("bulk_not_understood", name=row["name"], error=str(exc))
