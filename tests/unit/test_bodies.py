"""Bodies of tries: who holds them."""

import sys
from types import SimpleNamespace
from typing import Any

from toc.model.task import Content
from toc.worker.entry import State
from toc.worker.run.bodies import BodyReader, Fetched


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
