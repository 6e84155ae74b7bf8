"""Logging: an event name and ids, never a payload or a secret; always on stderr.

``configure`` is called once, by the program at the top (the command line). An application that uses the SDK
and configures structlog itself, before or after it imports toc, keeps its own configuration.

Trouble with a log is no trouble for what serves tasks: no line is waited for (``logwriter``), and a line
that raises is dropped. ``detach`` gives that to all else that is printed in a process.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, NamedTuple, TextIO, TypeGuard, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from toc.observe.logwriter import Gap, LogWriter
from toc.observe.metrics import LOG_LINES_DROPPED

CLOSE_SECONDS = 1.0
"""How long a process that ends waits for its last lines to be written."""

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
    global _configured
    processors, wrapper = _configured = _style(level, format, topics)
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
        def log(*args: Any, **fields: Any) -> None:
            try:
                getattr(self._bound(), method)(*args, **fields)
            except Exception:  # an application's processor, or its stream: its trouble, not the task's
                LOG_LINES_DROPPED.of().add()

        return log

    def _bound(self) -> Any:
        if structlog.is_configured():
            return structlog.get_logger(source=self._name)
        processors, wrapper = _style("info", "auto", ())
        printer = structlog.WriteLogger(_unhurried(sys.stderr))
        return structlog.wrap_logger(printer, processors=processors, wrapper_class=wrapper, source=self._name)


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of a module, ``get_logger(__name__)``: ``log.info("slot_claimed", slot=..., claim=...)``."""
    return cast(FilteringBoundLogger, _Logger(name))


# --- streams that nobody waits for


class _Unhurried(io.RawIOBase):
    """The bytes of a text stream whose lines go through a LogWriter."""

    def __init__(self, writer: LogWriter, stream: TextIO) -> None:
        self._writer = writer
        self._descriptor = stream.fileno()
        self.name = stream.name

    def write(self, data: Any) -> int:
        self._writer.write(bytes(data))
        return len(data)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """It stays open: it is everybody's, and a handler may close it."""

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


class _StandIn(NamedTuple):
    """What takes the place of an application's stderr for lines of the SDK."""

    pid: int
    instead_of: TextIO
    stream: TextIO
    writer: LogWriter


_configured: tuple[list[Processor], type[FilteringBoundLogger]] | None = None
_writers: list[LogWriter] = []
_stand_in: _StandIn | None = None


def detach() -> None:
    """From now on nothing in this process waits for its stdout and stderr, or fails of them.

    For processes of toc's own, before they import the application: what it prints there is a log as well, and
    so are Python's tracebacks and warnings. ``sys.__stderr__`` stays as it is.
    """
    LOG_LINES_DROPPED.of()  # shown before there are any
    out, err = sys.stdout, sys.stderr
    if _has_file(err):
        sys.stderr = _through(_writer(err), err)
    if _has_file(out):
        same = _has_file(err) and os.path.sameopenfile(out.fileno(), err.fileno())
        # Never by the word, though Python was told not to buffer: other processes write in between.
        by_line = out.line_buffering or out.write_through
        sys.stdout = _through(_writers[-1] if same else _writer(out), out, by_line=by_line)


def close_log(seconds: float = CLOSE_SECONDS) -> None:
    """Give each stream so long to write its last lines; what comes later, or takes longer, is dropped.

    For the end of a process. The end of the interpreter calls it as well.
    """
    global _stand_in
    if isinstance(getattr(sys.stdout, "buffer", None), _Unhurried):
        sys.stdout.flush()
    while _writers:
        _writers.pop(0).close(seconds)
    _stand_in = None


def _writer(stream: TextIO) -> LogWriter:
    if not _writers:
        atexit.register(close_log)
    writer = LogWriter(stream.fileno(), dropped=LOG_LINES_DROPPED.of().add, notice=_notice)
    _writers.append(writer)
    return writer


def _through(writer: LogWriter, stream: TextIO, *, by_line: bool = True) -> TextIO:
    return io.TextIOWrapper(
        cast(Any, _Unhurried(writer, stream)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=by_line,
    )


def _has_file(stream: object) -> TypeGuard[io.TextIOWrapper]:
    """Not where there is no such stream, where it is in memory, or an invention of the application."""
    if not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError):
        return False


def _unhurried(stream: TextIO) -> TextIO:
    """A stream to the file of an application's stderr that nobody waits for; itself if it has none."""
    global _stand_in
    known = _stand_in
    if known is not None and known.pid == os.getpid() and known.instead_of is stream:
        return known.stream
    if not _has_file(stream) or isinstance(stream.buffer, _Unhurried):
        return stream
    try:
        writer = _writer(stream)
    except (OSError, RuntimeError):  # there is no file or no thread left
        return stream
    replaced = _through(writer, stream)
    _stand_in = _StandIn(os.getpid(), stream, replaced, writer)
    if known is not None:
        known.writer.close()
        with contextlib.suppress(ValueError):
            _writers.remove(known.writer)
    return replaced


def _notice(gap: Gap) -> bytes:
    """The line that tells of dropped ones."""
    processors, wrapper = _configured or _style("info", "auto", ())
    log = structlog.wrap_logger(
        structlog.testing.ReturnLogger(), processors=processors, wrapper_class=wrapper, source=__name__
    )
    since = datetime.fromtimestamp(gap.since, UTC).isoformat().replace("+00:00", "Z")
    line = log.warning("log_lines_dropped", lines=gap.lines, since=since, reason=gap.reason)
    return f"{line}\n".encode(errors="backslashreplace") if isinstance(line, str) else b""
