"""How everything stands at the end: every row of the real table, every entry of the real queues."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from toc import Settings, TimeoutCenter, Topic
from toc.index.calls import Call
from toc.index.queues import Queues
from toc.model.topic import Slot
from toc.store.servers.server import Statement
from toc.store.servers.shards import Layout, Shards

PAGE = 20_000


class Row(NamedTuple):
    """What the checker wants of a row. Instants are milliseconds; ``biz`` is what was submitted as biz_id."""

    job_id: int
    biz: int | str
    biz_type: int
    status: int
    action_time: int
    next_time: int
    version: int
    attempts: int
    crashes: int
    slot_crc: int
    slot_amount: int


class Place(NamedTuple):
    """Where an id stands in the index: ``queue`` is store, prepare or dead."""

    queue: str
    slot: Slot
    score: float


@dataclass(frozen=True)
class Final:
    """``rows`` is read once, from beginning to end; ``index`` says where each id stands, if there is one."""

    topics: Mapping[int, Topic]
    rows: Iterable[Row]
    index: Mapping[int, list[Place]]
    now_ms: int
    indexed: bool = True


def read_final(center: TimeoutCenter) -> Final:
    """Read it all now. The index is read at once, the rows when they are asked for."""
    topics = {topic.biz_type: topic for topic in center.store.topics.list()}
    index: dict[int, list[Place]] = {}
    for topic in topics.values() if center.queues.present else ():
        for number in range(topic.slot_amount):
            for job_id, place in _entries(center.queues, Slot(topic.name, number)):
                index.setdefault(job_id, []).append(place)
    return Final(topics, _rows(center.settings), index, center.clock.now_ms(), center.queues.present)


def _entries(queues: Queues, slot: Slot) -> Iterator[tuple[int, Place]]:
    keys = queues.keys(slot)
    for queue, key in (("store", keys.store), ("prepare", keys.prepare), ("dead", keys.dead)):
        start = 0
        while True:
            call = Call(keys.hash_slot, ("ZRANGE", key, start, start + PAGE - 1, "WITHSCORES"))
            queues.run([call])
            if isinstance(call.result, Exception):
                raise call.result
            found = call.result
            for member, score in zip(found[::2], found[1::2], strict=True):
                yield int(member), Place(queue, slot, float(score))
            if len(found) < 2 * PAGE:
                break
            start += PAGE


def _rows(settings: Settings) -> Iterator[Row]:
    layout = Layout(
        settings.need_database_urls(), settings.databases, settings.tables, settings.database_prefix
    )
    shards = Shards(layout, connect_timeout=5, read_timeout=60, write_timeout=60, pool_size=1)
    try:
        for table, name in enumerate(shards.names):
            server = shards.server_of[table]
            instants = ",".join(server.milliseconds(column) for column in ("action_time", "next_time"))
            select = (
                f"SELECT job_id,biz_id,biz_type,status,{instants},version,attempts,crashes,slot_crc,"
                f"slot_amount,{server.text('biz_key')} FROM {name}"
            )
            last = 0
            while True:
                page = server.run(
                    [Statement(f"{select} WHERE job_id > {last:d} ORDER BY job_id LIMIT {PAGE:d}")]
                )[0].rows
                for *numbers, biz_key in page:
                    row = Row(*numbers)
                    yield row if biz_key is None else row._replace(biz=biz_key)
                if len(page) < PAGE:
                    break
                last = page[-1][0]
    finally:
        shards.close()
