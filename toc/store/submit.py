"""Inserts rows: handles dedup keys, job_id clashes, and commits with an unknown outcome.

One rule settles an ambiguous commit: send the same rows again. A chunk is one transaction, so either all its
rows are there (each clash is with an equal row: it was stored) or none (the second send stores it).

No lock on a gap outlives its statement, because it would block every insert into that gap. Before a row is
inserted, its dedup_key is looked up by the whole key at READ COMMITTED. This locks, and waits for, only the
row with that key. (At REPEATABLE READ, a locking read that finds nothing locks the gap before the next row
until the transaction ends. An INSERT that meets a duplicate does so at any level. InnoDB's rules are the same
in MySQL 8.) One case still locks a gap: an INSERT that meets a key which came between look-up and INSERT.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from toc.model.body import NO_BODIES, Contents
from toc.model.errors import (
    DedupConflict,
    PartialSubmit,
    SchemaBehind,
    StoreUnavailable,
    SubmitUnknown,
    TocError,
)
from toc.model.sharding import JobIds
from toc.model.task import TaskRow
from toc.observe.log import get_logger
from toc.store import bodies
from toc.store import rows as sql
from toc.store.outcomes import alone, note_away, unwritable
from toc.store.same_task import WholeKey, equal, job_id_or_conflict, same_task, twins_of, whole_key
from toc.store.server import DatabaseServer, Duplicate, Locked, Lost, Refused, Statement, Transient
from toc.store.shards import Shards
from toc.store.threads import Threads

log = get_logger(__name__)

CHUNK_ROWS = 1000
CHUNK_BYTES = 1_000_000
HEX = 2
"""Bytes of SQL for each byte of a body."""
ROW_BYTES = 300
"""Approximate bytes of a row in SQL without its attribute."""
REPEATS = 7
RESEND_SECONDS = 5.0
"""Seconds to retry an ambiguous commit before SubmitUnknown; at least one more try is made."""

OVERLAP = 3
"""Chunks of one call in progress at once: the SQL of the next is written while the server works on one."""
THREADS = 8
"""Chunks of all calls in progress at once."""

Then = Callable[[Sequence[TaskRow], Sequence[int]], None]
"""Callback for rows that are stored under these job_ids."""


class _Ambiguous(Exception):
    """Some rows may or may not be stored. ``unknown``: their job_ids by position; ``done``: the job_ids of
    the others, which are stored."""

    def __init__(self, unknown: dict[int, int], done: dict[int, int]) -> None:
        super().__init__(unknown)
        self.unknown = unknown
        self.done = done
        self.job_ids = list(unknown.values())


class Submitter:
    """Inserts rows into the tables that their job_ids name. Thread-safe."""

    def __init__(self, shards: Shards, job_ids: JobIds) -> None:
        self._shards = shards
        self._job_ids = job_ids
        self._threads = Threads(THREADS, "toc-submit")

    def close(self) -> None:
        """End the threads. May be called twice; the object stays usable."""
        self._threads.close()

    def insert(self, row: TaskRow, contents: Contents = NO_BODIES) -> int:
        """Store and commit a row, with its body if it names one, in one round trip. Returns its job_id.

        That is ``row.job_id``, a new one if that was taken, or that of the first task with this dedup_key.
        Raises DedupConflict, SubmitUnknown (the connection broke at commit and stayed broken).
        """
        server = self._shards.server_of[self._shards.table_of(row.job_id)]
        try:
            return self._store(server, [row], contents)[0]
        except _Ambiguous as exc:
            raise SubmitUnknown(exc.job_ids[0]) from exc.__cause__

    def insert_each(
        self, rows: Sequence[TaskRow], contents: Contents = NO_BODIES
    ) -> list[int | TocError | None]:
        """Store rows of different callers, all of one server, in one transaction. Returns each one's outcome.

        An outcome is the job_id or the error. None: certainly not stored, because of another row or because
        it may have to wait for another transaction; ``insert`` it by itself.
        """
        if len(rows) == 1:
            return [self.insert_alone(rows[0], contents)]
        outcomes: list[int | TocError | None] = [None] * len(rows)
        server = self._shards.server_of[self._shards.table_of(rows[0].job_id)]
        todo, twins = self._sort_out(server, rows, outcomes)
        if todo:
            self._insert_together(server, {index: rows[index] for index in todo}, contents, outcomes)
        for index, first in twins.items():
            outcome = outcomes[first]
            if isinstance(outcome, int):
                outcomes[index] = job_id_or_conflict(rows[index], rows[first], outcome)
            elif not isinstance(outcome, DedupConflict):  # which need not be this row's
                outcomes[index] = outcome
        return outcomes

    def _sort_out(
        self, server: DatabaseServer, rows: Sequence[TaskRow], outcomes: list[int | TocError | None]
    ) -> tuple[list[int], dict[int, int]]:
        """Decide what needs no insert. Returns the rows to insert, and which repeat another's dedup_key."""
        twins = twins_of(rows)
        todo = [index for index in range(len(rows)) if index not in twins]
        refused = unwritable(self._shards, server, [rows[index] for index in todo])
        for index, error in zip(todo, refused, strict=True):
            outcomes[index] = error
        todo = [index for index in todo if outcomes[index] is None]
        keyed = self._keyed(rows[index] for index in todo)
        if keyed:
            # Without waiting: another program may keep a transaction open in which it has inserted the key.
            looks = self._looks(server, keyed, wait=False)
            try:
                found = {whole_key(row): row for row in sql.task_rows(server.run(looks, outwait=False))}
            except Locked:
                return [index for index in todo if rows[index].dedup_key is None], twins
            except (StoreUnavailable, SchemaBehind) as exc:
                note_away(self._shards, server, exc)
                for index in todo:
                    outcomes[index] = None if isinstance(exc, (Transient, Refused, SchemaBehind)) else exc
                return [], twins
            for index in todo:
                other = found.get(whole_key(rows[index])) if rows[index].dedup_key is not None else None
                if other is not None:
                    outcomes[index] = job_id_or_conflict(rows[index], other, other.job_id)
        return [index for index in todo if outcomes[index] is None], twins

    def _insert_together(
        self,
        server: DatabaseServer,
        rows: dict[int, TaskRow],
        contents: Contents,
        outcomes: list[int | TocError | None],
    ) -> None:
        part = list(rows.values())
        try:
            stored: Sequence[int | TocError | None] = self._store(server, part, contents)
        except _Ambiguous as exc:
            stored = [
                exc.done[n] if n in exc.done else SubmitUnknown(exc.unknown[n]) for n in range(len(part))
            ]
            note_away(self._shards, server, exc.__cause__)
        except (Locked, Refused):
            stored = unwritable(self._shards, server, part, find=True)
        except (Transient, SchemaBehind, DedupConflict):  # of one of them; nothing is stored
            stored = [None] * len(part)
        except StoreUnavailable as exc:
            note_away(self._shards, server, exc)
            stored = [exc] * len(part)
        for index, outcome in zip(rows, stored, strict=True):
            outcomes[index] = outcome

    def insert_alone(self, row: TaskRow, contents: Contents = NO_BODIES) -> int | TocError:
        """Store one row. Returns its job_id or its error; does not wait for a server known to be away."""
        return alone(self._shards, row, lambda: self.insert(row, contents))

    def insert_many(
        self,
        rows: Sequence[TaskRow],
        then: Then = lambda _rows, _job_ids: None,
        contents: Contents = NO_BODIES,
    ) -> list[int]:
        """Store rows, in chunks of up to 1,000 (less with bodies) per transaction and round trip. Returns
        job_ids in order.

        ``then`` gets the rows of each chunk and their job_ids, perhaps on another thread, while the next
        chunk is being sent. It gets no rows whose dedup_key was stored before. Raises DedupConflict before
        anything is written; PartialSubmit when a server failed after some were.
        """
        same_as = twins_of(rows)
        for index, earlier in same_as.items():
            same_task(rows[index], rows[earlier], stored=False)
        stored: dict[int, int] = {}
        self._find_stored([index for index in range(len(rows)) if index not in same_as], rows, stored)
        todo = [index for index in range(len(rows)) if index not in same_as and index not in stored]
        written = False
        unknown: list[int] = []
        cause: Exception | None = None
        for chunk, outcome in self._overlapped(list(self._chunks(todo, rows)), rows, then, contents):
            if isinstance(outcome, list):
                stored.update(zip(chunk, outcome, strict=True))
                written = True
            elif isinstance(outcome, _Ambiguous):
                unknown += outcome.job_ids
            cause = cause or (None if isinstance(outcome, list) else outcome)
        if cause is not None and not written and not unknown:
            raise cause
        for index, first in same_as.items():
            if first in stored:
                stored[index] = stored[first]
        if cause is not None:
            raise PartialSubmit([stored.get(index) for index in range(len(rows))], unknown) from cause
        return [stored[index] for index in range(len(rows))]

    def _overlapped(
        self,
        chunks: Sequence[tuple[DatabaseServer, list[int]]],
        rows: Sequence[TaskRow],
        then: Then,
        contents: Contents,
    ) -> Iterator[tuple[list[int], list[int] | Exception]]:
        """Store chunks, a few at a time: one's SQL is written while servers work on the others.

        Yields each with its job_ids, or with its error, after which no other is begun.
        """

        def store(server: DatabaseServer, chunk: list[int]) -> list[int]:
            ours = [rows[index] for index in chunk]
            job_ids = self._store(server, ours, contents)
            try:
                then(ours, job_ids)
            except TocError as exc:  # they are stored, whatever becomes of the index
                log.warning("submit_not_indexed", tasks=len(ours), error=str(exc))
            return job_ids

        def outcome(of: Callable[[], list[int]]) -> list[int] | Exception:
            try:
                return of()
            except (_Ambiguous, StoreUnavailable, SchemaBehind, DedupConflict) as exc:
                return exc

        if len(chunks) == 1:
            server, chunk = chunks[0]
            yield chunk, outcome(lambda: store(server, chunk))
            return
        waiting = deque(chunks)
        running: deque[tuple[list[int], Callable[[], list[int]]]] = deque()
        while waiting or running:
            while waiting and len(running) < OVERLAP:
                server, chunk = waiting.popleft()
                running.append((chunk, self._threads.begin(partial(store, server, chunk))))
            chunk, end = running.popleft()
            result = outcome(end)
            if not isinstance(result, list):
                waiting.clear()
            yield chunk, result

    def _find_stored(self, indexes: Iterable[int], rows: Sequence[TaskRow], stored: dict[int, int]) -> None:
        """Record the dedup_keys that are stored already: a conflict is known before anything is written."""
        keyed = [index for index in indexes if rows[index].dedup_key is not None]
        by_table = self._keyed(rows[index] for index in keyed)
        found: dict[WholeKey, TaskRow] = {}
        for server, part in self._shards.group_tables(by_table).items():
            found.update(self._by_dedup(server, part))
        for index in keyed:
            other = found.get(whole_key(rows[index]))
            if other is not None:
                stored[index] = same_task(rows[index], other)

    def _chunks(
        self, indexes: Iterable[int], rows: Sequence[TaskRow]
    ) -> Iterator[tuple[DatabaseServer, list[int]]]:
        """Split the rows by server into chunks of bounded size, sorted by table and job_id."""
        by_server: dict[DatabaseServer, list[tuple[int, int, int]]] = {}
        for index in indexes:
            table = self._shards.table_of(rows[index].job_id)
            by_server.setdefault(self._shards.server_of[table], []).append((table, rows[index].job_id, index))
        for server, entries in by_server.items():
            entries.sort()
            chunk: list[int] = []
            size = 0
            for _table, _job_id, index in entries:
                more = ROW_BYTES + len(rows[index].attribute) + HEX * (rows[index].body_length or 0)
                if chunk and (len(chunk) == CHUNK_ROWS or size + more > CHUNK_BYTES):
                    yield server, chunk
                    chunk, size = [], 0
                chunk.append(index)
                size += more
            yield server, chunk

    def _store(self, server: DatabaseServer, rows: Sequence[TaskRow], contents: Contents) -> list[int]:
        """Store rows of one server, and their bodies, in one transaction. Returns their job_ids.

        Raises DedupConflict or StoreUnavailable if none is stored, _Ambiguous if that is unknown.
        """
        todo = dict(enumerate(rows))
        done: dict[int, int] = {}
        sent = False
        deadline = time.monotonic() + RESEND_SECONDS
        cause: Exception | None = None
        for attempt in range(REPEATS):
            if attempt:
                if attempt > 1 and time.monotonic() > deadline:
                    break
                time.sleep(0 if isinstance(cause, Duplicate) else 0.025 * 2**attempt)
            try:
                statements = self._inserts(todo.values(), contents)
                many = len(statements) > 1
                if len(rows) == 1:  # for many, the keys were looked up before
                    statements = [*self._looks(server, self._keyed(rows)), *statements]
                server.run(statements, transaction=many, again=False)
                done.update({index: row.job_id for index, row in todo.items()})
                todo = {}
            except Lost as exc:
                sent, cause = True, exc
            except Duplicate as exc:
                cause = exc
                try:
                    todo = self._after_duplicate(server, todo, done, sent=sent)
                except StoreUnavailable:
                    if not sent:
                        raise
            except StoreUnavailable as exc:
                if not sent:
                    raise
                cause = exc
            if not todo:
                return [done[index] for index in range(len(rows))]
        if sent:
            raise _Ambiguous({index: row.job_id for index, row in todo.items()}, done) from cause
        raise StoreUnavailable(f"{server.name}: no free job_id was found; try again") from cause

    def _inserts(self, rows: Iterable[TaskRow], contents: Contents) -> list[Statement]:
        by_table: dict[int, list[TaskRow]] = {}
        for row in rows:
            by_table.setdefault(self._shards.table_of(row.job_id), []).append(row)
        names, servers = self._shards.names, self._shards.server_of
        statements = [sql.insert(servers[table], names[table], by_table[table]) for table in sorted(by_table)]
        for table in sorted(by_table) if contents else ():
            statements += bodies.insert(self._shards.body_names[table], by_table[table], contents)
        return statements

    def _after_duplicate(
        self, server: DatabaseServer, todo: dict[int, TaskRow], done: dict[int, int], *, sent: bool
    ) -> dict[int, TaskRow]:
        """Handle a duplicate key: add stored rows to ``done``, return those that remain.

        Gives new ids to rows whose ids are taken. Raises DedupConflict.
        """
        ids = self._shards.group(row.job_id for row in todo.values())[server]
        by_id = {
            row.job_id: row
            for row in sql.task_rows(
                server.run(sql.select_by_id(server, sql.columns(server), self._shards.names, ids))
            )
        }
        by_key = self._by_dedup(server, self._keyed(todo.values()))
        remaining: dict[int, TaskRow] = {}
        taken = set(by_id)
        for index, row in todo.items():
            other = by_key.get(whole_key(row)) if row.dedup_key is not None else None
            if other is not None:
                done[index] = same_task(row, other)
            elif sent and row.job_id in by_id and equal(row, by_id[row.job_id]):  # [rule: resend]
                done[index] = row.job_id
            elif row.job_id in taken:
                remaining[index] = self.renamed(row)
            else:
                remaining[index] = row
            taken.add(row.job_id)
        return remaining

    def renamed(self, row: TaskRow) -> TaskRow:
        """Return a row with another job_id."""
        return row._replace(job_id=self._job_ids.another(row.job_id))

    def _keyed(self, rows: Iterable[TaskRow]) -> dict[int, list[TaskRow]]:
        """Return the rows with a dedup_key, by table."""
        keyed: dict[int, list[TaskRow]] = {}
        for row in rows:
            if row.dedup_key is not None:
                keyed.setdefault(self._shards.table_of(row.job_id), []).append(row)
        return keyed

    def _looks(
        self, server: DatabaseServer, keyed: dict[int, list[TaskRow]], *, wait: bool = True
    ) -> list[Statement]:
        """Return statements that read the rows with these dedup_keys, after waiting for transactions that
        insert one, unless ``wait`` is False.

        An INSERT would wait too; but then, and afterwards in a caller's transaction, it locks the gap before
        the row as well, and with it every biz_id in between.
        """
        names = self._shards.names
        return [
            statement
            for table, part in keyed.items()
            for statement in sql.select_by_dedup(server, names[table], part, wait=wait)
        ]

    def stored_as(self, row: TaskRow) -> TaskRow | None:
        """Return the stored row with this row's dedup_key, which it has."""
        keyed = self._keyed([row])
        return self._by_dedup(self._shards.server_of[next(iter(keyed))], keyed).get(whole_key(row))

    def _by_dedup(self, server: DatabaseServer, keyed: dict[int, list[TaskRow]]) -> dict[WholeKey, TaskRow]:
        return {whole_key(row): row for row in sql.task_rows(server.run(self._looks(server, keyed)))}
