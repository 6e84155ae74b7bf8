"""lmstfy on the wire: what requests say, jobs as tasks, and how answers look. Knows no server.

Words, codes and the order of the checks are those of bitleak/lmstfy 725f59e.
"""

import json
import re
import secrets
import string
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from toc.dialects import dialect_tasks
from toc.dialects.dialect_tasks import hashed, topic_for
from toc.dialects.port import JSON, to_go_json
from toc.gateway.exchange import Answer, Headers
from toc.model import errors
from toc.model.access import Action
from toc.model.clock import from_ms
from toc.model.documents import check_depth
from toc.model.pull import MAX_TTR_SECONDS, PullRow
from toc.model.sharding import MAX_TABLES, crc32
from toc.model.task import DialectTask, NewTask, TaskRow, TaskStatus, decode_attribute
from toc.model.topic import Template
from toc.operate import tokens

NAME = "lmstfy"
DEDUP_KEY = f"{NAME}:job"
PREFIX = f"{NAME}."
RETENTION_SECONDS = 86_400
LONGEST_NAMESPACE = 86
"""Most characters of a namespace in a topic's name, so that a hash and the dots fit behind it."""
MAX_JOB_BYTES = 1 << 20
MAX_IN_BULK = 64
MAX_AT_ONCE = 100
MAX_ATTRIBUTES = 16
KEY_BYTES, VALUE_BYTES = 32, 128
"""Longer keys and values of attributes are cut off."""
ATTRIBUTE_HEADER = b"job-attr-"
VERSION_HEADER = b"enable-job-version"

DEFAULT_TTL, DEFAULT_TTR = 86_400, 120
U16, U32, I63 = (1 << 16) - 1, (1 << 32) - 1, (1 << 63) - 1
MAX_TRIES = U16 - 1
"""The most tries of a job. One more, 65,535, would mean no limit."""
LONGEST_NAME = 255


class Refused(errors.InvalidInput):
    """A request that is answered with a mistake, in the original's words."""

    def __init__(self, status: int, message: str, *, key: str = "error") -> None:
        super().__init__(message)
        self.status = status
        self.content = {key: message}


class Call(NamedTuple):
    """A call of the API. ``right`` is what a token must allow, None: no token is needed.

    ``rated`` is the word for the call in a refusal, if it counts against a token's rate.
    """

    name: str
    right: Action | None
    rated: str = ""


CALLS = {
    ("PUT", ""): Call("publish", Action.SUBMIT, "produce"),
    ("PUT", "bulk"): Call("bulk", Action.SUBMIT, "produce"),
    ("PUT", "job/"): Call("republish", Action.SUBMIT, "produce"),
    ("GET", ""): Call("consume", Action.PULL, "consume"),
    ("GET", "peek"): Call("peek", Action.GET_BODY),
    ("GET", "job/"): Call("peek_job", Action.GET_BODY),
    ("DELETE", "job/"): Call("delete", Action.END_LEASE),
    ("DELETE", ""): Call("destroy", Action.PURGE),
    ("GET", "size"): Call("size", None),
    ("GET", "deadletter"): Call("peek_dead", Action.READ_DEAD),
    ("PUT", "deadletter"): Call("respawn", Action.REDRIVE),
    ("DELETE", "deadletter"): Call("delete_dead", Action.PURGE),
    ("GET", "deadletter/size"): Call("dead_size", None),
}
"""By method and what a path has after the queue."""
_NAME = re.compile(r"[-_A-Za-z0-9]+")
_NAMES = re.compile(r"[-_,A-Za-z0-9]+")


class Route(NamedTuple):
    """A call and what its path names."""

    call: Call
    namespace: str
    queue: str
    job_id: str = ""

    @property
    def queues(self) -> list[str]:
        """The queues that it names: a consumer may name several."""
        return self.queue.split(",") if self.call.name == "consume" else [self.queue]


