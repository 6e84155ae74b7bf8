"""A sample application that mypy and pyright check strictly, mistakes included: each must be found."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import assert_type

from pydantic import BaseModel
from typing_extensions import TypedDict

from toc import AsyncTimeoutCenter, Dead, Retry, Task, TimeoutCenter

center = TimeoutCenter()
async_center = AsyncTimeoutCenter()


class CloseOrder(BaseModel):
    order: int
    reason: str = "unpaid"


@dataclass
class Remind:
    member: int


class Ship(TypedDict):
    parcel: str


@center.middleware
def around(tasks: list[Task]) -> Iterator[None]:
    print(len(tasks))
    yield


@center.middleware
async def around_coroutines(tasks: list[Task]) -> AsyncIterator[None]:
    print(len(tasks))
    yield


@center.on_dead
def tell(task: Task, reason: str) -> None:
    print(task.job_id, reason)


@center.on_late("1m")
def complain(task: Task, late: timedelta) -> None:
    print(task.job_id, late)


@center.handler("order.close", retries=5, backoff_cap="10m", slots=8)
def close_order(order: CloseOrder, task: Task) -> Retry | Dead | None:
    print(order.reason)
    return Retry("10m") if task.attempt == 1 else None


@center.handler("member.remind")
async def remind(what: Remind) -> str:
    return str(what.member)


@center.handler("parcel.ship", batch=50)
def ship(parcels: list[Ship], tasks: list[Task]) -> dict[int, Exception | None]:
    return {task.job_id: None for task, _ in zip(tasks, parcels, strict=True)}


@async_center.handler("order.open")
async def open_order(order: CloseOrder) -> None:
    print(order.order)


@center.handler("plain")
def plain(task: Task) -> None:
    print(task.attribute)


def right(task: Task) -> None:
    assert_type(close_order.submit(CloseOrder(order=42), biz_id=42, delay="30m"), int)
    remind.submit(Remind(7), biz_id="ann", delay=timedelta(days=3), expires_in="2h")
    ship.submit({"parcel": "a"}, biz_id=1, delay=60.0)
    plain.submit(biz_id=1, delay=1, attribute={"a": 1})
    center.submit_many([remind.new(Remind(7), biz_id=7, delay="7d"), plain.new(biz_id=1, delay=1)])
    assert_type(close_order(CloseOrder(order=42), task), Retry | Dead | None)
    assert_type(close_order.payload(task), CloseOrder)
    ship([{"parcel": "a"}], [task])


async def right_too() -> None:
    assert_type(await remind(Remind(7)), str)
    assert_type(await open_order.submit(CloseOrder(order=42), biz_id=42, delay="30m"), int)
    await open_order(CloseOrder(order=42))


def wrong(task: Task) -> None:
    close_order.submit(Remind(7), biz_id=42)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    close_order.submit(CloseOrder(order=42))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    remind.submit(Remind(7), biz_id=7, delya=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    remind.submit(Remind(7), biz_id=7, delay=[])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    remind.new(CloseOrder(order=42), biz_id=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    remind.new(Remind(7), biz_id=7, session=None)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ship.submit({"parcle": "a"}, biz_id=1)  # type: ignore[typeddict-item]  # pyright: ignore[reportArgumentType]
    close_order(Remind(7), task)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    center.handler("x", retrys=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    center.handler("x", backoff="fast")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
