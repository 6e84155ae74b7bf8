"""A MariaDB with many pending rows: filled once, in a directory that keeps them, then measured as often as
wanted (``benchmarks.rows``).

The rows are made by text, for ``LOAD DATA``, in the order of their primary key; a sample of them is compared,
in the database, with what the real submit inserts. The indexes come afterwards: sorting is cheaper than
inserting at random places. The filling server writes its log late, which a crash would show; the measured
one never does.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pymysql
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB
from benchmarks.system import warn
from toc import NewTask, Topic
from toc.model.clock import Clock, from_ms
from toc.model.sharding import JOB_ID_EPOCH_MS
from toc.sdk.submission import RowMaker
from toc.store.migrate import Migrator
from toc.store.servers.mysql import MySqlServer
from toc.store.tasks import rows as sql

DATABASES, TABLES = 8, 64
TOPICS = 4
"""As benchmarks.peers.toc makes them: their biz_types are 1 to 4."""
SLOTS = 16
DAY_MS = 86_400_000
MADE_DAYS, FIRST_DAY, LAST_DAY = 30, 1, 30
"""The rows were made during so many days before, and are due on these days after the filling began."""
PARTS = 3
"""How many processes fill tables."""
CHUNK = 20_000
"""Rows of one LOAD DATA."""
SAMPLE = 300
BYTES_PER_ROW = 400
KEEP_FREE = 25_000_000_000
"""Bytes of the disk that the filling leaves to others."""
FILLING_POOL = "2G"
FILLING = (
    "innodb_flush_log_at_trx_commit=0",
    "innodb_doublewrite=0",
    "innodb_log_file_size=1G",
    "innodb_sort_buffer_size=64M",
)
LOADED = (
    "@job_id,@created,biz_id,biz_key,biz_type,@due,attribute,slot_crc) SET job_id=@job_id,"
    "gmt_create=@created,gmt_modified=@created,action_time=@due,next_time=@due,status=0,version=0,"
    f"attempts=0,crashes=0,slot_amount={SLOTS}"
)


class TooFull(Exception):
    """The disk has too little room."""


@dataclass(frozen=True)
class Rows:
    """Which rows there are: ``count`` of them. ``begin``: when the filling began (ms)."""

    count: int
    begin: int

    @property
    def first_due(self) -> int:
        """When the first one is due (ms)."""
        return self.begin + FIRST_DAY * DAY_MS

    def job_id(self, number: int) -> int:
        """Return the job_id of a row."""
        crc = zlib.crc32(biz_key(number).encode())
        return self.made(number) - JOB_ID_EPOCH_MS << 22 | (crc & 1023) << 12 | number & 4095

    def made(self, number: int) -> int:
        """Return when a row was made (ms)."""
        return self.begin - MADE_DAYS * DAY_MS + number * MADE_DAYS * DAY_MS // self.count

    def due(self, number: int) -> int:
        """Return when a row is due (ms): rows made one after another are due far apart."""
        return self.first_due + (number * 2_654_435_761 % 2**32) * (LAST_DAY - FIRST_DAY) * DAY_MS // 2**32

    def lines(self, numbers: Iterable[int], tables: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Yield the table of each row that is in one of these, and its line for LOAD DATA."""
        crc32, sha256 = zlib.crc32, hashlib.sha256
        begin, first_due = self.begin - MADE_DAYS * DAY_MS, self.first_due
        made_span, due_span = MADE_DAYS * DAY_MS, (LAST_DAY - FIRST_DAY) * DAY_MS
        chosen = set(tables)
        count, wanted = self.count, [table in chosen for table in range(TABLES)]
        day_names: dict[int, str] = {}
        clock = [time.strftime("%H:%M:%S", time.gmtime(second)) for second in range(86_400)]
        thousandths = [f".{ms:03d}" for ms in range(1000)]

        def instant(ms: int) -> str:
            day, rest = divmod(ms, DAY_MS)
            name = day_names.get(day)
            if name is None:
                name = day_names[day] = time.strftime("%Y-%m-%d ", time.gmtime(day * 86_400))
            return name + clock[rest // 1000] + thousandths[rest % 1000]

        for n in numbers:
            key = f"order-{n}"
            data = key.encode()
            crc = crc32(data)
            if not wanted[crc % TABLES]:
                continue
            made = begin + n * made_span // count
            due = first_due + (n * 2_654_435_761 % 2**32) * due_span // 2**32
            yield (
                crc % TABLES,
                (
                    f"{made - JOB_ID_EPOCH_MS << 22 | (crc & 1023) << 12 | n & 4095}\t{instant(made)}\t"
                    f"{int.from_bytes(sha256(data).digest()[:8], 'big') >> 1}\t{key}\t{n % TOPICS + 1}\t"
                    f'{instant(due)}\t{{"amount":{n % 9973},"channel":"web","currency":"EUR",'
                    f'"customer":{n * 7919 % 10_000_019},"order":"{key}",'
                    f'"reason":"not paid in time"}}\t{crc}\n'
                ),
            )


def biz_key(number: int) -> str:
    """Return the biz_id of a row: a text, which is stored with a hash, so that ids that follow each other
    lie far apart in the index by biz_id."""
    return f"order-{number}"


def database(directory: Path, pool: str, config: Sequence[str] = ()) -> MariaDB:
    """Return the server of a directory; it may take its time to stop, because it has much to write."""
    server = MariaDB(directory / "mariadb", buffer_pool=pool, config=config)
    server.stop_timeout, server.start_timeout = 900.0, 300.0
    return server


def filled(directory: Path) -> Rows | None:
    """Return the rows of a directory, None if it is not filled."""
    note = directory / "filled.json"
    return Rows(**json.loads(note.read_text())) if note.exists() else None


def fill(directory: Path, count: int) -> Rows:
    """Fill a directory, which must not exist. Raises TooFull."""
    directory.mkdir(mode=0o711, parents=True)
    free = shutil.disk_usage(directory).free - KEEP_FREE
    if free < count * BYTES_PER_ROW:
        raise TooFull(
            f"{count:,} rows take about {count * BYTES_PER_ROW / 1e9:.0f} GB; {free / 1e9:.0f} are free"
        )
    rows = Rows(count, time.time_ns() // 1_000_000)
    with database(directory, FILLING_POOL, FILLING) as server:
        migrator = Migrator([server.url], databases=DATABASES, tables=TABLES)
        migrator.upgrade()
        Filler(directory, rows, server.url).compare()
        parts = [
            multiprocessing.Process(target=_fill, args=(directory, rows, server.url, n)) for n in range(PARTS)
        ]
        for part in parts:
            part.start()
        for part in parts:
            part.join()
        if any(part.exitcode for part in parts):
            raise RuntimeError("a part was not filled")
        if behind := [str(status) for status in migrator.check() if status.behind]:
            raise RuntimeError(f"the schema is not the project's: {behind}")
        (directory / "tables.json").write_text(json.dumps(tables(server.url)))
    (directory / "filled.json").write_text(json.dumps(asdict(rows)))
    return rows


def tables(url: str) -> dict[str, str]:
    """Return how each table of all databases is made, by name."""
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT CONCAT(table_schema, '.', table_name) FROM information_schema.tables "
            "WHERE table_schema LIKE 'toc\\_%'"
        )
        found = {}
        for (name,) in cursor.fetchall():
            cursor.execute(f"SHOW CREATE TABLE {name}")
            found[name] = re.sub(r" AUTO_INCREMENT=\d+", "", str(cursor.fetchone()[1]))
        return found


def renew(url: str, fresh: Path) -> None:
    """Make the tables of a kept database as those of a fresh one are, which lie beside the rows: until the
    first release the schema is edited in place. Raises RuntimeError if those of the rows differ."""
    wanted, kept = json.loads((fresh / "tables.json").read_text()), tables(url)
    differ = [name for name, made in wanted.items() if kept.get(name) != made]
    if rows := [name for name in differ if ".timeout_task_" in name]:
        raise RuntimeError(f"the rows are of another schema, such as in {rows[0]}: fill another directory")
    with connect(url) as connection, connection.cursor() as cursor:
        for name in differ:
            warn(f"made anew: {name}")
            cursor.execute(f"DROP TABLE IF EXISTS {name}")
            cursor.execute(f"USE {name.partition('.')[0]}")
            cursor.execute(wanted[name])


def _fill(directory: Path, rows: Rows, url: str, part: int) -> None:
    Filler(directory, rows, url, part).fill()


class Filler:
    """Fills some tables of a fresh database."""

    def __init__(self, directory: Path, rows: Rows, url: str, part: int = 0) -> None:
        self._file = directory / f"lines-{part}"
        self._rows = rows
        self._url = url
        self._tables = range(part, TABLES, PARTS)
        self._began = time.monotonic()
        self._cursor = connect(url).cursor()
        self._cursor.execute("SET SESSION time_zone='+00:00'")

    def fill(self) -> None:
        """Load all lines, then add the indexes, which makes the tables as they were."""
        names = {table: f"toc_{table % DATABASES}.timeout_task_{table:04d}" for table in self._tables}
        made = {name: self._made(name) for name in names.values()}
        indexes = {
            name: re.findall(r"^  ((?:UNIQUE )?KEY `(\w+)` .*?),?$", text, re.M)
            for name, text in made.items()
        }
        for name, found in indexes.items():
            self._cursor.execute(
                f"ALTER TABLE {name} {', '.join(f'DROP INDEX {index}' for _, index in found)}"
            )
        self._load(names)
        for number, (name, found) in enumerate(indexes.items(), 1):
            self._room()
            self._cursor.execute(f"ALTER TABLE {name} {', '.join(f'ADD {what}' for what, _ in found)}")
            if self._made(name) != made[name]:
                raise RuntimeError(f"{name} is not as the migration made it: {self._made(name)}")
            if number % 4 == 0:
                self._say(f"indexes of {number} of {len(indexes)} tables")

    def _load(self, names: dict[int, str]) -> None:
        waiting: dict[int, list[str]] = {table: [] for table in names}
        loaded = 0
        for table, line in self._rows.lines(range(self._rows.count), self._tables):
            some = waiting[table]
            some.append(line)
            if len(some) == CHUNK:
                self._load_lines(names[table], some)
                loaded += CHUNK
                some.clear()
                if loaded % (25 * CHUNK) == 0:
                    self._room()
                    self._say(f"{loaded:,} rows")
        for table, some in waiting.items():
            self._load_lines(names[table], some)
            loaded += len(some)
        self._say(f"all {loaded:,} rows")

    def _load_lines(self, table: str, lines: list[str]) -> None:
        self._file.write_text("".join(lines))
        self._cursor.execute(
            f"LOAD DATA LOCAL INFILE '{self._file}' INTO TABLE {table} CHARACTER SET utf8mb4 "
            f"FIELDS TERMINATED BY '\\t' ESCAPED BY '' ({LOADED}"
        )
        if self._cursor.rowcount != len(lines):
            raise RuntimeError(f"{self._cursor.rowcount} of {len(lines)} rows of {table} were loaded")
        self._file.unlink()

    def compare(self) -> None:
        """Raise RuntimeError unless loaded rows equal, byte for byte, what the real submit inserts."""
        numbers = sorted(random.sample(range(self._rows.count), min(SAMPLE, self._rows.count)))
        self._cursor.execute("CREATE DATABASE compared")
        for name in ("compared.inserted", "compared.loaded"):
            self._cursor.execute(f"CREATE TABLE {name} LIKE toc_0.timeout_task_0000")
        self._load_lines("compared.loaded", [line for _, line in self._rows.lines(numbers, range(TABLES))])
        insert = sql.insert(
            MySqlServer(make_url(self._url), [0]), "compared.inserted", [self._encoded(n) for n in numbers]
        )
        self._cursor.execute(insert.sql, insert.params)
        found = []
        for name in ("compared.inserted", "compared.loaded"):
            self._cursor.execute(f"SELECT * FROM {name} ORDER BY job_id")
            found.append(self._cursor.fetchall())
        differ = [pair for pair in zip(*found, strict=True) if pair[0] != pair[1]]
        if differ or len(found[0]) != len(numbers):
            raise RuntimeError(f"{len(differ)} rows differ from those of a submit, such as {differ[:1]}")
        self._cursor.execute("DROP DATABASE compared")

    def _encoded(self, number: int) -> Any:
        """Return the row that a submit of this task makes; only the job_id's last 12 bits, which are random,
        are those of the line."""
        rows = self._rows
        table, _ = next(rows.lines([number], range(TABLES)))

        class Then(Clock):
            def now_ms(self) -> int:
                return rows.made(number)

        key = biz_key(number)
        attribute = {
            "amount": number % 9973,
            "channel": "web",
            "currency": "EUR",
            "customer": number * 7919 % 10_000_019,
            "order": key,
            "reason": "not paid in time",
        }
        topic = Topic(f"bench.order-{number % TOPICS}", number % TOPICS + 1, SLOTS)
        task = NewTask(topic.name, key, action_time=from_ms(rows.due(number)), attribute=attribute)
        row = RowMaker(Then(), 3650 * 86_400, 0).submission(task, lambda _name: topic).row
        job_id = rows.job_id(number)
        if row.job_id >> 12 != job_id >> 12 or (job_id >> 12) % TABLES != table:
            raise RuntimeError(f"row {number} is not where a submit puts it")
        return row._replace(job_id=job_id)

    def _made(self, table: str) -> str:
        self._cursor.execute(f"SHOW CREATE TABLE {table}")
        return str(self._cursor.fetchone()[1])

    def _room(self) -> None:
        if (free := shutil.disk_usage(self._file.parent).free) < KEEP_FREE:
            raise TooFull(f"only {free / 1e9:.1f} GB of the disk are free")

    def _say(self, what: str) -> None:
        warn(f"[{time.monotonic() - self._began:5.0f} s] {what}")


def connect(url: str) -> Any:
    """Return a connection to a server, as its administrator."""
    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname or "",
        port=parts.port or 0,
        user=parts.username,
        password=parts.password or "",
        autocommit=True,
        local_infile=True,
    )
