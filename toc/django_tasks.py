"""A backend for Django's tasks (``django.tasks``, from Django 6 on): each becomes a task of toc.

Settings: ``TASKS = {"default": {"BACKEND": "toc.django_tasks.TocBackend", "OPTIONS": {"center":
"shop.deadlines.center"}}}``. A queue is a topic: "default" is ``django.default``, run by ``handle``.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from traceback import format_exception
from typing import Any

from django.db import close_old_connections
from django.tasks import TaskContext, TaskResult, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import TaskError
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.json import normalize_json
from django.utils.module_loading import import_string

from toc.model.payload import Patience
from toc.model.task import Dead, Task
from toc.sdk.async_client import AsyncTimeoutCenter
from toc.sdk.client import TimeoutCenter

MAX_ATTRIBUTE = 4096
"""What is longer, in characters of JSON, goes in the body."""


def topic_of(queue: str) -> str:
    """Return the name of a queue's topic."""
    return f"django.{queue}"


class TocBackend(BaseTaskBackend):  # type: ignore[misc]
    """Submits tasks to the center that its option ``center`` names, a dotted path.

    A result's ``id`` is the job_id. Results are not kept: ``get_result`` raises NotImplementedError.
    """

    supports_defer = True
    supports_async_task = True

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Submit a task that runs now, or at its ``run_after``. Raises what ``center.submit`` raises."""
        self.validate_task(task)
        center = _sync(import_string(self.options["center"]))
        result, at = _result(task, "", args, kwargs, TaskResultStatus.READY), timezone.now()
        said = {"task": task.module_path, "args": result.args, "kwargs": result.kwargs, "at": at.isoformat()}
        text = json.dumps(said)
        data: dict[str, Any] = {"attribute": json.loads(text)}
        if len(text) > MAX_ATTRIBUTE:
            data = {"body": text.encode(), "content_type": "application/json"}
        due = task.run_after
        if due is not None and timezone.is_naive(due):
            due = timezone.make_aware(due)
        data |= {"delay": 0} if due is None else {"action_time": due}
        job_id = center.submit(topic_of(task.queue_name), biz_id=secrets.randbits(62), past="run", **data)
        object.__setattr__(result, "id", str(job_id))
        object.__setattr__(result, "enqueued_at", at)
        task_enqueued.send_robust(type(self), task_result=result)  # it is stored, whatever a receiver does
        return result


def handle(center: TimeoutCenter | AsyncTimeoutCenter, queue: str = "default") -> None:
    """Register the handler of a queue. A try that fails is repeated as the topic says. A task that is
    none here, as in a rolling deploy, uses up no try and comes again; after an hour it is dead."""
    patience = Patience()

    @_sync(center).handler(topic_of(queue))
    def run(task: Task) -> None:
        said = task.attribute if task.body is None else json.loads(task.body)
        try:
            wanted = import_string(said["task"]).using(queue_name=queue)
        except (ImportError, AttributeError) as exc:  # of what is no task here
            raise patience.end(task, _sync(center).clock.now_ms(), exc, "task") from exc
        result = _result(wanted, str(task.job_id), said["args"], said["kwargs"], TaskResultStatus.RUNNING)
        object.__setattr__(result, "enqueued_at", parse_datetime(said["at"]))
        result.worker_ids.extend(["toc"] * task.attempt)
        close_old_connections()
        try:
            task_started.send_robust(TocBackend, task_result=result)
            context = [TaskContext(task_result=result)] if wanted.takes_context else []
            returned = wanted.call(*context, *result.args, **result.kwargs)
        except BaseException as exc:
            tries = task.tries or _sync(center).catalog.get(task.topic).retries
            if isinstance(exc, Dead) or task.attempt >= tries:
                kind = f"{type(exc).__module__}.{type(exc).__qualname__}"
                trace = "".join(format_exception(exc))
                result.errors.append(TaskError(exception_class_path=kind, traceback=trace))
                _finish(result, TaskResultStatus.FAILED)
            raise
        else:
            with suppress(TypeError, ValueError):  # it cannot be told, and is not kept
                object.__setattr__(result, "_return_value", normalize_json(returned))
            _finish(result, TaskResultStatus.SUCCESSFUL)
        finally:
            close_old_connections()


def _finish(result: Any, status: Any) -> None:
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", timezone.now())
    task_finished.send_robust(TocBackend, task_result=result)  # its outcome stays, whatever a receiver does


def _sync(center: TimeoutCenter | AsyncTimeoutCenter) -> TimeoutCenter:
    return center.sync if isinstance(center, AsyncTimeoutCenter) else center


def _result(task: Any, job_id: str, args: Any, kwargs: Any, status: Any) -> Any:
    began = timezone.now() if status == TaskResultStatus.RUNNING else None
    return TaskResult(
        task=task,
        id=job_id,
        status=status,
        enqueued_at=None,
        started_at=began,
        last_attempted_at=began,
        finished_at=None,
        args=args,
        kwargs=kwargs,
        backend=task.backend,
        errors=[],
        worker_ids=[],
    )
