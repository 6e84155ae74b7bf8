"""Youzan's delay queue: the commands of its design on ``POST /``, and the paths of ouqiang/delay-queue."""

from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from toc.dialects.dialect_tasks import MAX_TOPICS, template_of
from toc.dialects.jobs import RETENTION_SECONDS, Job, JobDialect
from toc.dialects.port import JSON, NotUnderstood, Request, number, parsed, text, to_go_json
from toc.gateway.exchange import Answer
from toc.gateway.service import SMALL_TEXT
from toc.model.errors import InvalidInput
from toc.model.topic import Template
from toc.pull.handed_out import HandedOut

PREFIX = "youzan."
HOLD_SECONDS = 178.0
MAX_DELAY = 2**31 - 1
MAX_TTR = 86_400

NO_ID = "job id不能为空"
NO_TOPIC = "topic 不能为空"
NO_TOPIC_TO_POP = "topic不能为空"
WRONG_DELAY = "delay 取值范围1 - (2^31 - 1)"
WRONG_TTR = "ttr 取值范围1 - 86400"
NO_JSON = "解析json失败"
ADDED = "添加成功"
DONE = "操作成功"
_ENDED = dict.fromkeys(("finish", "delete"), "删除失败")
FAILED = {"push": "添加失败", "pop": "获取Job失败", **_ENDED, "get": "查询失败"}
"""What is answered if a server is out of reach."""
_COMMANDS = {"add": "push", "pop": "pop", "finish": "finish", "delete": "delete"}


class Mistake(InvalidInput):
    """A mistake in a request; its text is the answer's."""


class Youzan(JobDialect):
    """The dialect. Ids are unique over all topics."""

    name: ClassVar[str] = "youzan"
    prefix: ClassVar[str] = PREFIX
    templates: ClassVar[tuple[Template, ...]] = (
        template_of(PREFIX, max_runtime=MAX_TTR, retention=RETENTION_SECONDS),
    )

    async def answer(self, request: Request) -> Answer:
        """Answer a command or a path."""
        values: dict[str, Any] = {}
        if _is_command(request) or request.path[1:] in FAILED:
            values = await self.service.parsed(request.body, partial(_folded, request.body))
        call = _call(request, values)
        if call is None:
            if _is_command(request):
                raise NotUnderstood("there is no such command")
            return Answer(b"404 page not found\n", 404, "text/plain; charset=utf-8")
        found: dict[str, Any] | None = None
        handed: tuple[HandedOut, ...] = ()
        if call == "push":
            await self.push(self._job(values))
        elif call == "pop":
            if request.method == "HEAD":  # the answer would have no body, but the job would be handed out
                return Answer(b"", 405, "", {"allow": "GET, POST"}, name="/pop")
            topic = text(values, "topic").strip()
            if not topic:
                raise Mistake(NO_TOPIC_TO_POP)
            if topic.count(",") >= MAX_TOPICS:
                raise NotUnderstood(f"a pop may name {MAX_TOPICS} topics")
            topics = [name for one in topic.split(",") if (name := one.strip())]
            got = await self.pop(topics, wait=HOLD_SECONDS)
            if got is not None:
                handed, found = (got[0],), {"id": got[1].id, "body": got[1].body}
        else:
            job_id = text(values, "id").strip()
            if not job_id:
                raise Mistake(NO_ID)
            if call == "finish":
                await self.finish(job_id)
            elif call == "delete":
                await self.delete(job_id)
            elif (job := await self.get(job_id)) is not None:
                found = _render(job)
        if _is_command(request):
            return _command_reply(found, "", call)._replace(handed=handed)
        return _path_reply(0, ADDED if call == "push" else DONE, found, call)._replace(handed=handed)

    def _job(self, values: dict[str, Any]) -> Job:
        """Return the job of a push. Raises Mistake or NotUnderstood."""
        job_id, topic, body = (text(values, name).strip() for name in ("id", "topic", "body"))
        delay, ttr = number(values, "delay"), number(values, "ttr")
        if not job_id:
            raise Mistake(NO_ID)
        if not topic:
            raise Mistake(NO_TOPIC)
        if not 1 <= delay <= MAX_DELAY:
            raise Mistake(WRONG_DELAY)
        if not 1 <= ttr <= MAX_TTR:
            raise Mistake(WRONG_TTR)
        return Job(job_id, topic, delay * 1000, ttr * 1000, body, self.due(delay * 1000))

    def failed(self, request: Request, error: Exception) -> Answer:
        """Answer a mistake or a failure in the words of the original."""
        call = "other"
        with suppress(InvalidInput):
            call = _call(request, _folded(request.body) if len(request.body) <= SMALL_TEXT else {}) or call
        if isinstance(error, Mistake):
            message = str(error)
        else:
            message = NO_JSON if isinstance(error, InvalidInput) else FAILED.get(call, NO_JSON)
        if _is_command(request):
            return _command_reply(None, message, call)
        return _path_reply(1, message, None, call)


def _is_command(request: Request) -> bool:
    return request.path == "/" and request.method == "POST"


def _call(request: Request, values: dict[str, Any]) -> str | None:
    """Return what is asked for, None if there is no such call. Raises NotUnderstood."""
    if _is_command(request):
        return _COMMANDS.get(text(values, "command"))
    return request.path[1:] if request.path[1:] in FAILED else None


def _folded(body: bytes) -> dict[str, Any]:
    """Return the members of a request; the case of their names does not count."""
    return {name.lower(): value for name, value in parsed(body).items()}


def _render(job: Job) -> dict[str, Any]:
    times = {"delay": job.due // 1000, "ttr": job.ttr // 1000}
    return {"topic": job.topic, "id": job.id, **times, "body": job.body}


def _path_reply(code: int, message: str, data: dict[str, Any] | None, call: str) -> Answer:
    """Return the answer to a path."""
    answer = {"code": code, "message": message, "data": data}
    return Answer(to_go_json(answer), media_type=JSON, name=f"/{call}")


def _command_reply(job: dict[str, Any] | None, error: str, call: str) -> Answer:
    """Return the answer to a command."""
    job = job or {"id": "", "body": ""}
    answer = {"success": not error, "error": error, "id": job["id"], "value": job["body"]}
    return Answer(to_go_json(answer), media_type=JSON, name=call)
