"""Handlers that take a payload, in the kit; what a typing mistake is told, here and by type checkers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from harness.patience import until
from harness.rows import known
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, field_serializer
from structlog.testing import capture_logs
from typing_extensions import TypedDict

from toc import Dead, NewTask, Retry, Task, TaskStatus, TimeoutCenter
from toc.model.errors import DuplicateHandler, InvalidHandler, InvalidPayload, InvalidTopic
from toc.model.raised import Misfit
from toc.operate.bulk_jobs import redrive
from toc.testing import Toc

# Handlers that take a payload, in the kit; and what a typing mistake is told.


class CloseOrder(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    order: int
    total: Decimal
    placed: datetime | None = None


@dataclass
class Remind:
    member: int
    text: str = ""


@dataclass
class Priced:
    price: float | None


class Ship(TypedDict):
    order: int
    lines: list[str]


class BuyTask(BaseModel):
    what: str


class Unfinished(BaseModel):
    later: NotYet  # type: ignore[name-defined]  # noqa: F821


@pytest.fixture
def center(toc: Toc) -> TimeoutCenter:
    found = TimeoutCenter()
    toc.use(found)
    return found


CLOSE = CloseOrder(order=42, total=Decimal("9.90"), placed=datetime(2030, 1, 31, 12, tzinfo=UTC))


def test_a_handler_gets_the_payload_submitted_and_is_called_as_ever(toc: Toc, center: TimeoutCenter) -> None:
    got: list[Any] = []

    @center.handler("p.model")
    def close(order: CloseOrder, task: Task) -> str:
        """Close it."""
        got.append((order, task.biz_id))
        return "closed"

    @center.handler("p.dataclass")
    async def remind(what: Remind) -> str:
        got.append(what)
        return "reminded"

    @center.handler("p.dict")
    def ship(what: Ship) -> None:
        got.append(what)

    @center.handler("p.named-task")
    def buy(what: BuyTask) -> None:
        got.append(what)

    close.submit(CLOSE, biz_id=42, delay="30m")
    remind.submit(Remind(7, Mood.BLUE), biz_id=7, delay="31m")
    ship.submit({"lines": ["a"], "order": 1}, biz_id=1, delay="32m")
    buy.submit(BuyTask(what="tea"), biz_id=1, delay="33m")
    task = toc.assert_submitted("p.model", biz_id=42, due_in="30m", attribute={"total": "9.90"})
    assert close.payload(task) == CLOSE
    assert toc.assert_submitted("p.model", attribute=CLOSE) == task
    toc.refute_submitted("p.model", attribute=CLOSE.model_copy(update={"order": 7}))
    assert toc.advance("1h") == 4
    assert got == [(CLOSE, 42), Remind(7, "blue"), {"order": 1, "lines": ["a"]}, BuyTask(what="tea")]
    assert (close(CLOSE, task), asyncio.run(remind(Remind(8)))) == ("closed", "reminded")
    assert (close.__name__, close.__doc__, close.topic) == ("close", "Close it.", "p.model")
    assert toc.run(close, CLOSE).status is TaskStatus.PROCESSED
    assert toc.run("p.dataclass", Remind(9)).status is TaskStatus.PROCESSED


def test_a_payload_longer_than_an_attribute_is_the_body(toc: Toc, center: TimeoutCenter) -> None:
    got: list[Remind] = []

    @center.handler("p.long")
    def remind(what: Remind) -> None:
        got.append(what)

    long = Remind(1, "wörd" * 2000)
    remind.submit(long, biz_id=1, delay=1)
    (task,) = toc.tasks()
    assert (task.attribute, task.content_type) == ({}, "application/json")
    assert remind.payload(task) == long
    toc.advance(1)
    assert got == [long]


def test_a_changed_attribute_is_checked_as_any_other(center: TimeoutCenter) -> None:
    @center.handler("p.kept")
    def keep(what: Remind) -> None: ...

    @center.handler("p.other")
    def other(what: CloseOrder) -> None: ...

    made = keep.new(Remind(1), biz_id=1, delay=1)
    for wrong in (made._replace(attribute={"membr": 1}), made._replace(topic="p.other")):
        with pytest.raises(InvalidPayload):
            center.submit_many([wrong])


@pytest.mark.parametrize(("payload", "why"), [
    (Remind("no"), "member: "),  # type: ignore[arg-type]
    ({"member": 1}, r"it is a dict, not a Remind: write Remind\(\*\*\.\.\.\)$"),
    (None, "it is a NoneType, not a Remind$"),
    (5, "it is a int"),
    (CLOSE, "it is a CloseOrder"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_early(toc: Toc, center: TimeoutCenter, payload: Any, why: str) -> None:
    @center.handler("p.refused")
    def remind(what: Remind) -> None: ...

    with pytest.raises(InvalidPayload, match=f"does not fit Remind: {why}"):
        remind.submit(payload, biz_id=1, delay=1)
    with pytest.raises(InvalidPayload, match="one payload"):
        remind.submit(biz_id=1, delay=1)  # type: ignore[call-arg]
    for carries in (remind.submit, remind.new):
        with pytest.raises(InvalidPayload, match="leave out attribute="):
            carries(Remind(1), biz_id=1, delay=1, attribute={"member": 1})  # type: ignore[call-arg]
    new: dict[str, Any] = {"topic": "p.refused", "biz_id": 1, "delay": 1}
    wrong: dict[str, Any]
    for wrong in ({}, {"attribute": {"membr": 1}}, {"body": b"{}", "content_type": "application/json"}):
        with pytest.raises(InvalidPayload, match="member: Field required"):
            center.submit(**new, **wrong)
        with pytest.raises(InvalidPayload, match="member: Field required"):
            center.submit_many([NewTask(**new, **wrong)])
    with pytest.raises(InvalidPayload, match="Remind: its body is text/plain, not application/json; an attr"):
        center.submit(**new, body=b"member 1", content_type="text/plain")
    assert toc.tasks() == []
    assert center.submit(**new, attribute={"member": 1})


class Login(BaseModel):
    password: SecretStr


class CloseMore(CloseOrder):
    more: int = 0


class Doubled(BaseModel):
    number: int

    @field_serializer("number")
    def twice(self, number: int) -> int:
        return 2 * number


@dataclass
class Noted:
    note: Any


@dataclass
class Paid:
    order: int


@dataclass
class Refunded:
    order: int


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Color(StrEnum):
    BLUE = "blue"


class Mood(StrEnum):
    BLUE = "blue"


class Happened(BaseModel):
    what: Paid | Refunded | Color | Mood
    more: list[Paid | Refunded] = []
    last: deque[Paid | Refunded] = deque()


class Zoned(BaseModel):
    at: list[datetime]
    days: set[int] = set()
    more: deque[set[int]] = deque()
    notes: dict[str, str] = {}


LOST: list[tuple[type, Any]] = [
    (Happened, Happened(what=Refunded(1))),
    (Happened, Happened(what=Paid(1), more=[Refunded(1)])),
    (Happened, Happened(what=Paid(1), last=deque([Refunded(1)]))),
    (Happened, Happened(what=Mood.BLUE)),
    (Noted, Noted(Paid(1))),
    (Noted, Noted(datetime.now(UTC))),
    (Login, Login(password=SecretStr("canary"))),
    (CloseOrder, CloseMore(order=1, total=Decimal(1))),
    (Doubled, Doubled(number=1)),
]


@pytest.mark.parametrize(("kind", "payload"), LOST)
def test_what_the_handler_would_not_get_is_refused(center: TimeoutCenter, kind: type, payload: Any) -> None:
    def handler(what: Any) -> None: ...

    handler.__annotations__["what"] = kind
    with pytest.raises(InvalidPayload, match="is lost") as refused:
        center.handler("p.lost")(handler).new(payload, biz_id=1)
    assert "canary" not in str(refused.value)


def test_an_instant_is_the_same_in_any_zone_also_in_the_hour_that_comes_twice(center: TimeoutCenter) -> None:
    @center.handler("p.zoned")
    def handler(what: Zoned) -> None: ...

    twice = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    for at in (twice, twice.replace(fold=1), datetime.max.replace(tzinfo=timezone(timedelta(hours=-9)))):
        task = handler.new(Zoned(at=[at]), biz_id=1)
        assert handler.payload(task).at[0] - EPOCH == at - EPOCH


@pytest.mark.parametrize("long", ["", "x" * 5000])
def test_equal_payloads_are_equal_tasks(center: TimeoutCenter, long: str) -> None:
    """Else a dedup_key would be taken by another payload."""

    @center.handler("p.equal")
    def handler(what: Zoned) -> None: ...

    one = Zoned(at=[], days={0, 8}, more=deque([{0, 8}]), notes={"a": long, "b": ""})
    other = Zoned(at=[], days={8, 0}, more=deque([{8, 0}]), notes={"b": "", "a": long})
    assert (one, list(one.days)) == (other, list(other.days)[::-1])
    assert handler.new(one, biz_id=1) == handler.new(other, biz_id=1)


@pytest.mark.parametrize("price", [float("nan"), float("inf")])
def test_a_number_that_json_has_not_is_no_missing_one(toc: Toc, center: TimeoutCenter, price: float) -> None:
    @center.handler("p.refused")
    def note(what: Priced) -> None: ...

    with pytest.raises(InvalidPayload, match="does not fit Priced: as JSON it differs: a secret, NaN"):
        note.submit(Priced(price), biz_id=1, delay=1)
    note.submit(Priced(None), biz_id=1, delay=1)
    assert [task.attribute for task in toc.tasks()] == [{"price": None}]


def test_a_handler_of_tasks_submits_an_attribute(toc: Toc, center: TimeoutCenter) -> None:
    @center.handler("p.task")
    def plain(task: Task) -> None: ...

    plain.submit(biz_id=1, delay=1, attribute={"a": 1})
    toc.assert_submitted("p.task", attribute={"a": 1})
    with pytest.raises(InvalidPayload, match=r"attribute=, no payload$"):
        plain.submit(toc.tasks()[0], biz_id=1)


def test_what_a_decorator_lacks_is_said(center: TimeoutCenter) -> None:
    def untyped(what): ...  # type: ignore[no-untyped-def]

    with pytest.raises(InvalidPayload, match="no payload: the function's parameter 'what' has no type"):
        center.handler("p.task")(untyped).new(CLOSE, biz_id=1)
    with pytest.raises(InvalidTopic, match=r'untyped is not a topic name: write @center.handler\("TOPIC"\)'):
        center.handler(untyped)  # type: ignore[call-overload]


def test_a_payload_of_another_version_is_given_back_and_then_dead(toc: Toc, center: TimeoutCenter) -> None:
    @center.handler("p.version")
    def close(order: CloseOrder) -> None: ...

    job_id = toc.center.submit("p.version", biz_id=1, delay=60, attribute={"order": "secret"})
    why = r"total: Field required; given back .*: give new fields a default"
    with pytest.raises(Misfit, match=why) as told, capture_logs() as lines:
        toc.advance("2h")
    assert "secret" not in f"{told.value} {lines}"
    assert [line["fields"] for line in lines if line["event"] == "payload_not_read"] == ["order, total"]
    looks = 1
    while toc.tasks(status=TaskStatus.PENDING):
        task = known(toc.center.get(job_id))
        assert (task.status, task.attempt) == (TaskStatus.PENDING, 1)
        looks += 1
        with suppress(Misfit):
            toc.advance("2h")
    assert 60 <= looks <= 80
    task = known(toc.center.get(job_id))
    assert task.status is TaskStatus.DEAD
    row = known(toc.center.store.get(job_id))
    assert row.last_error is not None
    assert "for an hour" in row.last_error


class Line(BaseModel):
    amount: int = Field(validation_alias=AliasChoices("amount", "count"))


class Coupon(BaseModel):
    percent_off: int
    lines: list[Line] = []


class Voucher(TypedDict):
    percent_off: int


@dataclass
class Ticket:
    percent_off: int


@pytest.mark.parametrize("kind", [Coupon, Voucher, Ticket])
def test_of_a_field_that_may_have_been_renamed_it_is_said_that_it_needs_both_names(
    toc: Toc, center: TimeoutCenter, kind: type
) -> None:
    """With a default alone, as for a new field, the handler would get that and lose what was sent."""

    def redeem(coupon: Any) -> None: ...

    redeem.__annotations__["coupon"] = kind
    center.handler("p.renamed")(redeem)
    toc.center.submit("p.renamed", biz_id=1, delay=1, attribute={"percent": 15})
    why = f"the payload has percent, which {kind.__name__} does not read: if it was renamed, give the field"
    with pytest.raises(Misfit, match=rf"Field required; {why} both names; given back .* may read it$"):
        toc.advance("1s")


def test_what_a_payload_has_besides_is_told_only_beside_a_missing_field(center: TimeoutCenter) -> None:
    @center.handler("p.beside")
    def redeem(coupon: Coupon) -> None: ...

    def told(**attribute: Any) -> str:
        with pytest.raises(InvalidPayload) as refused:
            center.submit("p.beside", biz_id=1, delay=1, attribute=attribute)
        return str(refused.value)

    assert "more" not in told(percent_off="no", more=1)
    assert "lines.0.amount: Field required; the payload has lines.0.number, which" in told(
        percent_off=1, more=1, lines=[{"number": 1}, {"count": 2}]
    )
    assert "the payload has a, b, c, which" in told(a=1, b=2, c=3, d=4)
    assert len(told(**{"x" * 1000: 1})) < 400


def test_what_is_late_already_is_given_back_for_an_hour_and_again_after_a_redrive(
    toc: Toc, center: TimeoutCenter
) -> None:
    @center.handler("p.version")
    def close(order: CloseOrder) -> None: ...

    toc.use(center)
    job_id = toc.center.submit("p.version", biz_id=1, delay=60, attribute={"order": 1})
    toc.topic("p.version", paused=True)
    toc.advance("2h")
    toc.topic("p.version", paused=False)
    for _life in range(2):
        looks = 0
        while toc.tasks(status=TaskStatus.PENDING):
            looks += 1
            with suppress(Misfit):
                toc.advance("2h")
        assert 60 <= looks <= 80
        redrive(toc.center, [job_id])


def test_more_tasks_than_a_process_remembers_are_dead_in_time_and_leave_room(
    toc: Toc, center: TimeoutCenter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toc.model.payload.MOST_TASKS", 2)

    @center.handler("p.many")
    def close(order: CloseOrder) -> None: ...

    def looks(tasks: int, most: int) -> int:
        for biz_id in range(tasks):
            toc.center.submit("p.many", biz_id=biz_id, delay=1, attribute={"order": 1})
        for look in range(most):
            if not toc.tasks(status=TaskStatus.PENDING):
                return look
            with suppress(Misfit):
                toc.advance("1m")
        return most

    toc.use(center)
    assert looks(4, 500) < 500, "all are dead, those that it does not remember as well"
    assert 60 <= looks(1, 80) < 80, "the dead are forgotten"
    assert looks(2, 5) == 5
    for task in toc.tasks(status=TaskStatus.PENDING):
        toc.center.cancel(task.job_id)
    with suppress(Misfit):
        toc.advance("1s")  # one was taken already
    toc.advance("3h")
    assert 60 <= looks(1, 80) < 80, "so are those that have not come again for two hours"


def test_the_version_whose_payload_it_is_runs_what_another_has_given_back(toc: Toc) -> None:
    older, newer = TimeoutCenter(), TimeoutCenter()
    got: list[Remind] = []

    @older.handler("p.rolling")
    def close(_order: CloseOrder) -> None: ...

    @newer.handler("p.rolling")
    def remind(what: Remind) -> None:
        got.append(what)

    toc.use(older)
    remind.submit(Remind(7), biz_id=7, delay=60)
    with pytest.raises(Misfit):
        toc.advance("61s")
    toc.use(newer)
    toc.advance("1m")
    assert got == [Remind(7)]
    assert [(task.status, task.attempt) for task in toc.tasks()] == [(TaskStatus.PROCESSED, 1)]


def test_a_payload_need_not_know_of_the_time_that_a_schedule_a_trigger_or_a_backfill_adds(
    toc: Toc, center: TimeoutCenter
) -> None:
    got: list[int] = []

    @center.schedule("p-hourly", every="1h", attribute={"order": 1, "total": "9.90"})
    @center.handler("p.hourly")
    def close(order: CloseOrder) -> None:
        got.append(order.order)

    toc.advance("1h")
    center.schedules.trigger("p-hourly")
    start, end = toc.now - timedelta(hours=5), toc.now - timedelta(hours=2)
    filled = center.schedules.backfill("p-hourly", start, end).submitted
    toc.advance("10s")
    assert filled
    assert got == [1] * (1 + 1 + filled)


def test_a_schedule_whose_tasks_could_not_be_read_is_refused(toc: Toc, center: TimeoutCenter) -> None:
    @center.handler("p.hourly")
    def close(order: CloseOrder) -> None:
        """Never called."""

    toc.use(center)
    with pytest.raises(InvalidPayload, match="order"):
        center.schedules.create("p-hourly", topic="p.hourly", every="1h", attribute={"ordr": 1})
    center.schedules.create("p-hourly", topic="p.hourly", every="1h", attribute={"order": 1, "total": "9.90"})
    with pytest.raises(InvalidPayload, match="order"):
        center.schedules.alter("p-hourly", attribute={"total": "9.90"})
    assert center.schedules.pause("p-hourly").paused


def test_a_task_that_was_given_back_unread_has_not_begun_late(toc: Toc, center: TimeoutCenter) -> None:
    late: list[int] = []
    center.on_late("1s")(lambda task, _by: late.append(task.job_id))

    @center.handler("p.late")
    def close(order: CloseOrder) -> None:
        """Never called."""

    toc.center.submit("p.late", biz_id=1, delay=1, attribute={"of": "another version"})
    for _ in range(5):
        with suppress(Misfit):
            toc.advance("10s")
    assert late == []


def test_in_a_batch_only_those_fail_that_do_not_fit(toc: Toc, center: TimeoutCenter) -> None:
    got: list[Any] = []

    @center.handler("p.batch", batch=10)
    def remind(what: list[Remind], tasks: list[Task]) -> dict[int, Exception | None]:
        got.extend(what)
        if what[0].text == "raise":
            raise ValueError(what[0].text)
        return {tasks[0].job_id: Retry("1h")}

    for text in ("", "raise"):
        good = [remind.submit(Remind(n, text), biz_id=n, delay=1, tries=2) for n in range(2)]
        bad = toc.center.submit("p.batch", biz_id=9, delay=1, attribute={"member": []})
        with pytest.raises((Misfit, ValueError)):
            toc.advance(1)
        tasks = [toc.center.get(job_id) for job_id in (*good, bad)]
        attempts = [task.attempt for task in tasks if task is not None]
        assert attempts == [2, 2 if text else 1, 1]
        toc.center.cancel(bad)
        for job_id in good:
            toc.center.cancel(job_id)
    assert len(got) == 4


def test_payloads_of_several_handlers_are_submitted_together(toc: Toc, center: TimeoutCenter) -> None:
    got: list[object] = []

    @center.handler("p.one")
    def one(what: Remind) -> None:
        got.append(what)

    @center.handler("p.other")
    def other(task: Task) -> None:
        got.append(task.attribute)

    center.submit_many(
        [one.new(Remind(7), biz_id=7, delay=1), other.new(biz_id=8, delay=2, attribute={"a": 1})]
    )
    toc.advance(2)
    assert got == [Remind(7), {"a": 1}]
    with pytest.raises(InvalidPayload):
        one.new(CLOSE, biz_id=7, delay=1)  # type: ignore[arg-type]


def test_a_dead_that_is_returned_as_a_class_counts(
    toc: Toc, center: TimeoutCenter, capsys: pytest.CaptureFixture[str]
) -> None:
    @center.handler("p.class")
    def bare(_task: Task) -> type[Dead]:
        return Dead

    assert toc.run(bare).status is TaskStatus.DEAD

    @center.handler("p.returned", retries=1)
    def returned(_task: Task) -> ValueError:
        return ValueError("no such order")

    with pytest.raises(ValueError, match="no such order"):
        toc.run(returned)
    toc.assert_submitted("p.returned", status="dead")
    told = capsys.readouterr().err
    assert "task_dead" in told
    assert "/toc/" not in told, "no place of toc's is named"


def no_type(thing: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def a_number(order: int) -> None: ...
def one_of_many(order: CloseOrder) -> None: ...
def untyped(coupon, task): ...  # type: ignore[no-untyped-def]
def three(order: CloseOrder, task: Task, more: int) -> None: ...
def unfinished(order: Unfinished) -> None: ...
def unusable(order: list[CloseOrder]) -> None: ...
def a_dict(order: dict[str, int]) -> None: ...
def one_task(task: Task) -> None: ...
def second_is_one(orders: list[CloseOrder], task: Task) -> None: ...
def second_is_many(order: CloseOrder, tasks: list[Task]) -> None: ...
def second_is_other(orders: list[CloseOrder], more: list[int]) -> None: ...


@pytest.mark.parametrize(("function", "batch", "told"), [
    (no_type, None, "Nowhere, cannot be found"),
    (a_number, None, "its first parameter is a int"),
    (one_of_many, 5, r"must be list\[CloseOrder\], not CloseOrder"),
    (one_task, 5, r"must be list\[Task\], not Task"),
    (second_is_one, 5, r"its second parameter must be list\[Task\], not Task"),
    (second_is_many, None, r"its second parameter must be Task, not list\["),
    (second_is_other, 5, r"its second parameter must be list\[Task\], not list\[int\]"),
    (a_dict, None, r"its first parameter is a dict\[str, int\]"),
    (three, None, r"after its payload, but is three\(order: .*more: "),
    (untyped, None, r"annotate its payload, \(coupon: TYPE, task: Task\)$"),
    (unfinished, None, "its payload Unfinished cannot be used"),
    (unusable, None, "lists need batch=N"),
])  # fmt: skip
def test_a_typing_mistake_is_told_when_a_handler_is_registered(function: Any, batch: Any, told: str) -> None:
    with pytest.raises(InvalidHandler, match=told):
        TimeoutCenter().handler("p.mistake", batch=batch)(function)


def test_a_type_in_quotes_is_the_type(toc: Toc, center: TimeoutCenter) -> None:
    got: list[Any] = []

    def close(orders: Any) -> None:
        got.extend(orders)

    close.__annotations__["orders"] = list["Remind"]
    handled: Any = center.handler("p.quoted", batch=5)(close)
    toc.run(handled, Remind(7))
    assert got == [Remind(7)]
    close.__annotations__["orders"] = list["Nowhere"]  # type: ignore[name-defined]  # noqa: F821
    with pytest.raises(InvalidHandler, match=r"Nowhere.* cannot be found"):
        center.handler("p.mistake", batch=5)(close)


def test_who_says_nothing_of_types_gets_tasks() -> None:
    def one(task: Any) -> None: ...
    def second(order: CloseOrder, task: Any) -> None: ...
    def bare(order: CloseOrder, task) -> None: ...  # type: ignore[no-untyped-def]
    def many(tasks: list[Any]) -> None: ...
    def seconds(orders: list[CloseOrder], tasks: list[Any]) -> None: ...

    center = TimeoutCenter()
    functions: list[Any] = [one, second, bare, many, seconds]
    for number, function in enumerate(functions):
        center.handler(f"p.{number}", batch=5 if function in (many, seconds) else None)(function)
    assert len(center.handlers) == len(functions)


def test_one_function_can_have_several_topics(toc: Toc, center: TimeoutCenter) -> None:
    got: list[str] = []

    @center.handler("p.one")
    @center.handler("p.other")
    async def both(task: Task) -> None:
        got.append(task.topic)

    for topic in ("p.one", "p.other"):
        center.submit(topic, biz_id=1, delay=1)
    toc.advance(1)
    assert got == ["p.one", "p.other"]
    assert repr(both).startswith("<handler of 'p.one': ")


def test_a_second_parameter_that_may_be_left_out_gets_the_task(toc: Toc, center: TimeoutCenter) -> None:
    got: list[Any] = []

    @center.handler("p.optional")
    def optional(_what: Remind, task: Task | None = None) -> None:
        got.append(task and task.biz_id)

    @center.handler("p.other")
    def other(_what: Remind, more: int = 5) -> None:
        got.append(more)

    optional.submit(Remind(1), biz_id=7, delay=1)
    other.submit(Remind(1), biz_id=7, delay=2)
    optional(Remind(1))
    toc.advance(2)
    assert got == [None, 7, 5]


def test_a_partial_or_an_object_can_be_a_typed_handler(toc: Toc, center: TimeoutCenter) -> None:
    got: list[Any] = []

    class Keeps:
        async def __call__(self, what: Remind) -> None:
            got.append(what)

    def keep(into: list[Any], what: Remind) -> None:
        into.append(what)

    for topic, function in (("p.object", Keeps()), ("p.partial", partial(keep, got))):
        toc.run(center.handler(topic)(function), Remind(7))
    assert got == [Remind(7)] * 2


def test_policies_are_checked_where_they_are_declared(toc: Toc, center: TimeoutCenter) -> None:
    @center.handler("p.policies", retries=1, max_runtime="5m", expires_in=timedelta(hours=1))
    def once(_task: Task) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        toc.run(once)
    assert [task.status for task in toc.tasks()] == [TaskStatus.DEAD]
    topic = toc.center.catalog.get("p.policies")
    assert (topic.retries, topic.max_runtime, topic.expires_in) == (1, 300, 3600)
    with pytest.raises(InvalidTopic, match="'retry' is none of"):
        center.topic("p.other", retry=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidTopic, match="power of two"):
        center.topic("p.other", slots=3)
    with pytest.raises(DuplicateHandler, match="declared already"):
        center.topic("p.policies", retries=5)
    center.topic("p.pulled", delivery="pull", slots=8)
    center.topic("p.numbered", biz_type=4711)
    assert toc.center.submit("p.numbered", biz_id=1, delay=1)
    assert toc.center.submit("p.pulled", biz_id=1, delay=1)


def test_middleware_surrounds_tries_in_its_order(toc: Toc, center: TimeoutCenter) -> None:
    seen: list[str] = []

    @center.middleware
    def outer(tasks: list[Task]) -> Iterator[None]:
        seen.append(f"outer {len(tasks)}")
        try:
            yield
        except Retry:
            seen.append("outer saw a retry")
            raise
        finally:
            seen.append("outer ends")

    @center.middleware
    async def inner(_tasks: list[Task]) -> AsyncIterator[None]:
        seen.append("inner")
        yield
        seen.append("inner ends")

    @center.handler("p.sync")
    def plain(_task: Task) -> Retry:
        seen.append("plain")
        return Retry(1)

    @center.handler("p.async")
    async def coroutine(_task: Task) -> None:
        seen.append("coroutine")

    toc.run(plain)
    toc.run(coroutine)
    first = ["outer 1", "plain", "outer saw a retry", "outer ends"]
    assert seen == [*first, "outer 1", "inner", "coroutine", "inner ends", "outer ends"]
    with pytest.raises(InvalidHandler, match="generator"):
        center.middleware(lambda _: None)  # type: ignore[type-var]


def test_a_try_whose_exception_is_swallowed_has_succeeded(toc: Toc, center: TimeoutCenter) -> None:
    @center.middleware
    def swallows(_tasks: list[Task]) -> Iterator[None]:
        with suppress(ValueError):
            yield

    @center.handler("p.sync")
    def plain(_task: Task) -> None:
        raise ValueError

    @center.handler("p.async")
    async def coroutine(_task: Task) -> None:
        raise ValueError

    @center.handler("p.many", batch=5)
    def batch(_orders: list[CloseOrder]) -> None:
        raise ValueError

    plain.submit(biz_id=1, delay=60)
    coroutine.submit(biz_id=2, delay=60)
    batch.submit(CLOSE, biz_id=3, delay=60)
    toc.advance("2m")
    done = [center.find(biz_id=biz_id)[0] for biz_id in (1, 2, 3)]
    assert [(task.status, task.attempt) for task in done] == [(TaskStatus.PROCESSED, 1)] * 3


def test_a_copy_in_which_a_hook_returns_ends(toc: Toc) -> None:
    center, copies = TimeoutCenter(), list[int]()

    @center.on_dead
    def forks(_task: Task, _reason: str) -> None:
        copies.append(os.fork())

    task = known(center.get(center.submit(toc.topic("p.plain").name, biz_id=1, delay=60)))
    center.stands_in = None  # its own thread calls hooks, as in production
    center.hooks._notify(forks, task, "no use")
    center.hooks.flush(30)
    try:
        assert until(lambda: os.waitpid(copies[-1], os.WNOHANG)[0] > 0, 10)
    except AssertionError:
        os.kill(copies[-1], signal.SIGKILL)
        raise
    finally:
        center.close()


def test_hooks_are_told_and_their_failures_harm_nothing(toc: Toc, center: TimeoutCenter) -> None:
    dead: list[tuple[object, TaskStatus, str]] = []
    late: list[tuple[int | str, timedelta]] = []

    @center.on_dead
    def broken(_task: Task, _reason: str) -> None:
        raise SystemExit

    @center.on_dead
    def told(task: Task, reason: str) -> None:
        dead.append((task.biz_id, task.status, reason))

    @center.on_late("1m")
    def slow(task: Task, late_by: timedelta) -> None:
        late.append((task.biz_id, late_by))

    @center.handler("p.dies")
    def dies(_task: Task) -> Dead:
        return Dead("no use")

    dies.submit(biz_id=5, delay=60)
    toc.topic("p.dies", paused=True)
    toc.advance("10m")
    toc.topic("p.dies", paused=False)
    toc.run_due()
    assert dead == [(5, TaskStatus.DEAD, "no use")]
    assert late == [(5, timedelta(minutes=9))]
    (task,) = toc.tasks("p.dies")
    redrive(toc.center, [task.job_id])
    toc.run_due()
    assert len(dead) == 2
    assert len(late) == 1, "a redriven task is as late as its operator wants"
    for wrong in (lambda: None, asyncio.sleep):
        with pytest.raises(InvalidHandler):
            center.on_dead(wrong)  # type: ignore[type-var]


# Type checkers understand handlers: pyright here; mypy checks the sample with everything else.

SAMPLE = Path(__file__).parents[1] / "typed_sample"


@pytest.mark.slow
def test_pyright_finds_nothing_in_the_sample_but_its_mistakes(tmp_path: Path) -> None:
    config = {
        "include": [str(SAMPLE)],
        "typeCheckingMode": "strict",
        "enableTypeIgnoreComments": False,
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    checker = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(checker, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
