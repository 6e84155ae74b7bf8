"""What the processes of a cluster share in its first database, and what each of them tells there.

identity   one row: whose tables these are, and what holds for all processes
members    without ZooKeeper: a row for each daemon, which writes it every second
minutes    what each member did in each of the last minutes
episodes   for each process, topic and cause that made tasks late: how many, and how much
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import ColumnElement, and_, delete, insert, literal_column, select, update

from toc.loop import Loop
from toc.model.clock import Clock
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.lateness import Cause, Episode
from toc.model.member import MemberRow
from toc.observe.holdups import Holdups
from toc.store.records.table import RecordTable
from toc.store.schema import IDENTITY_TABLE
from toc.store.servers.server import Duplicate, Statement
from toc.store.servers.shards import Shards
from toc.store.tasks import rows as sql

DEAD_KEPT_MS = 86_400_000
"""How long (ms) the row of a dead member is kept."""
WRITE_SECONDS = 5.0
WAITING = 1000
"""Most episodes that wait to be written: the last ones."""
EPISODES_KEPT_MS = 7 * 86_400_000
MOST = 100_000
"""Most episodes kept."""
LAG_MS = 120_000
"""An episode is written within this time after its first task started."""
_COLUMNS = {"since": "since_time", "until": "until_time", "began": "gmt_create"}
"""The columns of fields of Episode that have another name."""


class Horizon(NamedTuple):
    """How far ahead (s) the index reaches at most, 0 for no bound; why, and since when (ms; 0: it never was
    another)."""

    seconds: int
    why: str
    since: int


class IdentityTable(RecordTable):
    """The identity of a task table: one row, written by the first program that reads it.

    It distinguishes two clusters that use one Redis and one namespace by mistake. A copy of the databases has
    the identity of its original. The same row holds the secret that seals the leases of consumers, and says
    whether there is an index, so that no process's settings alone decide that (``indexed``: what it says if
    it is written here); how far ahead that reaches at most; and that daemons share the work by ZooKeeper, for
    those who do not look there. Raises StoreUnavailable or SchemaBehind.
    """

    in_schema = IDENTITY_TABLE

    def __init__(self, shards: Shards, clock: Clock, *, indexed: bool) -> None:
        super().__init__(shards, clock)
        self._indexed = indexed
        self.place = self._server.name
        """Where the table is, for a message."""

    def get(self) -> str:
        """Return the identity: 32 hexadecimal digits, unique to this task table."""
        return self._read()[0]

    def lease_secret(self) -> bytes:
        """Return the secret that seals leases."""
        return bytes.fromhex(self._read()[1])

    def indexed(self) -> bool:
        """Return whether the tasks are indexed in Redis. If not, the rows alone say what is due."""
        return self._read()[2]

    def set_indexed(self, indexed: bool) -> None:
        """Say whether they are, from now on."""
        self._read()
        values = {"indexed": int(indexed), "horizon": 0, "horizon_why": "", "horizon_since": 0}
        self._change(self._column.number == 1, **values)

    def horizon(self) -> Horizon:
        """Return how far ahead the index reaches at most."""
        columns = self._column
        found = self._rows(select(columns.horizon, columns.horizon_why, columns.horizon_since))
        return Horizon(*found[0]) if found else Horizon(0, "", 0)

    def set_horizon(self, bound: Horizon) -> None:
        """Say how far ahead it reaches from now on."""
        values = {"horizon": bound.seconds, "horizon_why": bound.why[:255], "horizon_since": bound.since}
        self._change(self._column.number == 1, **values)

    def may_look(self, every_ms: int) -> bool:
        """Whether the caller is to look at the horizon now: nobody has for so long.

        A time in the future was written before a clock was set back.
        """
        now, looked = self._clock.now_ms(), self._column.horizon_looked
        lately = looked.between(now - every_ms + 1, now + every_ms)
        return self._change(self._column.number == 1, ~lately, horizon_looked=now) == 1

    def mark(self, host: str, ms: int) -> None:
        """Say that a daemon of this host shares the work by ZooKeeper, for so long (ms), unless what another
        has said holds for two thirds of that. 0: what this host has said holds no more."""
        columns, until = self._column, self._from_now(ms)
        ends = columns.marked_until.is_(None) | (columns.marked_until < self._from_now(ms * 2 // 3))
        may = ends if ms else columns.marked_by == host
        self._change(columns.number == 1, may, marked_by=host, marked_until=until)

    def marked_by(self) -> list[str]:
        """Return the host that has said so, if that holds by the server's clock."""
        marked = select(self._column.marked_by).where(self._column.marked_until > self._from_now(0))
        return [str(host) for (host,) in self._rows(marked)]

    def _read(self) -> tuple[str, str, bool]:
        """Return identity, secret and whether there is an index; make them if this is the first program that
        asks."""
        columns = self._column
        query = select(columns.identity, columns.lease_secret, columns.indexed).where(columns.number == 1)
        if not (rows := self._rows(query)):
            values = {"number": 1, "identity": secrets.token_hex(16), "lease_secret": secrets.token_hex(32)}
            values |= {"indexed": int(self._indexed), "gmt_create": self._clock.now_ms()}
            with suppress(Duplicate):  # another program was faster
                self._write(insert(self._table).values(**values))
            rows = self._rows(query)
        ((identity, secret, indexed),) = rows
        return identity, secret, bool(indexed)