def route(method: str, path: str) -> Route | None:
    """Return what a request is for, None for no call of the API."""
    parts = path.split("/")
    if len(parts) < 4 or parts[:2] != ["", "api"] or not all(parts[2:]):
        return None
    rest = parts[4:]
    job_id = rest.pop() if len(rest) == 2 and rest[0] == "job" else ""
    call = CALLS.get((method, "/".join(rest) + ("/" if job_id else "")))
    return None if call is None else Route(call, parts[2], parts[3], job_id)


def check_names(where: Route) -> None:
    """Raise Refused unless namespace and queue are legal."""
    consume = where.call.name == "consume"
    if not consume and max(len(where.namespace.encode()), len(where.queue.encode())) > LONGEST_NAME:
        raise Refused(400, "namespace or queue name too long")
    check_namespace(where.namespace)
    legal = _NAMES if consume else _NAME
    if not legal.fullmatch(where.queue) or (not consume and where.queue.startswith("_")):
        raise Refused(400, "queue name contains forbidden characters")


def check_namespace(name: str) -> None:
    """Raise Refused unless a namespace has only characters that names may have."""
    if not _NAME.fullmatch(name):
        raise Refused(400, "namespace name contains forbidden characters")


# --- parameters


class Query:
    """The parameters of a query; of one that is given twice the first counts."""

    def __init__(self, text: bytes) -> None:
        pairs = parse_qsl(text.decode("latin-1"), keep_blank_values=True, errors="replace")
        self._values = dict(reversed(pairs))

    def get(self, name: str, default: str = "") -> str:
        """Return a parameter as it is."""
        return self._values.get(name, default)

    def number(self, name: str, default: int, *, least: int = 0, most: int, signed: bool = False) -> int:
        """Return a whole number. Raises Refused."""
        text = self._values.get(name)
        if text is None:
            return default
        digits = text.removeprefix("-").removeprefix("+") if signed and text[1:2] not in "+-" else text
        if len(digits) <= 20 and digits.isascii() and digits.isdecimal():
            number = -int(digits) if text.startswith("-") else int(digits)
            if least <= number <= most:
                return number
        raise Refused(400, f"invalid {name}")


class Publishing(NamedTuple):
    """How jobs are to be published. Seconds; a ttl of 0: without end."""

    delay: int
    ttl: int
    tries: int


def publishing(query: Query) -> Publishing:
    """Return the parameters of publish. Raises Refused."""
    delay = query.number("delay", 0, most=U32)
    ttl = query.number("ttl", DEFAULT_TTL, most=U32)
    if 0 < ttl < delay:
        raise Refused(400, "ttl is shorter than delay")
    tries = query.number("tries", 1, most=U16)
    if not tries:
        raise Refused(400, "tries shouldn't be zero")
    return Publishing(delay, ttl, tries)


def attributes(headers: Headers, *, versioned: bool) -> dict[str, str]:
    """Return the attributes of a job from the headers of its request. Raises Refused.

    Keys are in lower case: the case of a header's name means nothing. A job without a version has none.
    """
    found: dict[str, str] = {}
    for name, value in headers if versioned else ():
        if name.startswith(ATTRIBUTE_HEADER) and value:
            key = name[len(ATTRIBUTE_HEADER) :][:KEY_BYTES].decode("latin-1")
            found.setdefault(key, value[:VALUE_BYTES].decode("utf-8", "replace"))
    if len(found) > MAX_ATTRIBUTES:
        raise Refused(400, f"too many attributes, cannot exceed {MAX_ATTRIBUTES}")
    return found


_SPACE = re.compile(r"[ \t\r\n]*")


# Numbers stay texts: only their form is checked. NaN and the like are no JSON, which int says of them.
_DECODER = json.JSONDecoder(parse_constant=int, parse_int=str, parse_float=str)


def bulk_jobs(body: bytes) -> list[bytes]:
    """Return the jobs of a bulk publish, each byte for byte as in the array. Raises Refused."""
    try:
        jobs = _elements(body.decode("latin-1"))  # one character per byte: JSON's own characters are ASCII
    except Refused:
        raise
    except (ValueError, RecursionError):
        raise Refused(400, "request body should be an array of objects") from None
    if not jobs:
        raise Refused(400, "no jobs")
    return jobs


