"""Named requests: each database remembers the answers to those that changed its rows.

A request's row is written by the transaction that makes its change (``write``), beside the task's row.
Two requests of one name but for different tasks may concern different databases. So the name is claimed
first in the database that its key chooses, with what was asked; a claim has no answer.
"""

import json
import time
from collections.abc import Iterable, Sequence

from toc.model.documents import parse_object
from toc.model.errors import RequestReused, SchemaBehind, StoreUnavailable
from toc.model.sharding import BizId
from toc.model.task import Put, PutOutcome, Request
from toc.store.servers.server import LOST_FAST_SECONDS, DatabaseServer, Lost, Result, Statement
from toc.store.servers.shards import Shards
from toc.store.tasks import rows as sql

Answered = dict[bytes, tuple[bytes, str | None]]
"""What was asked under each key, and the answer; the answer is None for a mere claim."""


class Requests:
    """The tables of requests. Thread-safe."""

    def __init__(self, shards: Shards, databases: int) -> None:
        self._shards = shards
        self.databases = databases

    def claim(self, request: Request) -> None:
        """Bind the name of a request for many tasks to what it asks for. Raises RequestReused."""
        for error in self.claim_each([(request, None)]).values():
            raise error

    def claim_each(self, wanted: Iterable[tuple[Request, int | None]]) -> dict[Request, RequestReused]:
        """Bind the names of requests to what they ask for. Returns those that are bound to something else.

        A name is claimed in the database that its key chooses. No claim is needed, and none is made, if the
        ``table`` of the request's row, which is given with it, is in that database: the row of the request
        will be there. None is made either while the server of that database is away or hangs. During that
        time, the reuse of a name for another task may go unnoticed.
        """
        homes: dict[int, dict[bytes, Request]] = {}
        wanted = list(wanted)
        for request, table in wanted:
            home = int.from_bytes(request.key[:4]) % self.databases
            if table is None or table % self.databases != home:
                homes.setdefault(home, {}).setdefault(request.key, request)
        refused: dict[Request, RequestReused] = {}
        for server, parts in self._shards.group_tables(homes).items():
            statements = []
            for home, part in parts.items():
                name = self._shards.request_names[home]
                values = ",".join(
                    f"({sql.literal(one.key)},{sql.literal(one.payload)},{server.from_now(0)})"
                    for _, one in sorted(part.items())
                )
                insert = f"INSERT INTO {name} (request_key,payload,gmt_create) VALUES {values}"
                statements += [Statement(server.or_lock(insert)), select(name, part.values())]
            try:
                found = answered(self._ask(server, statements)[1::2])
            except (StoreUnavailable, SchemaBehind):
                continue
            refused |= {one: reused for one, _ in wanted if (reused := _reused(one, found)) is not None}
        return refused

    def answer(self, request: Request, biz: BizId) -> Put | None:
        """Return the answer that a request about a task of this biz_id got before, None if there is none.

        Raises RequestReused, and StoreUnavailable soon if the server hangs.
        """
        table = biz.crc % self._shards.tables
        server, name = self._shards.server_of[table], self._shards.request_names[table]
        return answer_of(request, answered(self._ask(server, [select(name, [request])])))

    def _ask(self, server: DatabaseServer, statements: Sequence[Statement]) -> list[Result]:
        """Run statements, which may be run twice, on a server. Raises StoreUnavailable once it is known to be
        away or to hang: no other call may need it, and so find out."""
        health = self._shards.health[server]
        if health.away is not None:
            raise health.away
        began = time.monotonic()
        try:
            sent = server.begin(statements)
            if sent is None:  # no connection is idle; opening one would take as long as the server likes
                if not health.examine(lambda _seconds: False):
                    return server.run(statements, outwait=False)
            elif sent.connection.answered(health.patience) or not health.examine(sent.connection.answered):
                return server.results(sent)
            else:
                server.abandon(sent)
        except StoreUnavailable as exc:
            health.note(exc)
            took = time.monotonic() - began
            if not isinstance(exc, Lost) or took > LOST_FAST_SECONDS or health.away is not None:
                raise
            return server.run(statements, outwait=False)
        raise StoreUnavailable(f"{server.name}: it does not answer")

    def purge(self, database: int, keep: int) -> bool:
        """Delete the oldest rows of a database that are older than ``keep`` ms. Returns whether more may be
        left."""
        server, name = self._shards.server_of[database], self._shards.request_names[database]
        return sql.delete_oldest(server, name, "request_key", keep)


def select(name: str, wanted: Iterable[Request]) -> Statement:
    """Return the SELECT for ``answered``."""
    keys = ",".join(sql.literal(one.key) for one in wanted)
    return Statement(f"SELECT request_key,payload,answer FROM {name} WHERE request_key IN ({keys})")


def answered(results: Iterable[Result]) -> Answered:
    """Parse the results of ``select``."""
    with sql.understood():
        return {key: (payload, answer) for result in results for key, payload, answer in result.rows}


def answer_of(request: Request | None, found: Answered) -> Put | None:
    """Return the answer that a request got before, None without one. Raises RequestReused."""
    if request is None or request.key not in found:
        return None
    if (reused := _reused(request, found)) is not None:
        raise reused
    answer = found[request.key][1]
    if answer is None:
        return None
    with sql.understood():
        first = parse_object(answer)
        return Put(int(first["job_id"]), PutOutcome(first["outcome"]))


def _reused(request: Request, found: Answered) -> RequestReused | None:
    """Return the error if the request's name is bound to something else."""
    if request.key in found and found[request.key][0] != request.payload:
        return RequestReused("another request used this name within the last day")
    return None


def insert(server: DatabaseServer, name: str, answers: Iterable[tuple[Request, Put]]) -> Statement:
    """Return the INSERT of requests with their answers."""
    answers = list(answers)
    values = ",".join(f"({_values(server, request)})" for request, _ in answers)
    return Statement(f"INSERT INTO {name} {_COLUMNS} VALUES {values}", [_answer(put) for _, put in answers])


def insert_if(server: DatabaseServer, name: str, request: Request, put: Put, source: str) -> Statement:
    """Return the INSERT of a request with its answer that takes effect if ``source``, a FROM clause, yields a
    row."""
    select = f"SELECT {_values(server, request)} FROM {source}"
    return Statement(f"INSERT INTO {name} {_COLUMNS} {select}", [_answer(put)])


_COLUMNS = "(request_key,payload,answer,gmt_create)"


def _values(server: DatabaseServer, request: Request) -> str:
    """The server's clock also says when they are purged."""
    return f"{sql.literal(request.key)},{sql.literal(request.payload)},%s,{server.from_now(0)}"


def _answer(put: Put) -> str:
    return json.dumps({"job_id": str(put.job_id), "outcome": put.outcome.value})
