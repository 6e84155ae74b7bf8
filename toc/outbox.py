"""An outbox: tasks submitted in a transaction on any database, and brought to toc after its commit.

::

    outbox.metadata.create_all(engine)          # one table, toc_outbox, beside the application's own
    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.submit(session, "order.close", biz_id=order.id, delay=timedelta(minutes=30))
    outbox.drain(engine, center)                # from a thread or a schedule, such as each second

For applications whose rows are not on the server of the task table. A record gets a dedup_key when it is
made. So a drain that dies half-way, or two at once, make one task of it: toc keeps the key as long as the
task's row, by default for three days after its end. One that replaces (``on_conflict``) is a request of its
own besides, whose answer toc keeps for a day.
"""

import json
import secrets
from collections.abc import Coroutine
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session
from typing_extensions import Unpack

from toc.model.clock import from_ms
from toc.model.errors import ConfigError, InvalidInput, SchemaBehind, TocError, Unavailable, UnfitServer
from toc.model.sharding import BizId
from toc.model.task import MAX_BODY, NewTask, Request
from toc.model.topic import Topic, TopicType
from toc.observe.log import get_logger
from toc.sdk.async_client import AsyncTimeoutCenter
from toc.sdk.client import TimeoutCenter, process_clock
from toc.sdk.handlers import TaskFields
from toc.sdk.submission import RowMaker
from toc.store.servers.shards import OF_TABLES

log = get_logger(__name__)

TOGETHER = 500
"""Most records that are read, and removed, at once."""
CENTURY = 3.2e9
"""Seconds: a later deadline is refused at once; TOC_MAX_DELAY counts when the record is drained."""

metadata = sa.MetaData()
table = sa.Table(
    "toc_outbox",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("body", sa.LargeBinary(1 << 24)),
    # Why toc has refused the task. Set it to NULL to have it submitted again.
    sa.Column("error", sa.Text),
)
"""``table.to_metadata(yours)`` makes it a part of an application's own schema."""


def submit(
    session: Session | sa.Connection, topic: str, *, biz_id: int | str, **fields: Unpack[TaskFields]
) -> None:
    """Write a task into the outbox, in the transaction of the session or connection.

    ``fields`` are those of ``TimeoutCenter.submit`` without ``target`` and ``url``; ``delay`` counts from
    now. Of an instant topic, too, what is not due later than now needs ``past="run"``: its type is not known
    here. Raises an InvalidInput, also for an AsyncSession outside its ``run_sync``, but not for what only the
    task table knows, such as an unknown topic (``drain``).
    """
    task, request = NewTask(topic, biz_id, **fields), f"outbox-{secrets.token_hex(16)}"
    if task.dedup_key is None:
        task = task._replace(dedup_key=request)
    dated = task.delay is not None or task.action_time is not None
    kind = TopicType.TIMED if dated else TopicType.INSTANT
    maker = RowMaker(process_clock(), CENTURY, MAX_BODY)
    row = maker.submission(task, lambda name: Topic(name, 1, 1, topic_type=kind)).row
    record = task._asdict() | {
        "delay": None,
        "action_time": row.action_time if dated else None,
        "attribute": json.loads(row.attribute),
        "expires_at": row.expires_at,
        "expires_in": 0 if task.expires_in is not None and not row.expires_at else None,
        "body": None,
        "request": request,
    }
    answer: object = session.execute(table.insert().values(task=json.dumps(record), body=task.body))
    if isinstance(answer, Coroutine):  # of an AsyncSession: it has written nothing
        answer.close()
        raise InvalidInput(
            "an AsyncSession or AsyncConnection works within its run_sync: "
            "await session.run_sync(lambda session: outbox.submit(session, ...))"
        )


def drain(engine: sa.Engine, center: TimeoutCenter | AsyncTimeoutCenter) -> int:
    """Submit what the outbox holds, and remove it. Returns how many tasks that were.

    A task whose time has passed is due at once. One that toc refuses, such as one that has expired, or cannot
    read stays, with its ``error``, and is logged (``outbox_refused``). Raises Unavailable, SchemaBehind or
    UnfitServer if a server or table of toc could not be used, once the rest is submitted; ConfigError for
    settings of the center, of which no record is to blame; and the errors of ``engine``.
    """
    center = center.sync if isinstance(center, AsyncTimeoutCenter) else center
    done, after = 0, 0
    away: dict[tuple[int, int | None], TocError] = {}  # servers, and single tables
    servers = {(number, None) for number, _ in enumerate(center.store.tables_of_server())}
    while not servers <= away.keys():
        with engine.connect() as connection:
            waiting = sa.select(table.c.id, table.c.task, table.c.body.is_not(None).label("has_body"))
            waiting = waiting.where(table.c.error.is_(None), table.c.id > after)
            records = connection.execute(waiting.order_by(table.c.id).limit(TOGETHER)).all()
        if not records:
            break
        after = records[-1].id
        submitted, refused = list[int](), dict[int, str]()
        for record in records:
            try:
                task, request = _task(record)
                biz = BizId.of(task.biz_id)
                server, number = center.store.server_of_biz(biz), biz.crc % len(center.store.tables)
                if not away.keys().isdisjoint({(server, None), (server, number)}):
                    continue
                if record.has_body:
                    with engine.connect() as connection:
                        body = connection.scalar(sa.select(table.c.body).where(table.c.id == record.id))
                    if body is None:  # another drain has submitted and removed it
                        continue
                    task = task._replace(body=body)
                try:
                    center.put(task, request=request)
                    submitted.append(record.id)
                except (Unavailable, SchemaBehind, UnfitServer) as exc:
                    away[server, number if isinstance(exc, OF_TABLES) else None] = exc
            except ConfigError:
                raise
            except InvalidInput as exc:
                refused[record.id] = str(exc)
            except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as exc:
                refused[record.id] = f"it is no record of this version: {exc!r}"
        with engine.begin() as connection:
            connection.execute(sa.delete(table).where(table.c.id.in_(submitted)))
            for number, why in refused.items():
                log.warning("outbox_refused", record=number, error=why)
                # The application's character set may lack a letter.
                plain = why.encode("ascii", "backslashreplace").decode()
                connection.execute(sa.update(table).where(table.c.id == number).values(error=plain))
        done += len(submitted)
    for error in away.values():
        raise error
    return done


def _task(record: sa.Row[Any]) -> tuple[NewTask, Request | None]:
    """Return the task of a record without its body, and the request that it is, if it must not be repeated.
    Its time may have passed meanwhile."""
    fields = json.loads(record.task)
    name, keeps = fields.pop("request"), fields["on_conflict"] == "keep"
    request = None if keeps else Request.of("outbox", name, record.task.encode())
    for name in ("action_time", "expires_at"):
        fields[name] = from_ms(fields[name]) if fields[name] else None
    return NewTask(**{**fields, "past": "run"}), request