def _elements(text: str) -> list[bytes]:
    """Return the elements of a JSON array as they are written. Raises ValueError or RecursionError.

    It stops at one too many. The decoder builds what it reads, and lets no other thread run meanwhile: so it
    is never given more than one job may have.
    """

    def skip(at: int) -> int:
        space = _SPACE.match(text, at)
        return at if space is None else space.end()

    text = text.strip(" \t\r\n")
    found: list[bytes] = []
    at = 0
    while text.startswith("," if found else "[", at):
        at = skip(at + 1)
        if not found and text[at:] == "]":
            break
        if len(found) == MAX_IN_BULK:
            raise Refused(400, "too many jobs")
        part = text[at : at + MAX_JOB_BYTES + 1]
        try:
            _, end = _DECODER.raw_decode(part)
        except ValueError:
            end = len(part)
            if end <= MAX_JOB_BYTES:
                raise
        if end > MAX_JOB_BYTES:
            raise Refused(413, "job too large")
        check_depth(job := part[:end].encode("latin-1"))
        found.append(job)
        at = skip(at + end)
    if text != "null" and (text[at:] != "]" or not at):
        raise ValueError
    return found


def token(headers: Headers, query: Query) -> tuple[str, str]:
    """Return the pool and the token that a request names; ("default", "") without a token."""
    raw = next((str(value, "latin-1") for name, value in headers if name == b"x-token" and value), "")
    return split_token(raw or query.get("token"))


def split_token(raw: str) -> tuple[str, str]:
    """Return pool and token of ``[pool:]token``."""
    pool, colon, secret = raw.partition(":")
    return (pool, secret) if colon else ("default", raw)


def secret_of(token: str) -> str:
    """Return the access token for a token of lmstfy: itself, or one made for an older token."""
    return token if token.startswith(tokens.PREFIX) else f"{tokens.PREFIX}{NAME}.{token}"


# --- tasks


def prefix_of(namespace: str) -> str:
    """Return how the topics of a namespace begin."""
    fits = len(namespace) <= LONGEST_NAMESPACE
    return (topic_for(namespace, PREFIX) if fits else PREFIX + hashed(namespace)) + "."


def topic_of(namespace: str, queue: str) -> str:
    """Return the topic of a queue: ``lmstfy.namespace.queue``, with a hash for what does not fit."""
    return topic_for(queue, prefix_of(namespace))


def template_of(namespace: str) -> Template:
    """Return the template by which topics of a namespace are created."""
    prefix = prefix_of(namespace)
    return dialect_tasks.template_of(prefix, max_runtime=MAX_TTR_SECONDS, retention=RETENTION_SECONDS)


def task_of(
    namespace: str, queue: str, job_id: str, body: bytes, *, due: int, expires_at: int, tries: int,
    attributes: Mapping[str, str], slot_basis: str | None = None,
) -> NewTask:  # fmt: skip
    """Return a job as a task. Instants are ms; ``expires_at`` 0: never.

    Its attribute keeps the names, which a topic may not hold.
    """
    attribute = {"namespace": namespace, "queue": queue}
    return DialectTask(
        topic_of(namespace, queue),
        job_id,
        action_time=from_ms(due),
        attribute={**attribute, "attributes": dict(attributes)} if attributes else attribute,
        dedup_key=DEDUP_KEY,
        slot_basis=slot_basis,
        tries=min(tries, MAX_TRIES),
        expires_at=from_ms(max(expires_at, due)) if expires_at else None,
        body=body or None,
    )


def ascending(job_ids: Iterable[str]) -> list[str]:
    """Return ids of jobs in an order in which their tasks, made at one instant, have ascending job_ids.

    Tasks of one slot that are due at one instant are handed out in the order of their job_ids.
    """
    return sorted(job_ids, key=lambda job_id: crc32(job_id) & (MAX_TABLES - 1))


# --- answers


