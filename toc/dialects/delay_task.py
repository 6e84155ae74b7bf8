"""delay/task: tasks with numbers drawn by the service, which are processed once they were pulled."""

import json
import secrets
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from toc.dialects import port
from toc.dialects.dialect_tasks import template_of, topic_for
from toc.dialects.port import Dialect, Request
from toc.gateway.exchange import Answer
from toc.gateway.service import Service
from toc.model.clock import from_ms
from toc.model.documents import check_values, parse_object, whole_text
from toc.model.errors import BodyGone, Busy, InvalidDocument, InvalidInput, TaskExists, UnreadableTask
from toc.model.sharding import MAX_BIZ_ID
from toc.model.task import UNLIMITED, DialectTask, OnConflict, TaskStatus
from toc.model.topic import Delivery, Template
from toc.pull.handed_out import HandedOut

PREFIX = "delay-task."
CALLBACK_PREFIX = "delay-task-callback."
"""Prefix of the topics whose tasks are sent to a target instead of being pulled."""
ADD, PULL = "/delay/task/add", "/delay/task/pull"
IN_A_SECOND = 10_000
"""How many numbers there are for the tasks that are due in one second."""
MAX_CLASHES = 100
CLASHES_NEAR = 10
"""After this many clashes in a row, continue at another number."""
KEPT_SECONDS = 3 * 86_400
TTR_SECONDS = 60.0
"""A task is handed out again after this time if it was not marked as processed."""
CONTENT_TYPE = "application/json"
LAST_SECOND = 4_102_444_800
"""The latest due time, in the year 2100: a greater number was probably meant as milliseconds."""

DONE = "操作成功"
NOTHING = "没有到期的任务"
UNKNOWN = "任务不存在"
NOT_DUE = "任务未到执行时间"
TAKEN = "任务正在被处理"
WRONG = "参数错误"
FAILED = "系统繁忙"
FULL = "同一秒到期的任务太多"
KEY = "task"


class SecondFull(Busy):
    """As good as all numbers of a second are taken."""


