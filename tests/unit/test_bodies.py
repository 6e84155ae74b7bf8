"""Bodies of tries: who holds them."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from harness.patience import until

from toc.model.handler import Handler
from toc.model.task import Body, Content, Task
from toc.model.topic import Slot, Topic
from toc.worker.entry import UNREAD, Entry, State
from toc.worker.run.bodies import BodyReader, Fetched
from toc.worker.run.handler_threads import HandlerThreads


class Answers(dict[int, Content]):
    unanswered: dict[int, Any] = {}  # noqa: RUF012 - never changed


def test_what_ends_the_waiting_for_a_body_does_not_hold_the_body() -> None:
    data = bytes(1000)
    before = sys.getrefcount(data)
    store: Any = SimpleNamespace(
        tables_of_server=lambda: [[0]],
        server_of=lambda _job_id: 0,
        bodies=SimpleNamespace(read=lambda _: Answers({7: Content("text/plain", data)})),
    )
    reader = BodyReader(SimpleNamespace(store=store), SimpleNamespace())  # type: ignore[arg-type] # no more is used
    entry: Any = SimpleNamespace(
        job_id=7, row=SimpleNamespace(body_length=1000, version=0), state=State.WAITS
    )
    fetched: list[Fetched] = []
    end = reader.fetch_async([entry], fetched.append)
    reader._read(reader._wanted[0])
    ((ready, bodies),) = fetched
    assert (ready, bodies[7].content.data) == ([entry], data)
    fetched.clear()
    del bodies
    assert sys.getrefcount(data) == before, "it would stay in memory until the end of the patience"
    end()
    assert not fetched, "nobody is told twice"


@pytest.mark.parametrize("batch", [None, 1])
def test_a_thread_without_work_does_not_hold_the_body_of_its_last_task(batch: int | None) -> None:
    data = bytes(1000)
    before = sys.getrefcount(data)
    sizes: list[int] = []

    def handle(tasks: Task | list[Task]) -> None:
        sizes.extend(len(task.body or b"") for task in (tasks if isinstance(tasks, list) else [tasks]))

    calls: Any = SimpleNamespace(
        tools=SimpleNamespace(clock=time),
        wanted=None,
        concurrency=lambda _topic: 0,
        bodies=SimpleNamespace(fetch=lambda entries: (entries, {7: Body(1000, Content("text/plain", data))})),
        last_look=lambda entries, _now: entries,
        succeeded=lambda _entry: None,
        returned=lambda _entries, _errors: None,
    )
    threads = HandlerThreads(["t"], 1, calls)
    entry = Entry(7, Slot("t", 0), 0.0, Topic("t", 1, 1), Handler.of("t", handle, batch), 0, 0.0)
    entry.row = UNREAD._replace(job_id=7, attribute="{}", body_length=1000)
    threads.start()
    threads.put([entry])
    until(lambda: bool(sizes) and threads._idle == 1)
    held = sys.getrefcount(data) - before
    threads.close()
    for thread in threads.threads:
        thread.join()
    assert (sizes, held) == ([1000], 0)
