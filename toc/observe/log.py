"""Logging: an event name and ids, never a payload or a secret; always on stderr.

The program at the top (the command line) calls ``configure`` once. An application that uses the SDK and
configures structlog itself, before or after it imports toc, keeps its own configuration.

A failing log must not stop tasks. In toc's own processes no thread waits for a line to be written
(``logwriter``), whoever prints it; ``detach`` sets that up. A line that raises is dropped.
"""

from __future__ import annotations

import atexit
import io
import logging
import os
import re
import sys
import traceback
from typing import Any, TextIO, TypeGuard, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from toc.model.raised import field_of
from toc.observe.logwriter import LogWriter
from toc.observe.metrics import LOG_LINES_DROPPED

CLOSE_SECONDS = 1.0
"""For how many seconds a process that ends waits until its last lines are written."""

# The password of each URL in a text: from "//user:" to the last "@" before a blank or the next URL. Greedy,
# so that an unescaped "@" or "/" in a password does not show its tail.
_IN_URL = re.compile(r"(://[^\s:@/]*:)(?:(?!://)\S)*@")
# Passwords given in a query string.
_IN_QUERY = re.compile(r"(?i)([?&][a-z_]*(?:password|passwd|pwd|secret)[a-z_]*=)[^&\s,'\"]*")
_HIDDEN_KEYS = frozenset({"password", "passwd", "secret", "token", "attribute", "payload"})


def redact(text: str) -> str:
    """Return ``text`` with the passwords of all URLs in it replaced by ``***``."""
    return _IN_QUERY.sub(r"\1***", _IN_URL.sub(r"\1***@", text))


def configure(
    level: str = "info",
    format: str = "auto",  # noqa: A002 - the name of the setting
) -> None:
    """Set up structlog for this process.

    ``level`` is debug, info, warning or error. ``format`` is ``pretty``, ``json`` (one object per line), or
    ``auto``: pretty if stderr is a terminal.
    """
    processors, wrapper = _style(level, format)
    structlog.configure(
        processors=processors,
        wrapper_class=wrapper,
        # Loggers are not cached, so that a later configuration takes effect. sys.stderr is looked
        # up late, so that a redirected stderr is used. Each line is one write, because processes
        # share a log, and Python may have been told not to buffer.
        logger_factory=lambda *_: _Lines(),
        cache_logger_on_first_use=False,
    )


class _Lines:
    """Writes lines to stderr, each at once. structlog's own loggers take a lock: one that a signal handler
    logs through, while its thread does, would wait for itself."""

    def msg(self, line: str) -> None:
        """Write one line."""
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = msg


def _style(
    level: str,
    format: str,  # noqa: A002 - the name of the setting
) -> tuple[list[Processor], type[FilteringBoundLogger]]:
    pretty = format == "pretty" or (format == "auto" and sys.stderr.isatty())
    processors: list[Processor] = [
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


def redact_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Mask secrets, as a structlog processor: passwords in URLs, and values whose key names a secret."""
    for key, value in event.items():
        if key in _HIDDEN_KEYS:
            event[key] = "***"
        elif isinstance(value, str):
            event[key] = redact(value)
        elif value is not None and not isinstance(value, (bool, int, float)):
            event[key] = redact(str(value))
    return event


def stack(error: BaseException) -> str:
    """Return an error's traceback, and the classes of it and its causes. No messages: they may quote a task.

    The result is text, so that no formatter of an application can show the variables of the frames.
    """
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = "".join(traceback.format_tb(field_of(cause, "__traceback__")))
        parts.append(f"{frames}{type.__dict__['__name__'].__get__(type(cause))}")
        above, hidden = field_of(cause, "__cause__"), field_of(cause, "__suppress_context__")
        cause = above if above is not None or hidden else field_of(cause, "__context__")
    return "\nfrom\n".join(parts)


class Stack:
    """An error's ``stack``, made only if its line is written."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __repr__(self) -> str:
        return stack(self._error)


class _Logger:
    """Logs as structlog is configured, or as ``configure()`` would if nobody has configured it.

    structlog's own default writes to stdout, and its global configuration belongs to the application.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        def log(*args: Any, **fields: Any) -> None:
            try:
                getattr(self._bound(), method)(*args, **fields)
            except Exception:  # a processor or stream of the application failed; the task must not
                LOG_LINES_DROPPED.of().add()

        return log

    def _bound(self) -> Any:
        if structlog.is_configured():
            return structlog.get_logger(source=self._name)
        processors, wrapper = _style("info", "auto")
        printer = _Lines()
        return structlog.wrap_logger(printer, processors=processors, wrapper_class=wrapper, source=self._name)


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a module's logger, used as ``log.info("slot_claimed", slot=..., claim=...)``."""
    return cast(FilteringBoundLogger, _Logger(name))


# --- streams that no thread waits for


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
        """Do nothing: the stream is shared, and a handler may try to close it."""

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


_writers: list[LogWriter] = []


def detach() -> None:
    """Make stdout and stderr of this process streams that never wait and never raise.

    For toc's own processes, before they import the application: what it prints there is a log as well, and so
    are Python's tracebacks and warnings. ``sys.__stderr__`` stays as it is.
    """
    LOG_LINES_DROPPED.of()  # created now, so that it is shown before any line is dropped
    out, err = sys.stdout, sys.stderr
    if _has_file(err):
        sys.stderr = _through(_writer(err), err)
    if _has_file(out):
        same = _has_file(err) and os.path.sameopenfile(out.fileno(), err.fileno())
        # Never per write, even if Python was told not to buffer: other processes write in between.
        by_line = out.line_buffering or out.write_through
        sys.stdout = _through(_writers[-1] if same else _writer(out), out, by_line=by_line)


def close_log(seconds: float = CLOSE_SECONDS) -> None:
    """Give each stream ``seconds`` to write its last lines; then drop the rest.

    Called at the end of a process, and by the interpreter's exit.
    """
    if isinstance(getattr(sys.stdout, "buffer", None), _Unhurried):
        sys.stdout.flush()
    while _writers:
        _writers.pop(0).close(seconds)


def _writer(stream: TextIO) -> LogWriter:
    if not _writers:
        atexit.register(close_log)
    writer = LogWriter(stream.fileno(), dropped=LOG_LINES_DROPPED.of().add)
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
    """Whether the stream has a file. False if it is None, in memory, or the application's own object."""
    if not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError):
        return False