class DelayTask(Dialect):
    """The dialect."""

    name: ClassVar[str] = "delay-task"
    templates: ClassVar[tuple[Template, ...]] = (
        template_of(PREFIX, retention=KEPT_SECONDS),
        template_of(CALLBACK_PREFIX, delivery="webhook", retention=KEPT_SECONDS),
    )

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._next = secrets.randbelow(IN_A_SECOND)

    async def answer(self, request: Request) -> Answer:
        """Answer a call."""
        if request.path not in (ADD, PULL):
            return Answer(b"404 page not found\n", 404, "text/plain; charset=utf-8")
        if request.method != "POST":
            return Answer(b"405 method not allowed\n", 405, "text/plain; charset=utf-8", {"allow": "POST"})
        values = await self.service.parsed(request.body, partial(port.parsed, request.body))
        topic = port.text(values, "topic")
        if not topic:
            raise port.NotUnderstood("topic is empty")
        if request.path == ADD:
            at, content = port.number(values, "timing_moment"), _content(values)
            return _answer("add", task_id=await self._add(topic, at, content))
        if values.get("task_id") is not None:
            return await self._pull_one(topic, port.number(values, "task_id"))
        return await self._pull(topic)

    def failed(self, request: Request, error: Exception) -> Answer:
        """Answer a mistake or a failure."""
        mistake = isinstance(error, InvalidInput)
        message = f"{WRONG}: {error}" if mistake else FULL if isinstance(error, SecondFull) else FAILED
        if request.path == PULL:
            return _answer("pull", 1, message, content="")
        return _answer("add", 1, message, task_id=0)

    # --- add

    async def _add(self, topic: str, at: int, content: str) -> int:
        """Store a task and return its number."""
        if not 0 < at <= LAST_SECOND:
            raise port.NotUnderstood("timing_moment must be a time in seconds since 1970")
        target, path = _callback(content)
        name = topic_for(topic, PREFIX if target is None else CALLBACK_PREFIX)
        for clashes in range(MAX_CLASHES):
            if clashes % CLASHES_NEAR == CLASHES_NEAR - 1:
                self._next = secrets.randbelow(IN_A_SECOND)
            self._next = (self._next + 1) % IN_A_SECOND
            task = DialectTask(
                name,
                at * IN_A_SECOND + self._next,
                action_time=from_ms(at * 1000),
                attribute={"topic": topic},
                dedup_key=f"{self.tasks.prefix}{KEY}",
                tries=UNLIMITED if target is None else 0,
                body=content.encode(),
                content_type=CONTENT_TYPE,
                on_conflict=OnConflict.ERROR,
                target=target,
                url=path,
            )
            try:
                await self.tasks.put(task)
            except TaskExists:  # another process has given this number to a task
                continue
            return int(task.biz_id)
        raise SecondFull(f"{IN_A_SECOND} tasks of one topic are due in one second; take another")

    # --- pull

    async def _pull(self, topic: str) -> Answer:
        got = await self.tasks.pull([topic_for(topic, PREFIX)], TTR_SECONDS)
        for one, body in await self.tasks.bodies(got):
            return _pulled(body, one)
        return _answer("pull", 1, NOTHING, content="")

    async def _pull_one(self, topic: str, task_id: int) -> Answer:
        """Hand out one task if it is due; show it if it was pulled before."""
        if not 0 < task_id <= MAX_BIZ_ID:
            return _answer("pull", 1, UNKNOWN, content="")
        names = {topic_for(topic, prefix) for prefix in (PREFIX, CALLBACK_PREFIX)}
        for row in await self.tasks.find_own(task_id, f"{self.tasks.prefix}{KEY}"):
            known = self.tasks.topic_of(row)
            if known is None or known.name not in names:
                continue
            if row.status == TaskStatus.PROCESSED:
                with suppress(BodyGone, UnreadableTask):  # the task was purged: its retention is over
                    content = (await self.tasks.body(row)).decode(errors="replace")
                    return _answer("pull", content=content)
            if row.status != TaskStatus.PENDING:
                break
            if row.action_time > self.service.center.clock.now_ms():
                return _answer("pull", 1, NOT_DUE, content="")
            if known.delivery is not Delivery.PULL:
                return _answer("pull", 1, TAKEN, content="")
            slot = known.slot(row.slot_crc, row.slot_amount)
            got = await self.service.pulls.take(row.job_id, slot, ttr=TTR_SECONDS)
            for one, body in await self.tasks.bodies(got):
                return _pulled(body, one)
            return _answer("pull", 1, TAKEN, content="")
        return _answer("pull", 1, UNKNOWN, content="")


def _content(values: dict[str, Any]) -> str:
    """Return the content as a JSON text. An object is taken as well. Raises NotUnderstood."""
    content = values.get("content")
    if isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    if not isinstance(content, str):
        raise port.NotUnderstood("content must be a JSON text")
    return whole_text(content)


def _callback(content: str) -> tuple[str | None, str | None]:
    """Return the target and the path of a callback; neither if the content is to be pulled."""
    if '"sn"' not in content or '"url"' not in content:  # most contents are none, however large
        return None, None
    try:
        check_values(content.encode(errors="surrogatepass"), port.MAX_VALUES)
    except InvalidDocument as exc:
        raise port.NotUnderstood(f"content that is a callback: {exc}") from None
    try:
        said = parse_object(content, most=len(content), surrogates=True)
        target, path = said["sn"], said["url"]
    except (InvalidDocument, KeyError):
        return None, None
    if not isinstance(target, str) or not isinstance(path, str):
        raise port.NotUnderstood("sn and url of the content must be texts")
    return target, path


def _pulled(body: bytes, one: HandedOut) -> Answer:
    reply = _answer("pull", content=body.decode(errors="replace"))
    return reply._replace(handed=(one,), ends=True)


def _answer(call: str, dm_error: int = 0, error_msg: str = DONE, **more: Any) -> Answer:
    answer = {"dm_error": dm_error, "error_msg": error_msg, **more}
    return Answer(port.to_go_json(answer), media_type=port.JSON, name=call)