def reply(content: object, status: int = 200, *, indent: bool = False) -> Answer:
    """Return an answer as the original gives it; None: without a body."""
    headers = {"x-request-id": ulid(int(time.time() * 1000))}
    if content is None:
        return Answer(b"", status, "", headers)
    return Answer(to_go_json(content, sort_keys=True, indent=indent), status, JSON, headers)


_REFUSALS: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.BodyTooLarge, 413, "body too large"),
    (errors.InvalidAttribute, 400, "attributes too large"),
    (errors.TooManyTopics, 400, "too many queues"),
    *((kind, 503, "internal error") for kind in (errors.TopicClosed, errors.UnknownTopic)),
    (errors.InvalidInput, 400, ""),
    (errors.TocError, 503, "internal error"),
    (Exception, 500, "internal error"),
)
"""How errors are answered: the first that fits. A queue may just be deleted, or a server be away."""


def refusal(error: Exception) -> Answer:
    """Return the answer to a mistake or a failure."""
    if isinstance(error, Refused):
        return reply(error.content, error.status)
    status, words = next((status, words) for kind, status, words in _REFUSALS if isinstance(error, kind))
    return reply({"error": words or str(error)}, status)


def id_of(row: TaskRow | PullRow) -> str:
    """Return the id of a job."""
    return row.biz_key or str(row.biz_id)


def job_of(
    row: TaskRow | PullRow, namespace: str, queue: str, data: bytes | None, now: int
) -> dict[str, Any]:
    """Return a job as answers show it. ``data`` None: it is gone."""
    job_id, attributes = id_of(row), decode_attribute(row.attribute).get("attributes")
    made = made_at(job_id)
    gone = data is None or row.status == TaskStatus.DEAD
    return {
        "namespace": namespace,
        "queue": queue,
        "job_id": job_id,
        "data": None if data is None else b64encode(data).decode(),
        "ttl": 0 if gone else seconds_left(row.expires_at, now),
        "elapsed_ms": max(0, now - made) if made else 0,
        "remain_tries": max(0, row.tries - row.attempts),
        "attributes": (isinstance(attributes, dict) and attributes) or None,
    }


def seconds_left(expires_at: int, now: int) -> int:
    """Return the ttl of a job that expires at an instant (ms; 0: never), rounded as Redis does; at least
    1."""
    return max(1, (expires_at - now + 500) // 1000) if expires_at else 0


# --- ids

_ALPHABET = string.digits + "ABCDEFGHJKMNPQRSTVWXYZ"
_ULID = re.compile(f"[{_ALPHABET}]{{26}}")
_TO_BASE_32 = str.maketrans(_ALPHABET, string.digits + string.ascii_uppercase[:22])
ULID_CHARS = 26


def ulid(now: int, low: bytes = b"") -> str:
    """Return a new ULID of an instant (ms). Its last bytes are ``low``, the rest is random."""
    number = int.from_bytes(now.to_bytes(6, "big") + secrets.token_bytes(10 - len(low)) + low, "big")
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


def new_job_id(now: int, delay: int, *, versioned: bool) -> str:
    """Return the id of a new job as the original makes it: a ULID that holds its delay in seconds.

    ``versioned``: with a 1 before it, for clients that ask for that.
    """
    return ("1" if versioned else "") + ulid(now, delay.to_bytes(4, "little"))


def made_at(job_id: str) -> int:
    """Return when a job was published (ms), 0 if its id does not say so."""
    return _number(job_id) >> 80


def delay_of(job_id: str) -> int:
    """Return the delay in seconds that a job was published with, 0 if its id does not say so."""
    return int.from_bytes((_number(job_id) & U32).to_bytes(4, "big"), "little")


def _number(job_id: str) -> int:
    """Return the 128 bits of a ULID, with or without a version before it; 0 of what is none."""
    text = job_id[-ULID_CHARS:].upper()
    number = int(text.translate(_TO_BASE_32), 32) if _ULID.fullmatch(text) else 0
    return number if number < 1 << 128 else 0
