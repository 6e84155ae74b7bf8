"""Reads the rows of tries, for a thread that waits for no server."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import chain
from math import inf
from operator import itemgetter
from queue import SimpleQueue

from toc.loop import Reactor
from toc.model.clock import to_ms
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.task import TryRow
from toc.store.servers.pool import PooledConnection
from toc.store.servers.server import DatabaseServer, Result, Statement
from toc.store.servers.shards import OF_TABLES, Answers, Shards, Trouble
from toc.store.tasks import rows as sql
from toc.store.tasks.leases import Leases
from toc.store.tasks.rows import NO_INSTANT, ByTable, understood

SOON_SECONDS = 0.01
"""How long ``ask`` waits for answers. They usually come at once, and then a second sleep would cost more than
this wait does. A server whose last answer took longer is not waited for."""
HANGS_SECONDS = 1.0
"""How long the answer of a server that counts as away is waited for, should it have halted for a moment. What
waits beside it fills the room of all servers' tasks."""
TakeTries = Callable[[Sequence[int], Answers[TryRow]], None]
"""Callback that gets ids whose rows were to be read, and answers, perhaps for other ids too."""


class Tries:
    """The part of the Store that reads what tries need. Thread-safe."""

    def __init__(self, shards: Shards, leases: Leases) -> None:
        self._shards = shards
        self.leases = leases
        self._try_columns = {server: try_columns(server) for server in shards.servers}

    def read_tries(self, job_ids: Iterable[int]) -> Answers[TryRow]:
        """Return the columns that a try needs, by job_id."""
        return self.read_grouped(self._shards.group(job_ids))

    def read_grouped(self, ids: Mapping[DatabaseServer, ByTable]) -> Answers[TryRow]:
        """Return the columns that a try needs, of ids by server and table."""

        def read(server: DatabaseServer, ids: ByTable) -> dict[int, TryRow]:
            results = server.run(self.select_tries(server, ids), outwait=False)
            return self.judged_tries(server, try_rows(results))

        return self._shards.each(ids, read).joined()

    def select_tries(self, server: DatabaseServer, ids: ByTable) -> list[Statement]:
        """Return the statements that read them."""
        return sql.select_by_id(server, self._try_columns[server], self._shards.names, ids)

    def judged_tries(self, server: DatabaseServer, rows: list[TryRow]) -> dict[int, TryRow]:
        """Return rows by job_id, after asking who has the leases of others on them."""
        return {row.job_id: row for row in self.leases.judged(server, rows)}

    def tries_reader(self, reactor: Reactor) -> TriesReader:
        """Return what reads rows for the thread of this reactor."""
        return TriesReader(self, self._shards, reactor)


class _Lane:
    """What is asked of one server, and what waits to be."""

    def __init__(self, server: DatabaseServer, shards: Shards) -> None:
        self.server = server
        self.health = shards.health[server]
        self.waiting: list[tuple[ByTable, TakeTries]] = []
        self.asked: list[tuple[ByTable, TakeTries]] = []
        self.sent: PooledConnection | None = None
        """What is watched. None: nothing is asked, or another thread waits for the answers."""
        self.quick = True
        """Whether its last answer came soon."""
        self.at = self.late_at = 0.0
        """When it was sent, and when its answers are late (monotonic)."""

    def ids(self) -> ByTable:
        """The ids that are asked."""
        if len(self.asked) == 1:
            return self.asked[0][0]
        ids: dict[int, list[int]] = {}
        for table, some in chain.from_iterable(ids.items() for ids, _ in self.asked):
            ids.setdefault(table, []).extend(some)
        return {table: sorted(set(ids[table])) for table in sorted(ids)}


