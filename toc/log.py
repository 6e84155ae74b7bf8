"""Logging: an event name and ids, never a payload or a secret; always on stderr.

``configure`` is called once, by the program at the top (the command line). An application that uses the SDK
and configures structlog itself, before or after it imports toc, keeps its own configuration.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection
from typing import cast

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
    pretty = format == "pretty" or (format == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
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
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # not cached, so that a later configuration counts; looked up late, so that a redirected stderr does
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


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


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of a module, ``get_logger(__name__)``: ``log.info("slot_claimed", slot=..., claim=...)``."""
    return cast(FilteringBoundLogger, structlog.get_logger(source=name))


if not structlog.is_configured():  # structlog's own default would write to stdout
    configure("debug")