class MemberTable(RecordTable):
    """The rows of members without ZooKeeper. Any method raises StoreUnavailable or SchemaBehind.

    A row is changed only under a number that grows with each write, so a write that arrives late, when its
    sender has long given it up, changes nothing.
    """

    in_schema = "timeout_member"

    def beat(self, name: str, number: int, timeout: int, data: str) -> list[MemberRow] | None:
        """Write a member's row, then read those of all that are not dead, in one round trip.

        Each is committed by itself: of two members that write at the same time, one at least reads what the
        other wrote. ``number`` grows with each call. None: there is no such row, or others have called it
        dead; nothing was written, and ``join`` makes a new one.
        """
        column = self._column
        ours = and_(column.name == name, column.dead == 0, column.beat <= number)
        values = {"beat": number, "heartbeat": self._from_now(0), "timeout": timeout, "data": data}
        write, living = update(self._table).where(ours).values(values), self._all().where(column.dead == 0)
        written, read = self._server.run([self._compiled(write), self._compiled(living)])
        return _members(read.rows) if written.matched else None

    def join(self, name: str, host: str, number: int, timeout: int, data: str) -> None:
        """Make a member's row, in place of an earlier one of its own, and delete rows of the long dead."""
        column = self._column
        former = and_(column.name == name, column.beat < number)
        old = and_(column.dead == 1, column.heartbeat < self._from_now(-DEAD_KEPT_MS))
        row = insert(self._table).values(
            name=name, host=host, beat=number, heartbeat=self._from_now(0), timeout=timeout, dead=0,
            data=data, gmt_create=self._clock.now_ms(),
        )  # fmt: skip
        statements = [delete(self._table).where(former | old), row]
        with suppress(Duplicate):  # this call arrives late
            self._server.run([self._compiled(each) for each in statements], transaction=True)

    def bury(self, name: str, number: int) -> None:
        """Call a member dead that has not written since ``number``. It owns nothing from then on."""
        column = self._column
        self._change(column.name == name, column.beat == number, column.dead == 0, dead=1, data="{}")

    def leave(self, name: str, host: str) -> None:
        """Delete a member's row, which has ended in good order, and those of its host's dead, which it has
        followed."""
        column = self._column
        dead = (column.host == host) & (column.dead == 1)
        self._write(delete(self._table).where((column.name == name) | dead))

    def list(self) -> list[MemberRow]:
        """Return all rows, those of the dead too, by name."""
        return _members(self._rows(self._all()))

    def _all(self) -> sa.Select[Any]:
        column, ms = self._column, self._server.milliseconds
        age: ColumnElement[int] = literal_column(f"{ms(self._server.from_now(0))}-{ms('heartbeat')}")
        named = (column.name, column.host, column.beat, age, column.timeout, column.dead, column.data)
        return select(*named).order_by(column.name)


def _members(rows: Sequence[Any]) -> list[MemberRow]:
    return [
        MemberRow(name, host, beat, max(age, 0), timeout, bool(dead), data)
        for name, host, beat, age, timeout, dead, data in rows
    ]


class MinuteRow(NamedTuple):
    """A minute of a member: when it began (ms), and what the member did in it, as JSON."""

    minute: int
    member: str
    counts: str


