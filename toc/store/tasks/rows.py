"""SQL to read, insert and find task rows. Uses no connection."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar

from toc.model.task import TaskRow
from toc.store.servers.server import DatabaseServer, Param, Result, Statement, Transient

K = TypeVar("K")
T = TypeVar("T")
ByTable = Mapping[int, Sequence[int]]
"""Ids by table."""

_INSTANTS = frozenset({"action_time", "next_time", "gmt_create", "gmt_modified"})
NO_INSTANT = -(10**15)
"""Milliseconds, in place of a value that is not an instant."""
_BINARY = frozenset({"biz_key", "dedup_key"})
_NUMBERS = tuple(
    place
    for place, name in enumerate(TaskRow._fields)
    if name not in ("biz_key", "attribute", "dedup_key", "last_error", "body_length", "body_sha256", "late")
)
_COLUMNS = (
    "job_id,biz_id,biz_type,status,action_time,next_time,attribute,version,attempts,crashes,slot_crc,slot_amount,"
    "gmt_create,gmt_modified"
)
_VALUES = "%d,%d,%d,%d,%s,%s,%%s,%d,%d,%d,%d,%d,%s,%s"
"""Their values: %d accepts only a number, and %%s stands for a parameter."""
_RARE_COLUMNS = ",biz_key,dedup_key,last_error,tries,expires_at,expired,body_length,body_sha256"
_RARE_DEFAULTS = ",NULL,NULL,NULL,0,NULL,0,NULL,NULL"

UNION = 400
"""Selects in one UNION ALL; SQLite takes at most 500."""
KEYS = 200
"""Dedup keys in one SELECT; SQLite's expressions may be 1,000 deep."""
PURGED_TOGETHER = 1000
"""Records that one statement deletes at most."""


def columns(server: DatabaseServer, **instead: str) -> str:
    """The columns to SELECT for TaskRow, in its order and types; ``instead`` replaces columns."""
    return ",".join(instead.get(name) or column(server, name) for name in TaskRow._fields)


def column(server: DatabaseServer, name: str) -> str:
    """The expression to SELECT for one column, in the type that TaskRow has.

    What is no instant, such as the date 0000-00-00, is read as one that no calendar has: the task is
    unreadable, and its neighbours are not.
    """
    if name in _INSTANTS:
        return f"COALESCE({server.milliseconds(name)},{NO_INSTANT:d})"
    if name == "expires_at":
        return f"COALESCE({server.milliseconds(name)},0)"
    return server.text(name) if name in _BINARY else name


def number_rows(results: Iterable[Result], count: int) -> list[list[int]]:
    """Parse results of one text per row: ``count`` numbers joined by commas."""
    with understood():
        rows = [list(map(int, text.split(","))) for result in results for (text,) in result.rows]
        if not {count}.issuperset(map(len, rows)):
            raise ValueError
    return rows


class understood:  # noqa: N801 - reads like a function
    """Raise Transient if the answer that the block reads is malformed.

    A damaged packet may still be complete. A second read gives another answer. (A class, since each row check
    enters one: a generator as context manager would cost three times as much.)
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, exc: BaseException | None, _traceback: object) -> None:
        if isinstance(exc, (ValueError, LookupError, TypeError, AttributeError)):
            what = f"an answer of the task table cannot be parsed ({type(exc).__name__})"
            raise Transient(f"{what}; try again") from exc


def literal(value: bytes) -> str:
    """Return bytes as SQL."""
    return f"X'{value.hex()}'"


def numbers(values: Iterable[int]) -> str:
    """``1,2,3``. Raises on anything but integers, so that nothing else gets into SQL."""
    return ",".join(map(int.__repr__, values))


def task_rows(results: Sequence[Result]) -> list[TaskRow]:
    """Parse the rows of all results."""
    with understood():
        # All rows of a result are of one kind: the first tells.
        return [
            task_row(row) if number == 0 else TaskRow._make(row)
            for result in results
            for number, row in enumerate(result.rows)
        ]


def task_row(values: Sequence[Any]) -> TaskRow:
    """Make a row of the values of ``columns``. Raises StoreUnavailable for a damaged answer."""
    with understood():
        if not all(isinstance(values[place], (int, Decimal)) for place in _NUMBERS):
            raise TypeError
        return TaskRow._make(values)


def unions(server: DatabaseServer, selects: Sequence[str]) -> list[Statement]:
    """Combine the selects into few statements."""
    return [
        Statement(server.union(selects[first : first + UNION])) for first in range(0, len(selects), UNION)
    ]


def alike(ids: ByTable, of: Mapping[int, K]) -> dict[tuple[int, K], list[int]]:
    """Group job_ids, given by table, by that and by what ``of`` has for them."""
    groups: dict[tuple[int, K], list[int]] = {}
    for table, part in ids.items():
        for job_id in part:
            groups.setdefault((table, of[job_id]), []).append(job_id)
    return groups


def bounded(sizes: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Split things, given with their sizes (-1: none), into lists of at most ``most`` in all. A larger one is
    alone."""
    part: list[T] = []
    total = 0
    for thing, size in sizes:
        if part and total + size > most:
            yield part
            part, total = [], 0
        part.append(thing)
        total += max(size, 0)
    if part:
        yield part