class TriesReader:
    """Reads rows for the thread of ``reactor``: one query at a time is under way to each server.

    Errors of servers are answers. Another thread waits for a server that has no open connection or does not
    answer in time, and finds out why.
    """

    def __init__(self, tries: Tries, shards: Shards, reactor: Reactor) -> None:
        self._tries = tries
        self._shards = shards
        self._reactor = reactor
        self._lanes = {server: _Lane(server, shards) for server in shards.servers}
        self._answered: SimpleQueue[tuple[_Lane, Answers[TryRow]]] = SimpleQueue()
        """By other threads."""

    @property
    def under_way(self) -> bool:
        """Whether a server has yet to answer."""
        return any(lane.asked for lane in self._lanes.values())

    def ask(self, job_ids: Iterable[int], take: TakeTries) -> None:
        """Read rows. ``take`` gets the ids of each server with the answers, here or from ``run_once``."""
        asked = []
        for server, ids in self._shards.group(job_ids).items():
            lane = self._lanes[server]
            lane.waiting.append((ids, take))
            if not lane.asked:
                self._begin(lane)
                asked.append(lane)
        for lane in asked:
            if lane.sent is not None and lane.quick:
                self._hear(lane, lane.sent, lane.at + SOON_SECONDS)

    def run_once(self) -> float:
        """Hand on what other threads have got, and leave servers to them that are late. Returns when the next
        is late (monotonic)."""
        while not self._answered.empty():
            self._end(*self._answered.get_nowait())
        following = inf
        for lane in self._lanes.values():
            if (sent := lane.sent) is not None:
                if lane.late_at <= time.monotonic():
                    self._leave(lane, sent)
                elif lane.late_at < following:
                    following = lane.late_at
        return following

    def _begin(self, lane: _Lane) -> None:
        waiting, lane.waiting = lane.waiting, []
        if lane.health.troubled:
            for ids, take in waiting:
                free, failed = lane.health.sort_out(ids)
                refused = {job_id: error for table, error in failed.items() for job_id in ids[table]}
                if refused:
                    take(list(refused), Answers({}, refused))
                if free:
                    lane.asked.append((free, take))
        else:
            lane.asked = waiting
        if not lane.asked:
            return
        server, ids, sent = lane.server, lane.ids(), None
        lane.at = time.monotonic()
        with contextlib.suppress(StoreUnavailable, SchemaBehind):  # these are read on a thread that may wait
            sent = server.begin(self._tries.select_tries(server, ids))
        if sent is None:
            self._apart(lane, partial(self._open, lane, ids))
            return
        lane.sent, lane.late_at = sent, lane.at + lane.health.patience
        descriptor = sent.connection.descriptor()
        if descriptor is None:
            self._hear(lane, sent)
        else:
            self._reactor.watch(descriptor, partial(self._hear, lane, sent))

    def _hear(self, lane: _Lane, sent: PooledConnection, until: float = 0.0) -> None:
        """Read the answers, if all have come, or come ``until`` then (monotonic)."""
        if not sent.connection.answered(until - time.monotonic()):
            return
        took = time.monotonic() - lane.at
        lane.health.answered(took)
        lane.quick = took <= SOON_SECONDS
        self._forget(lane, sent)
        server = lane.server
        try:
            rows = try_rows(lane.server.results(sent))
        except (StoreUnavailable, SchemaBehind) as exc:  # usually a broken connection
            self._apart(lane, partial(self._open, lane, lane.ids(), exc))
            return
        if any(row.lease and self._tries.leases.of_others(row) for row in rows):
            self._apart(lane, partial(self._tries.read_grouped, {server: lane.ids()}))
        else:
            # A worker ignores its own leases: it runs under them what it takes from the table.
            self._end(lane, Answers(self._tries.judged_tries(server, rows)))

    def _forget(self, lane: _Lane, sent: PooledConnection) -> None:
        lane.sent = None
        if (descriptor := sent.connection.descriptor()) is not None:
            self._reactor.forget(descriptor)

    def _end(self, lane: _Lane, answers: Answers[TryRow]) -> None:
        asked, lane.asked = lane.asked, []
        if lane.health.away is not None and not answers.unanswered:
            lane.health.back()  # else those that wait would be refused, as if it had not
        if lane.waiting:
            self._begin(lane)
        for ids, take in asked:
            take([*chain.from_iterable(ids.values())], answers)

    def _leave(self, lane: _Lane, sent: PooledConnection) -> None:
        lane.quick = False
        self._forget(lane, sent)
        self._apart(lane, partial(self._wait, lane, lane.ids(), sent))

    # --- on other threads

    def _apart(self, lane: _Lane, read: Callable[[], Answers[TryRow]]) -> None:
        def do() -> None:
            self._answered.put((lane, read()))
            self._reactor()

        self._shards.run_detached(do)

    def _open(self, lane: _Lane, ids: ByTable, exc: Trouble | None = None) -> Answers[TryRow]:
        """Read over a connection that may be old or have to be opened, of a server that answers in time.
        ``exc`` came of another one."""
        if isinstance(exc, OF_TABLES):
            lane.health.set_aside(ids)
        lane.health.examine(lambda _seconds: False)
        return self._tries.read_grouped({lane.server: ids})

    def _wait(self, lane: _Lane, ids: ByTable, sent: PooledConnection) -> Answers[TryRow]:
        """Wait for the answers of a server, and find out whether it is away."""
        answered = sent.connection.answered
        if lane.health.examine(answered) and not answered(HANGS_SECONDS):
            lane.server.abandon(sent)
            return self._tries.read_grouped({lane.server: ids})
        if answered(0.0):
            lane.health.answered(time.monotonic() - lane.at)
        try:
            return Answers(self._tries.judged_tries(lane.server, try_rows(lane.server.results(sent))))
        except (StoreUnavailable, SchemaBehind) as exc:
            return self._open(lane, ids, exc)


