"""Django's tasks on toc: what the reference of ``django.tasks`` says of a backend and its tasks."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest
from harness.rows import known

pytest.importorskip("django.tasks", reason="it comes with Django 6, which needs Python 3.12")

import django
from asgiref.sync import async_to_sync
from django.conf import settings
from django.test.utils import override_settings
from django.utils import timezone

from toc import TaskStatus, TimeoutCenter
from toc.model.raised import Misfit
from toc.testing import Toc

SHOP = """
from django.tasks import task
from toc import TimeoutCenter
from toc.django_tasks import handle

center = TimeoutCenter()
handle(center)
handle(center, "mail")
ran = []

@task
def remind(*args, **named):
    ran.append((args, named))
    if "fail" in named:
        raise LookupError
    return "said"

@task(queue_name="mail", takes_context=True)
def write(context, to):
    ran.append((context.attempt, context.task_result.id, to))
    if context.attempt == 1:
        raise ConnectionError(to)

@task
async def awaited(number):
    ran.append(number)
"""


@pytest.fixture(scope="module")
def shop() -> Iterator[Any]:
    settings.configure(
        USE_TZ=True,
        TASKS={
            "default": {
                "BACKEND": "toc.django_tasks.TocBackend",
                "QUEUES": ["default", "mail"],
                "OPTIONS": {"center": "django_shop.center"},
            }
        },
    )
    django.setup()
    module = sys.modules["django_shop"] = ModuleType("django_shop")
    exec(SHOP, module.__dict__)
    yield module
    del sys.modules["django_shop"]


@pytest.fixture
def kit(shop: Any) -> Iterator[Toc]:
    with Toc() as toc:
        toc.use(shop.center)
        shop.ran.clear()
        yield toc


def test_a_task_runs_now_or_after_its_time(shop: Any, kit: Toc) -> None:
    from django.tasks import TaskResultStatus

    now = shop.remind.enqueue(1, a=[2])
    later = shop.remind.using(run_after=timezone.now() + timedelta(hours=1)).enqueue("later")
    past = shop.remind.using(run_after=timezone.now() - timedelta(hours=1)).enqueue("past")
    assert {one.status for one in (now, later, past)} == {TaskResultStatus.READY}
    assert now.enqueued_at is not None
    assert (now.args, now.kwargs, now.backend, now.attempts) == ([1], {"a": [2]}, "default", 0)
    kit.run_due()
    assert sorted(shop.ran, key=str) == [(("past",), {}), ((1,), {"a": [2]})]
    kit.advance("59m")
    assert len(shop.ran) == 2
    kit.advance("2m")
    assert shop.ran[-1] == (("later",), {})
    assert known(kit.center.get(int(now.id))).status is TaskStatus.PROCESSED
    async_to_sync(shop.remind.aenqueue)("awaited")
    kit.run_due()
    assert shop.ran[-1] == (("awaited",), {})


def test_a_time_without_a_zone_is_that_of_the_settings(shop: Any, kit: Toc) -> None:
    with override_settings(USE_TZ=False):
        shop.remind.using(run_after=timezone.make_naive(datetime.now(UTC) + timedelta(hours=1))).enqueue()
    kit.assert_submitted("django.default", due_in="1h")


def test_arguments_of_any_length_arrive(shop: Any, kit: Toc) -> None:
    shop.remind.enqueue("x" * 10_000)
    kit.run_due()
    assert shop.ran == [(("x" * 10_000,), {})]


def test_what_fails_is_tried_again_and_its_context_counts_the_tries(shop: Any, kit: Toc) -> None:
    result = shop.write.enqueue("ann@example.com")
    with pytest.raises(ConnectionError):
        kit.run_due()
    kit.advance("10m")
    assert shop.ran == [(n, result.id, "ann@example.com") for n in (1, 2)]


@pytest.mark.parametrize(("here", "why"), [({}, "remind"), ({"remind": len}, "using")], ids=["none", "other"])
def test_a_task_that_another_version_has_is_given_back_and_then_dead(
    shop: Any, kit: Toc, monkeypatch: pytest.MonkeyPatch, here: dict[str, Any], why: str
) -> None:
    job_id = int(shop.remind.enqueue().id)
    monkeypatch.delattr(shop, "remind")
    vars(shop).update(here)
    for _ in range(3):
        with pytest.raises(Misfit, match=why):
            kit.advance("1m")
    assert known(kit.center.get(job_id)).attempt == 1
    while kit.tasks(status=TaskStatus.PENDING):
        with suppress(Misfit):
            kit.advance("1h")
    assert known(kit.center.get(job_id)).status is TaskStatus.DEAD


def test_coroutines_are_enqueued_and_run(shop: Any, kit: Toc) -> None:
    shop.awaited.enqueue(7)
    kit.run_due()
    assert shop.ran == [7]


def test_signals_are_sent(shop: Any, kit: Toc) -> None:
    from django.tasks import signals

    sent: list[Any] = []

    def receive(task_result: Any, signal: Any, **_: Any) -> None:
        one = task_result
        about = [error.exception_class for error in one.errors], one.attempts, one.enqueued_at is not None
        sent.append((names[signal], one.task.queue_name, one.status.name, *about, one.is_finished))
        if one.status == "SUCCESSFUL":
            sent.append(one.return_value)

    names = {getattr(signals, f"task_{name}"): name for name in ("enqueued", "started", "finished")}
    for signal in names:
        signal.connect(receive)
    shop.remind.enqueue()
    kit.run_due()
    assert sent == [
        ("enqueued", "default", "READY", [], 0, True, False),
        ("started", "default", "RUNNING", [], 1, True, False),
        ("finished", "default", "SUCCESSFUL", [], 1, True, True),
        "said",
    ]
    sent.clear()
    kit.topic("django.mail", retries=2)
    shop.remind.using(queue_name="mail").enqueue(fail=True)
    for _ in range(2):
        with pytest.raises(LookupError):
            kit.advance("1h")
    for signal in names:
        signal.disconnect(receive)
    assert sent == [
        ("enqueued", "mail", "READY", [], 0, True, False),
        ("started", "mail", "RUNNING", [], 1, True, False),
        ("started", "mail", "RUNNING", [], 2, True, False),
        ("finished", "mail", "FAILED", [LookupError], 2, True, True),
    ]


def test_a_receiver_that_fails_changes_no_outcome(shop: Any, kit: Toc) -> None:
    from django.tasks import signals

    def fail(**_: Any) -> None:
        raise ValueError("of a receiver")

    told = [signals.task_enqueued, signals.task_finished]
    for signal in told:
        signal.connect(fail)
    job_id = int(shop.remind.enqueue().id)
    kit.run_due()
    for signal in told:
        signal.disconnect(fail)
    task = known(kit.center.get(job_id))
    assert (task.status, task.attempt) == (TaskStatus.PROCESSED, 1)


@pytest.mark.usefixtures("kit")
def test_what_the_backend_cannot_do_is_refused(shop: Any) -> None:
    from django.tasks.exceptions import InvalidTask

    backend = shop.remind.get_backend()
    assert (backend.supports_defer, backend.supports_async_task) == (True, True)
    assert (backend.supports_get_result, backend.supports_priority) == (False, False)
    result = shop.remind.enqueue()
    for ask in (shop.remind.get_result, backend.get_result, lambda _: result.refresh()):
        with pytest.raises(NotImplementedError):
            ask(result.id)
    assert (isinstance(result.id, str), len(result.id) < 64) == (True, True)
    with pytest.raises(InvalidTask, match="priority"):
        shop.remind.using(priority=5)
    with pytest.raises(InvalidTask, match="not valid"):
        shop.remind.using(queue_name="other")
    with pytest.raises(InvalidTask, match="aware"):
        shop.remind.using(run_after=timezone.now().replace(tzinfo=None))
    with pytest.raises(TypeError):
        shop.remind.enqueue(object())
    assert isinstance(shop.center, TimeoutCenter)