def read(server: DatabaseServer, selects: Sequence[str], *, outwait: bool = True) -> list[Any]:
    """Return the rows of all selects."""
    results = server.run(unions(server, selects), outwait=outwait)
    return [row for result in results for row in result.rows]


def select_by_id(server: DatabaseServer, what: str, names: Sequence[str], ids: ByTable) -> list[Statement]:
    """Return selects of ``what`` for the rows of these job_ids, given by table."""
    selects = [
        f"SELECT {what} FROM {names[table]} WHERE job_id IN ({numbers(part)})" for table, part in ids.items()
    ]
    return unions(server, selects)


def update_by_id(
    server: DatabaseServer, names: Sequence[str], ids: ByTable, sets: str, where: str,
    params: Sequence[Param] = (),
) -> list[Statement]:  # fmt: skip
    """Return updates of those of the rows of these job_ids, given by table, for which ``where`` holds."""
    return [
        Statement(
            f"UPDATE {server.by_primary_key(names[table])} SET {sets} "
            f"WHERE job_id IN ({numbers(part)}) AND {where}",
            params,
        )
        for table, part in ids.items()
    ]


def select_by_dedup(
    server: DatabaseServer, what: str, name: str, rows: Sequence[TaskRow], *, wait: bool = True
) -> list[Statement]:
    """Selects of ``what`` for one table's committed rows with the dedup_keys of these, which all have one.

    If another transaction is inserting one: waits for its end, or is refused (Locked) unless ``wait``.
    """
    one = "(biz_id=%d AND biz_type=%d AND dedup_key=%%s)"
    statements = []
    for first in range(0, len(rows), KEYS):
        part = rows[first : first + KEYS]
        where = " OR ".join([one % (row.biz_id, row.biz_type) for row in part])
        keys = [row.dedup_key.encode() for row in part if row.dedup_key is not None]
        source = server.by_whole_keys(name, where, wait=wait)
        statements.append(Statement(f"SELECT {what} FROM {source}", keys))
    return statements


def insert(server: DatabaseServer, name: str, rows: Sequence[TaskRow]) -> Statement:
    """Return one INSERT of many new rows into one table.

    Columns that all of them leave at their defaults are left out: a batch has a statement for each table, and
    the server takes longer to read its text than to store a row.
    """
    values: list[str] = []
    rare: list[str] = []
    params: list[str | bytes] = []
    instant = server.instant
    for row in rows:
        # Unpacked at once: access to each field by name costs as much as writing the SQL.
        (job_id, biz_id, biz_key, biz_type, status, action_time, next_time, attribute, version, attempts,
         crashes, slot_crc, slot_amount, dedup_key, last_error, created, modified,
         tries, expires_at, expired, body_length, body_sha256, *_) = row  # fmt: skip
        values.append(
            _VALUES
            % (job_id, biz_id, biz_type, status, instant(action_time), instant(next_time), version, attempts,
               crashes, slot_crc, slot_amount, instant(created), instant(modified))
        )  # fmt: skip
        params.append(attribute)
        if not (biz_key or dedup_key or last_error or tries or expires_at or expired or body_sha256):
            rare.append("")
            continue
        texts = biz_key and biz_key.encode(), dedup_key and dedup_key.encode(), last_error
        key, dedup, error = ("NULL" if one is None else "%s" for one in texts)
        params += [one for one in texts if one is not None]
        expiry = instant(expires_at) if expires_at else "NULL"
        body = f"{body_length:d},{literal(body_sha256)}" if body_sha256 else "NULL,NULL"
        rare.append(f",{key},{dedup},{error},{tries:d},{expiry},{expired:d},{body}")
    columns = _COLUMNS
    if any(rare):
        columns += _RARE_COLUMNS
        values = [plain + (more or _RARE_DEFAULTS) for plain, more in zip(values, rare, strict=True)]
    return Statement(f"INSERT INTO {name} ({columns}) VALUES ({'),('.join(values)})", params)


def insert_if(server: DatabaseServer, name: str, row: TaskRow, source: Statement) -> Statement:
    """Return an INSERT of one row that takes effect if ``source``, a FROM clause with a condition, yields
    a row."""
    head, values = insert(server, name, [row])
    into, _, rest = head.partition(" VALUES (")
    return Statement(f"{into} SELECT {rest[:-1]} FROM {source.sql}", [*values, *source.params])


def delete_oldest(server: DatabaseServer, name: str, key: str, keep: int) -> bool:
    """Delete the oldest records of a table with this key column, PURGED_TOGETHER at most, that are older than
    ``keep`` ms by the server's clock: that of this host may be days ahead. Returns whether
    more may be left."""
    old = f"SELECT {key} FROM {name} WHERE gmt_create<{server.from_now(-keep)}"
    oldest = f"{old} ORDER BY gmt_create LIMIT {PURGED_TOGETHER:d}"
    delete = f"DELETE FROM {name} WHERE {key} IN (SELECT {key} FROM ({oldest}) AS oldest)"
    return server.run([Statement(delete)])[0].matched == PURGED_TOGETHER