# --- the row of a try as one text
#
# Each column of a result has a description to be read, and each value its length and type: a dozen columns
# would cost several times as much as splitting one text.

_SHARED = (
    "biz_type", "status", "version", "attempts", "crashes", "lease", "tries", "expires_at", "begun",
    "body_length", "redrives",
)  # fmt: skip
"""Fields of TryRow that have the same values in most rows, in the order of their text.

Rows with the same text share one parsed result.
"""
_EXPIRES_AT = _SHARED.index("expires_at")
_SQL = {
    "lease": "COALESCE(lease_owner,0)",
    "expires_at": "COALESCE(expires_at,'')",
    "begun": "(last_error IS NOT NULL)",
    "body_length": "COALESCE(body_length,-1)",
    "biz_key": "CASE WHEN biz_key IS NULL THEN '-' ELSE HEX(biz_key) END",
}
"""What to SELECT for fields that are not columns as they are stored."""
_OWN = ("job_id", "biz_id", "action_time", "next_time", "biz_key", "attribute")
"""The other fields: each row has its own. The text of the shared ones is between next_time and biz_key."""
_BY_FIELD = itemgetter(*map([*_OWN, *_SHARED].index, TryRow._fields))
"""Arranges the values of _OWN and _SHARED as TryRow has them."""
_PRINTED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")
"""An instant as a server prints it, without the milliseconds; or a zero date."""


def try_columns(server: DatabaseServer) -> str:
    """Return what to SELECT for ``try_rows``: one text per row, the attribute last, as it may hold commas.

    Instants are as the server prints them: for one row, a server takes a fifth more time to parse and
    evaluate a conversion.
    """
    shared = server.joined([_SQL.get(name, name) for name in _SHARED], by=";")
    own = [_SQL.get(name, name) for name in _OWN]
    return server.joined([*own[:4], shared, *own[4:]])


def try_rows(results: Iterable[Result]) -> list[TryRow]:
    """Parse all results of ``try_columns``. ``lease`` is the number of the lease's worker, 0 for none.

    What is no instant is read as NO_INSTANT, or as no time to expire at.
    """
    rows = []
    with understood():
        for result in results:
            for (text,) in result.rows:
                job_id, biz_id, action, following, shared, key, attribute = text.split(",", 6)
                action_time = _parse_instant(action)
                next_time = action_time if following == action else _parse_instant(following)
                biz_key = None if key == "-" else bytes.fromhex(key).decode(errors="replace")
                own = int(job_id), int(biz_id), action_time, next_time, biz_key, attribute
                rows.append(TryRow._make(_BY_FIELD(own + _parse_shared(shared))))
    return rows


@lru_cache(256)
def _parse_shared(text: str) -> tuple[int, ...]:
    values: list[str | int] = [*text.split(";")]
    expires = str(values[_EXPIRES_AT])
    values[_EXPIRES_AT] = max(_parse_instant(expires), 0) if expires else 0
    if len(values) != len(_SHARED):
        raise ValueError
    return tuple(map(int, values))


def _parse_instant(text: str) -> int:
    """Milliseconds of an instant that a server prints: ``2026-11-25 22:27:19.280``, or SQLite's number."""
    return _parse_second(text[:19]) + int(text[20:]) if len(text) == 23 else int(text)


@lru_cache(1024)
def _parse_second(text: str) -> int:
    try:
        return to_ms(datetime.fromisoformat(text).replace(tzinfo=UTC))
    except ValueError:
        if not _PRINTED.fullmatch(text):  # the answer is damaged, not the row
            raise
        return NO_INSTANT
