"""Reads the rows of tries, without waiting for a server that is slow or hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import NamedTuple

from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.task import TryRow
from toc.store import rows as sql
from toc.store.health import PATIENCE_SECONDS
from toc.store.leases import Leases
from toc.store.server import DatabaseServer, Exchange, Statement
from toc.store.shards import OF_TABLES, Answers, Shards, Trouble
from toc.store.try_text import try_columns, try_rows

SLICE_SECONDS = 0.001
"""Seconds to wait for each of several servers before looking at the next one."""

TakeTries = Callable[[Sequence[int], Answers[TryRow]], None]
"""Callback that gets the ids whose rows were to be read, and the answers."""


class Owing(StoreUnavailable):
    """The server still owes answers to other callers, so it was not asked.

    Those answers will show whether it is out of reach. ``seconds``: for a server that usually
    answers slowly, in how many seconds they are expected; None: they are overdue.
    """

    def __init__(self, text: str, seconds: float | None) -> None:
        super().__init__(text)
        self.seconds = seconds


class _Begun(NamedTuple):
    """A request to one server for the rows of these ids, by table."""

    server: DatabaseServer
    ids: Mapping[int, Sequence[int]]
    exchange: Exchange | None
    future: Future[Answers[TryRow]] | None
    """Replaces the exchange if there was no idle connection."""
    at: float
    """When the request was sent, on the monotonic clock."""

    def answered(self, seconds: float) -> bool:
        """Wait at most ``seconds``. Returns whether the answers are there."""
        if self.exchange is not None:
            return self.exchange.answered(seconds)
        assert self.future is not None  # noqa: S101 - it is one of the two
        return bool(wait([self.future], seconds).done)


class Tries:
    """The part of the Store that reads what tries need. Thread-safe."""

    def __init__(self, shards: Shards, leases: Leases) -> None:
        self._shards = shards
        self.leases = leases
        self._try_columns = {server: try_columns(server) for server in shards.servers}

    def read_tries(self, job_ids: Iterable[int]) -> Answers[TryRow]:
        """Return the columns that a try needs, by job_id."""
        return self._tries(self._shards.group(job_ids))

    def _tries(self, ids: Mapping[DatabaseServer, Mapping[int, Sequence[int]]]) -> Answers[TryRow]:
        def read(server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> dict[int, TryRow]:
            results = server.run(self._select_tries(server, ids), outwait=False)
            return {row.job_id: row for row in self.leases.judged(server, try_rows(results))}

        return self._shards.each(ids, read).joined()

    def _select_tries(self, server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> list[Statement]:
        return sql.select_by_id(server, self._try_columns[server], self._shards.names, ids)

    def check_tries(self, job_ids: Iterable[int], take: TakeTries) -> None:
        """Read the rows for tries without waiting: ``take`` gets the ids of each server, and its answers.

        ``take`` is called as answers come. For a server without an answer within PATIENCE_SECONDS it is
        called later, on another thread; for one of several servers that is usually slow, always so. Until
        then that server gets no further requests: its ids are reported as not answered.

        An error of ``take``, or any unexpected error, is raised here. If it happens on another
        thread, it goes to ``threading.excepthook``.
        """
        begun: list[_Begun] = []
        for server, ids in self._shards.group(job_ids).items():
            health = self._shards.health[server]
            free: Mapping[int, Sequence[int]] = ids
            if health.troubled:
                free, failed = health.sort_out(ids)
                if free and health.owing:
                    seconds = health.owing_seconds if health.slow else None
                    error = Owing(f"{server.name}: has not answered yet", seconds)
                    free, failed = {}, dict.fromkeys(ids, error)
                _refuse(ids, failed, take)
            if not free:
                continue
            one = self._begin_tries(server, free)
            if health.slow and len(self._shards.servers) > 1:
                self._take_later(one, take)
            else:
                begun.append(one)
        deadline = time.monotonic() + PATIENCE_SECONDS
        patience = PATIENCE_SECONDS if len(begun) == 1 else SLICE_SECONDS
        while begun:
            late = time.monotonic() >= deadline
            waiting = []
            for one in begun:
                if self._answered(one, 0.0 if late else patience):
                    self._take_tries(one, take)
                elif late:
                    self._take_later(one, take)
                else:
                    waiting.append(one)
            begun = waiting

    def _answered(self, one: _Begun, seconds: float) -> bool:
        """Wait at most ``seconds``. Returns whether the answers are there, and records the time in the
        health."""
        if not one.answered(seconds):
            return False
        if one.exchange is not None:
            self._shards.health[one.server].answered(time.monotonic() - one.at)
        return True

    def _take_later(self, one: _Begun, take: TakeTries) -> None:
        """Let another thread wait for the answers."""
        self._shards.health[one.server].owes(1, one.at)
        self._shards.run_detached(partial(self._wait_for_tries, one, take))

    def _begin_tries(self, server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> _Begun:
        at = time.monotonic()
        try:
            exchange = server.begin(self._select_tries(server, ids))
        except StoreUnavailable:  # these rows are read once more, on a thread that may wait
            exchange = None
        if exchange is not None:
            return _Begun(server, ids, exchange, None, at)
        return _Begun(server, ids, None, self._shards.soon(lambda: self._tries({server: ids})), at)

    def _take_tries(self, one: _Begun, take: TakeTries) -> None:
        """Pass on the answers, which are there."""
        server, ids, exchange, future, _ = one
        asked = [job_id for part in ids.values() for job_id in part]
        if future is not None:
            take(asked, future.result())
            return
        assert exchange is not None  # noqa: S101 - it is one of the two
        try:
            rows = try_rows(exchange.results())
        except (StoreUnavailable, SchemaBehind) as exc:
            # Usually a broken connection.
            self._shards.run_detached(partial(self._read_again, one, asked, take, exc))
            return
        foreign = any(row.lease and self.leases.of_others(row) for row in rows)
        if foreign and len(self._shards.servers) > 1:
            self._shards.run_detached(lambda: take(asked, self._judged(server, asked, rows)))
        elif foreign:
            take(asked, self._judged(server, asked, rows))
        else:
            # A worker ignores its own leases: it runs under them what it takes from the table.
            take(asked, Answers({row.job_id: row for row in self.leases.judged(server, rows)}))

    def _judged(self, server: DatabaseServer, ids: Sequence[int], rows: list[TryRow]) -> Answers[TryRow]:
        try:
            return Answers({row.job_id: row for row in self.leases.judged(server, rows)})
        except (StoreUnavailable, SchemaBehind) as exc:
            return Answers({}, dict.fromkeys(ids, exc))

    def _read_again(self, one: _Begun, asked: Sequence[int], take: TakeTries, exc: Trouble) -> None:
        if isinstance(exc, OF_TABLES):
            self._shards.health[one.server].set_aside(one.ids)
        take(asked, self._tries({one.server: one.ids}))

    def _wait_for_tries(self, one: _Begun, take: TakeTries) -> None:
        """Wait for the answers of a server, and find out whether it is away if they do not come in time."""
        health = self._shards.health[one.server]
        try:
            if not self._answered(one, max(one.at + health.patience - time.monotonic(), 0.0)):
                health.examine(partial(self._answered, one))
            self._take_tries(one, take)
        finally:
            health.owes(-1)


def _refuse(ids: Mapping[int, Sequence[int]], failed: Mapping[int, Trouble], take: TakeTries) -> None:
    """Report the ids of these tables as not answered."""
    if failed:
        refused = {job_id: error for table, error in failed.items() for job_id in ids[table]}
        take(list(refused), Answers({}, refused))
