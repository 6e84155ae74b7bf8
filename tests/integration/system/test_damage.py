"""What is damaged harms itself alone: a row in its table, a step of the batcher."""

from __future__ import annotations

import asyncio

import pytest
from harness.system import System

from toc import NewTask, TaskStatus, Topic
from toc.model.errors import SubmitUnknown, UnreadableTask
from toc.model.topic import Delivery
from toc.operate.shown import row_record, task_shown
from toc.pull.pulls import Pulls
from toc.sdk import batcher
from toc.sdk.batcher import Batcher

TOPIC = "test.pulled"
DEEP = "[" * 300 + "1" + "]" * 300


@pytest.mark.parametrize(
    ("column", "value"),
    [(column, "'0000-00-00'") for column in ("action_time", "next_time", "gmt_create", "gmt_modified")]
    + [("attribute", f"'{text}'") for text in ("[" * 3000, DEEP, "7", '{"a": 1e999}', r'["\\ud800"]')]
    + [("body_length", "4000000000")],
)
def test_a_damaged_value_makes_its_own_row_unreadable_and_no_other(
    system: System, column: str, value: str
) -> None:
    store = system.center.store
    store.topics.create(Topic(TOPIC, 9, 4, delivery=Delivery.PULL))
    system.center.catalog.refresh()
    damaged, sound = (system.center.submit(TOPIC, biz_id=7, delay=0.01) for _ in range(2))
    assert store.server_of(damaged) == store.server_of(sound)
    server = store._shards.servers[0]._connect_within(5)
    try:
        table = store._shards.names[store._shards.table_of(damaged)]
        server.batch([f"UPDATE {table} SET {column}={value} WHERE job_id={damaged}"])
    finally:
        server.close()

    rows = store.read([damaged, sound])
    with pytest.raises(UnreadableTask):
        task_shown(rows[damaged], TOPIC, values=True)
    assert task_shown(rows[sound], TOPIC, values=True)["job_id"] == str(sound)
    assert [("unreadable" in row_record(rows[job_id], TOPIC)) for job_id in (damaged, sound)] == [True, False]
    assert store.read_tries([damaged, sound]).keys() == {damaged, sound}

    async def steps() -> None:
        pulls = Pulls(system.center, system.center.store.identity.lease_secret())
        try:
            got: set[int] = set()
            async with asyncio.timeout(60):
                while sound not in got:
                    got |= {one.task.job_id for one in await pulls.pull([TOPIC], most=2, wait=5)}
        finally:
            await pulls.stop()

    asyncio.run(steps())
    if column in ("action_time", "attribute", "body_length"):  # its consumers could not be told of it
        row = system.row(damaged)
        assert row.status == TaskStatus.DEAD
        assert "UnreadableTask" not in (row.last_error or "")
        assert "cannot be read" in (row.last_error or "")


def test_no_caller_waits_for_ever_for_a_step_that_failed(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    system.create_topics()
    monkeypatch.setattr(batcher, "GIVE_UP_SECONDS", 0.1)

    async def steps() -> None:
        one = Batcher(system.center)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it hears of the error
        (submits,) = one._submits
        send = submits._send
        monkeypatch.setattr(submits, "_send", lambda _, answer: answer([]))
        with pytest.raises(SubmitUnknown):
            await one.put(NewTask("test.sync", 1, 60))
        monkeypatch.setattr(submits, "_send", send)
        monkeypatch.setattr(batcher, "GIVE_UP_SECONDS", 60.0)
        assert (await one.put(NewTask("test.sync", 2, 60))).job_id > 0
        await one.close()

    asyncio.run(steps())