class MinuteTable(RecordTable):
    """A row for each member and minute. Any method raises StoreUnavailable or SchemaBehind."""

    in_schema = "timeout_minute"

    def keep(self, rows: Iterable[MinuteRow]) -> None:
        """Write rows; one that is there is replaced."""
        into = f"REPLACE INTO {self._table} (minute,member,counts) VALUES"
        writes = [
            Statement(f"{into} ({self._server.instant(minute)},%s,%s)", [member, counts])
            for minute, member, counts in rows
        ]
        self._server.run(writes, transaction=True)

    def since(self, minute: int) -> Sequence[MinuteRow]:
        """Return the rows of all members from a minute on (ms), by minute."""
        column = self._column
        rows = select(column.minute, column.member, column.counts).where(column.minute >= minute)
        with sql.understood():
            found = self._rows(rows.order_by(column.minute, column.member))
            return [MinuteRow(int(at), member, text) for at, member, text in found]

    def purge(self, keep: int) -> bool:
        """Delete rows that are older than ``keep`` ms, all of them. Returns False: no more are left."""
        self._write(delete(self._table).where(self._column.minute < self._from_now(-keep)))
        return False


def episode_writer(table: EpisodeTable, holdups: Holdups) -> Loop:
    """Return the loop that writes what a process has counted, the last of it when it is stopped. What cannot
    be written now is written later."""

    waiting: deque[Episode] = deque(maxlen=WAITING)

    def run_once() -> float:
        waiting.extend(holdups.take_episodes())
        with suppress(StoreUnavailable, SchemaBehind):
            while waiting:
                table.write(waiting[0])
                waiting.popleft()
        return WRITE_SECONDS

    return Loop("episodes", run_once, last=True)


class EpisodeTable(RecordTable):
    """The episodes of late tasks, each of which counts the tasks of some seconds. What is old, or too much,
    is deleted. Any method raises StoreUnavailable or SchemaBehind."""

    in_schema = "timeout_episode"

    def write(self, one: Episode) -> None:
        """Add an episode, unless it is there."""
        values = {_COLUMNS.get(name, name): value for name, value in one._asdict().items()}
        with suppress(Duplicate):  # its answer was lost
            self._write(insert(self._table).values(values | {"cause": one.cause.value}))

    def list(
        self, since: int, limit: int, topics: Collection[str] | None = None, cause: Cause | None = None
    ) -> Sequence[Episode]:
        """Return episodes that began from ``since`` (ms) on, the latest first; None: of all topics."""
        where = [self._column.gmt_create >= since]
        where += [] if topics is None else [self._column.topic.in_(topics)]
        where += [] if cause is None else [self._column.cause == cause.value]
        return self._read(where, limit)

    def of(self, topic: str, since: int, until: int, limit: int) -> Sequence[Episode]:
        """Return those of a topic that overlap this time (ms), the latest first."""
        column = self._column
        near = column.gmt_create.between(since - LAG_MS, until + LAG_MS)
        overlap = and_(column.since_time <= until, column.until_time >= since)
        return self._read([near, column.topic == topic, overlap], limit)

    def worst(self, since: int) -> dict[str, int]:
        """Return how late (ms) the latest task was since then (ms) of each topic told apart."""
        column = self._column
        what = select(column.topic, sa.func.max(column.worst))
        rows = self._rows(what.where(column.gmt_create >= since).group_by(column.topic))
        return {str(topic): int(worst) for topic, worst in rows if topic}

    def _read(self, where: Sequence[ColumnElement[bool]], limit: int) -> Sequence[Episode]:
        what = select(*(self._column[_COLUMNS.get(name, name)] for name in Episode._fields))
        found = self._rows(what.where(*where).order_by(self._column.gmt_create.desc()).limit(limit))
        known = {cause.value for cause in Cause}
        rows: list[Sequence[Any]] = [row for row in found if row[2] in known]  # none of a later version
        return [Episode(*row)._replace(cause=Cause(row[2])) for row in rows]

    def purge(self) -> bool:
        """Delete the oldest that are too old, or too many. Returns whether more may be left."""
        ((count,),) = self._rows(select(sa.func.count()).select_from(self._table))
        keep = 0 if int(count) > MOST else EPISODES_KEPT_MS
        return sql.delete_oldest(self._server, str(self._table), "episode_id", keep)
