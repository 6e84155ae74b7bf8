"""What calls of one process share: threads, and what several want at once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import structlog
from harness.system import System

from toc.gateway.service import MAX_CALLS, THREADS, Line, Service
from toc.model.access import Role, Token
from toc.model.errors import Busy, NotGranted, SchemaBehind, StoreUnavailable, TocError
from toc.model.task import NewTask
from toc.model.topic import Topic
from toc.operate import tokens
from toc.operate.tokens import TokenBook
from toc.sdk import batcher
from toc.sdk.batcher import Batcher


def test_callers_are_refused_while_the_process_can_start_no_thread(system: System) -> None:
    async def steps() -> None:
        many = Batcher(system.center)
        many.keep_topics()
        store = system.center.store
        book = TokenBook(store.tokens, system.center.clock)
        service = Service(system.center, book, store.identity.lease_secret())
        keyed = [NewTask("test.sync", n, 3600, dedup_key=f"key-{n}", on_conflict="replace") for n in range(6)]
        try:
            known = await asyncio.to_thread(system.center.put, NewTask("test.sync", 1, 3600))
            done: list[int] = []
            threading.stack_size(1 << 47)  # all that there is room for
            try:
                with suppress(StoreUnavailable):
                    await many.read_topics()  # perhaps one that was under way
                with pytest.raises(StoreUnavailable, match="thread"):
                    await many.read_topics()
                for _ in range(2 * batcher.UNDER_WAY):  # as often as would block a batcher for good
                    asked = [*map(many.put, keyed), many.get(known.job_id)]
                    found = await asyncio.gather(*asked, return_exceptions=True)
                    assert {type(one) for one in found} == {Busy}, found
                for _ in range(MAX_CALLS):
                    with pytest.raises(Busy, match="thread"):
                        await service.within("first", partial(done.append, 1))
            finally:
                threading.stack_size(0)
            async with asyncio.timeout(60):
                await asyncio.gather(*map(many.put, keyed))
                await service.within("first", partial(done.append, 2))
            assert done == [2], "what was refused was done nevertheless"
        finally:
            async with asyncio.timeout(60):
                await asyncio.gather(many.close(), service.close())

    asyncio.run(steps())


@pytest.mark.parametrize("error", [SchemaBehind("the topic table is gone"), ValueError("a bug")])
def test_what_fails_after_the_outcome_of_a_submit_is_logged_and_changes_it_not(
    system: System, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_args: object) -> None:
        raise error

    async def steps() -> None:
        many = Batcher(system.center)
        try:
            monkeypatch.setattr(type(system.center.catalog), "of_type", fails)
            with structlog.testing.capture_logs() as logs:
                job_ids.append((await many.put(NewTask("test.sync", 1, 3600))).job_id)
                if isinstance(error, TocError):
                    job_ids.extend(system.center.submit_many([NewTask("test.sync", 2, 3600)]))
                    job_ids.append(system.center.submit("test.sync", biz_id=3, delay=3600))
                else:  # a signal handler of the application may have raised it
                    with pytest.raises(type(error)):
                        system.center.submit("test.sync", biz_id=3, delay=3600)
                await many.close()
        finally:
            monkeypatch.undo()
        events.extend(line["event"] for line in logs)

    job_ids: list[int] = []
    events: list[str] = []
    asyncio.run(steps())
    assert events == ["submit_not_indexed"] * len(job_ids)
    assert set(system.center.store.read(job_ids)) == set(job_ids)


def test_whoever_reads_the_topics_sees_those_that_were_there_before(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics, catalog = system.center.store.topics, system.center.catalog
    has_read, answers = threading.Event(), threading.Event()

    def read(*, real: Callable[[], list[Topic]] = catalog._read) -> list[Topic]:
        found = real()
        has_read.set()
        answers.wait(60)
        return found

    async def steps() -> None:
        many = Batcher(system.center)
        many.keep_topics()  # it reads them at once
        try:
            assert await asyncio.to_thread(has_read.wait, 60)
            topics.create(Topic("new", 4711, 1))
            reading = asyncio.ensure_future(many.read_topics())
            await asyncio.sleep(0)  # it has begun to wait
            answers.set()
            await reading
            assert "new" in catalog.known()
        finally:
            answers.set()
            await many.close()

    monkeypatch.setattr(catalog, "_read", read)
    asyncio.run(steps())


def test_who_holds_a_token_makes_so_many_and_an_operator_more(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "MAX_GIVEN", 2)
    giver = Token("giver", frozenset({Role.ADMIN}), ("shop.*",))

    def make(name: str, giver: Token | None) -> Token:
        by = "an operator" if giver is None else giver.name
        wanted: dict[str, Any] = {"roles": [Role.READ], "topics": ["shop.*"], "by": by, "giver": giver}
        return tokens.create_token(system.center.store, name, clock=system.center.clock, **wanted).token

    for number in range(2):
        make(f"given-{number}", giver)
    with pytest.raises(NotGranted, match="has made 2 tokens"):
        make("given-2", giver)
    make("made", None)
    make("other", replace(giver, name="another"))


def test_one_sender_has_neither_all_places_of_a_line_nor_its_last_thread() -> None:
    async def steps() -> None:
        line, over, began = Line("test", most=14), threading.Event(), list[str]()

        def work(name: str) -> str:
            began.append(name)
            over.wait(30)
            return name

        async def ask(name: str) -> str:
            found: str = await line.run(name, lambda: work(name))
            return found

        try:
            many = [asyncio.create_task(ask("many")) for _ in range(20)]
            while sum(one.done() for one in many) < 20 - 7:  # half of the places are left
                await asyncio.sleep(0.01)
            other = [asyncio.create_task(ask("other")) for _ in range(2)]
            while Counter(began) != {"many": THREADS - 1, "other": 1}:
                await asyncio.sleep(0.01)
            many[-5].cancel()  # what nobody waits for is not begun
            over.set()
            found = await asyncio.gather(*many, *other, return_exceptions=True)
            assert Counter(type(one) for one in found)[Busy] == 20 - 7
            assert began[THREADS] == "other" or began[THREADS + 1] == "other", "in turns"
        finally:
            over.set()
            line.close()

    asyncio.run(steps())
