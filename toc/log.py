"""Logging: an event name and ids, never a payload or a secret; always on stderr.

``configure`` is called once, by the program at the top (the command line). An application that uses the SDK
and configures structlog itself, before or after it imports toc, keeps its own configuration.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Collection
from typing import Any, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

# The password of each URL in a text: what stands between "//user:" and the last "@" before a blank or the
# next URL. Greedy, so that an unescaped "@" or "/" in a password does not show its tail.
_IN_URL = re.compile(r"(://[^\s:@/]*:)(?:(?!://)\S)*@")
# Passwords given in a query string.
_IN_QUERY = re.compile(r"(?i)([?&][a-z_]*(?:password|passwd|pwd|secret)[a-z_]*=)[^&\s,'\"]*")
_HIDDEN_KEYS = frozenset({"password", "passwd", "secret", "token", "attribute", "payload"})


def redact(text: str) -> str:
    """``text`` with the passwords of all URLs in it replaced by ``***``."""
    return _IN_QUERY.sub(r"\1***", _IN_URL.sub(r"\1***@", text))


def configure(
    level: str = "info",
    format: str = "auto",  # noqa: A002 - the name of the setting
    topics: Collection[str] = (),
) -> None:
    """Set up structlog for this process.

    ``level`` is debug, info, warning or error. ``format`` is ``pretty``, ``json`` (one object per line), or
    ``auto``: pretty if stderr is a terminal. With ``topics``, what is about other topics alone is left out.
    """
    processors, wrapper = _style(level, format, topics)
    structlog.configure(
        processors=processors,
        wrapper_class=wrapper,
        # Not cached, so that a later configuration counts; looked up late, so that a redirected stderr does.
        # It writes a line as one: processes share a log, and Python may have been told not to buffer.
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _style(
    level: str,
    format: str,  # noqa: A002 - the name of the setting
    topics: Collection[str],
) -> tuple[list[Processor], type[FilteringBoundLogger]]:
    pretty = format == "pretty" or (format == "auto" and sys.stderr.isatty())
    processors: list[Processor] = [
        *([only_topics(topics)] if topics else []),
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        # before redaction, so that tracebacks are texts by then
        structlog.processors.format_exc_info,
        redact_event,
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if pretty
        else structlog.processors.JSONRenderer(default=str),
    ]
    return processors, structlog.make_filtering_bound_logger(getattr(logging, level.upper()))


def only_topics(topics: Collection[str]) -> Processor:
    """The structlog processor that drops what is about another topic, by ``topic`` or its one ``slot``."""

    def keep(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        topic = event.get("topic")
        if topic is None and "slots" not in event and "slot" in event:
            topic = str(event["slot"]).rpartition("_")[0]
        if topic is not None and topic not in topics:
            raise structlog.DropEvent
        return event

    return keep


def redact_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """The structlog processor that keeps secrets out: URLs' passwords, and keys that name a secret."""
    for key, value in event.items():
        if key in _HIDDEN_KEYS:
            event[key] = "***"
        elif isinstance(value, str):
            event[key] = redact(value)
        elif value is not None and not isinstance(value, (bool, int, float)):
            event[key] = redact(str(value))
    return event


def stack(error: BaseException) -> str:
    """Where an error came from, and the classes of it and its causes; not what they say: it may quote a task.

    A text, so that no formatter that an application has set up goes and shows the frames' variables.
    """
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = "".join(traceback.format_tb(cause.__traceback__))
        parts.append(f"{frames}{type(cause).__name__}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\nfrom\n".join(parts)


class _Logger:
    """Logs as structlog is configured; where nobody has configured it, as ``configure()`` would.

    structlog's own default writes to stdout, and its global configuration is the application's to make.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(source=self._name), method)
        processors, wrapper = _style("info", "auto", ())
        printer = structlog.WriteLogger(sys.stderr)
        logger = structlog.wrap_logger(
            printer, processors=processors, wrapper_class=wrapper, source=self._name
        )
        return getattr(logger, method)


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of a module, ``get_logger(__name__)``: ``log.info("slot_claimed", slot=..., claim=...)``."""
    return cast(FilteringBoundLogger, _Logger(name))
