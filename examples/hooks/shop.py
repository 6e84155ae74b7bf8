"""Around each try: its ids in every log line, what it raises in Sentry. Deaths and late starts are told."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import sentry_sdk
import structlog

from toc import Dead, Retry, Task, TimeoutCenter

center = TimeoutCenter()
log = structlog.get_logger()


@center.middleware
def ids_in_the_log(tasks: list[Task]) -> Iterator[None]:
    """Bind what identifies the call, as plain functions and coroutines both see it."""
    with structlog.contextvars.bound_contextvars(
        topic=tasks[0].topic, job_ids=[task.job_id for task in tasks]
    ):
        yield


@center.middleware
def errors_in_sentry(tasks: list[Task]) -> Iterator[None]:
    """Report what a handler raises, unless that is how it says what comes next."""
    with sentry_sdk.isolation_scope() as scope:
        scope.set_tag("topic", tasks[0].topic)
        scope.set_context("toc", {"job_ids": [task.job_id for task in tasks], "attempt": tasks[0].attempt})
        try:
            yield
        except (Retry, Dead):
            raise
        except Exception as exc:
            sentry_sdk.capture_exception(exc)
            raise


@center.on_dead
def page_somebody(task: Task, reason: str) -> None:
    """Tell once that a task will not be tried again."""
    sentry_sdk.capture_message(f"{task.topic} {task.biz_id} is dead: {reason}", level="error")


@center.on_late("5m")
def complain(task: Task, late: timedelta) -> None:
    """Tell of a first try that began late."""
    log.warning("late", topic=task.topic, biz_id=task.biz_id, seconds=late.total_seconds())


@center.handler("order.close", retries=2)
def close_order(task: Task) -> None:
    """Log, and fail where the task says so."""
    log.info("closing", order=task.biz_id)
    if task.attribute.get("broken"):
        raise ValueError("no such order")
