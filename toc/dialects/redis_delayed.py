"""redis-delayed: jobs named by numbers, over forms and queries."""

from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import unquote_to_bytes

from toc.dialects.dialect_tasks import template_of
from toc.dialects.jobs import RETENTION_SECONDS, Job, JobDialect
from toc.dialects.port import LARGEST, NotUnderstood, Request, to_json
from toc.gateway.exchange import Answer
from toc.model.errors import BodyTooLarge, InvalidInput, TocError
from toc.model.topic import Template
from toc.pull.handed_out import HandedOut

PREFIX = "redis-delayed."
MAX_FIELDS = 30
PIECE_BYTES = 1 << 16
MAX_DELAY_MS = 3650 * 86_400_000
MAX_TTR_MS = 7 * 86_400_000
TEXT = "text/plain;charset=UTF-8"
RESERVED = "reserved"
_CALLS = {
    "/delay/add": ("POST", "add"),
    "/delay/pop": ("GET", "pop"),
    "/delay/finish": ("DELETE", "finish"),
    "/delay/delete": ("DELETE", "delete"),
}


class RedisDelayed(JobDialect):
    """The dialect. Ids are unique over all topics; adding one again replaces its job."""

    name: ClassVar[str] = "redis-delayed"
    prefix: ClassVar[str] = PREFIX
    templates: ClassVar[tuple[Template, ...]] = (
        template_of(PREFIX, max_runtime=MAX_TTR_MS // 1000, retention=RETENTION_SECONDS),
    )

    async def answer(self, request: Request) -> Answer:
        """Answer a call."""
        method, call = _CALLS.get(request.path, ("", ""))
        if not call:
            return _spring(request, HTTPStatus.NOT_FOUND, "No message available", "other")
        if request.method != method:
            message = f"Request method '{request.method}' not supported"
            reply = _spring(request, HTTPStatus.METHOD_NOT_ALLOWED, message, call)
            return reply._replace(headers={"allow": method})
        values = await self.service.parsed(request.body, partial(_fields, request))
        handed: tuple[HandedOut, ...] = ()
        if call == "add":
            job = self._job(values)
            await self.push(job)
            answer = to_json({"delayDate": job.due, "jodId": int(job.id), "topic": job.topic})
        elif call == "pop":
            got = await self.pop([_text(values, "topic")])
            if got is None:
                answer = to_json({"delayTime": 0, "retryCount": 0, "ttrTime": 0})
            else:
                handed, answer = (got[0],), to_json(_render(*got))
        else:
            job_id = str(_number(values, "jobId", 0, LARGEST))
            await (self.finish(job_id) if call == "finish" else self.delete(job_id))
            return Answer(b"success", media_type=TEXT, name=call)
        return Answer(answer, media_type="application/json;charset=UTF-8", handed=handed, name=call)

    def _job(self, values: dict[str, str]) -> Job:
        delay = _number(values, "delayTime", 0, MAX_DELAY_MS)
        job_id, topic = str(_number(values, "id", 0, LARGEST)), _text(values, "topic")
        ttr, body = _number(values, "ttrTime", 1, MAX_TTR_MS), values.get("message", "")
        return Job(job_id, topic, delay, ttr, body, self.due(delay))

    def failed(self, request: Request, error: Exception) -> Answer:
        """Answer as the original's framework does."""
        call = _CALLS.get(request.path, ("", "other"))[1]
        if isinstance(error, BodyTooLarge):
            return _spring(request, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error), call)
        if isinstance(error, InvalidInput):
            return _spring(request, HTTPStatus.BAD_REQUEST, str(error), call)
        if isinstance(error, TocError):
            return _spring(request, HTTPStatus.SERVICE_UNAVAILABLE, "try again", call)
        return _spring(request, HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed", call)


def _fields(request: Request) -> dict[str, str]:
    """Return the parameters of the query and of a form; those of the query come first.

    Raises NotUnderstood.
    """
    found: dict[str, str] = {}
    for data in (request.query, request.form):
        if data.count(b"&") >= MAX_FIELDS:
            raise NotUnderstood(f"at most {MAX_FIELDS} parameters are allowed")
        for pair in filter(None, data.split(b"&")):
            name, _, value = pair.partition(b"=")
            try:
                found.setdefault(_decoded(name), _decoded(value))
            except UnicodeDecodeError:
                raise NotUnderstood("the parameters are not UTF-8, percent-encoded") from None
    return found


def _decoded(data: bytes) -> str:
    """Undo the encoding of a name or value, a piece at a time: of each byte it makes an object. Raises
    UnicodeDecodeError."""
    data = data.replace(b"+", b" ")
    parts, at = [], 0
    while at < len(data):
        end = at + PIECE_BYTES
        if end < len(data) and (escape := data.rfind(b"%", end - 2, end)) >= 0:
            end = escape  # which may reach beyond
        parts.append(unquote_to_bytes(data[at:end]))
        at = end
    return b"".join(parts).decode()


def _text(values: dict[str, str], name: str) -> str:
    if not values.get(name):
        raise NotUnderstood(f"Required String parameter '{name}' is not present")
    return values[name]


def _number(values: dict[str, str], name: str, least: int, most: int) -> int:
    value = _text(values, name)
    if not (value.isascii() and value.isdecimal() and len(value) < 20 and least <= int(value) <= most):
        raise NotUnderstood(f"Parameter '{name}' must be a whole number from {least} to {most}")
    return int(value)


def _render(one: HandedOut, job: Job) -> dict[str, Any]:
    return {
        "delayTime": job.delay,
        "id": job.id,
        "message": job.body,
        "retryCount": one.row.attempts - 1,
        "status": RESERVED,
        "topic": job.topic,
        "ttrTime": job.ttr,
    }


def _spring(request: Request, status: HTTPStatus, message: str, call: str) -> Answer:
    """Return an error as the original's framework words it."""
    answer = {
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000+0000"),
        "status": int(status),
        "error": status.phrase,
        "message": message,
        "path": request.path,
    }
    return Answer(to_json(answer), int(status), "application/json;charset=UTF-8", name=call)
