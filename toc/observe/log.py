"""Logging: an event name and ids, never a payload or a secret; always on stderr.

The program at the top (the command line) calls ``configure`` once. An application that configures structlog
itself, before or after it imports toc, keeps its own configuration.

A failing log must not stop tasks: its disk may be full, its reader gone, or the log a pipe that nobody reads
any more. In toc's own processes no thread waits for a line to be written, whoever prints it; ``detach`` sets
that up. Each line goes into a bounded queue, which one thread writes out. A line is dropped, and counted, if
the queue is full, if the log refuses it, or if it raises.
"""

import atexit
import contextlib
import io
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TextIO, TypeGuard, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from toc.model.raised import field_of
from toc.observe.metrics import LOG_LINES_DROPPED

QUEUE_BYTES = 8 << 20
"""How many bytes may wait."""
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
    *,
    beside: bool = False,
) -> None:
    """Set up structlog for this process. ``beside`` an application that has done so, for toc's lines alone.

    ``level`` is debug, info, warning or error. ``format`` is ``pretty``, ``json`` (one object per line), or
    ``auto``: pretty if stderr is a terminal.
    """
    processors, wrapper = _style(level, format)
    if beside and structlog.is_configured():
        _ours[:] = [(processors, wrapper)]
        return
    structlog.configure(
        processors=processors,
        wrapper_class=wrapper,
        # Loggers are not cached, so that a later configuration takes effect. sys.stderr is looked
        # up late, so that a redirected stderr is used. Each line is one write, because processes
        # share a log, and Python may have been told not to buffer.
        logger_factory=lambda *_: _Lines(),
        cache_logger_on_first_use=False,
    )


_ours: list[tuple[list[Processor], type[FilteringBoundLogger]]] = []
"""How toc's lines are made where the application has configured structlog for its own."""


class _Lines:
    """Writes lines to stderr, each at once. structlog's own loggers take a lock: one that a signal handler
    logs through, while its thread does, would wait for itself."""

    def msg(self, line: str) -> None:
        """Write one line."""
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = msg


def _style(level: str, form: str) -> tuple[list[Processor], type[FilteringBoundLogger]]:
    pretty = form == "pretty" or (form == "auto" and sys.stderr.isatty())
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
        if structlog.is_configured() and not _ours:
            return structlog.get_logger(source=self._name)
        processors, wrapper = _ours[0] if _ours else _style("info", "auto")
        printer = _Lines()
        return structlog.wrap_logger(printer, processors=processors, wrapper_class=wrapper, source=self._name)


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a module's logger, used as ``log.info("slot_claimed", slot=..., claim=...)``."""
    return cast(FilteringBoundLogger, _Logger(name))


# --- streams that no thread waits for


class LogWriter:
    """Writes to a copy of ``descriptor``, in the order of the calls. Thread-safe.

    Calls ``dropped`` with the number of lines whenever it drops some. In a forked process, which is not
    toc's, it writes directly, as Python does. Raises OSError or RuntimeError when no file descriptor or
    thread is left.
    """

    def __init__(self, descriptor: int, *, dropped: Callable[[int], object]) -> None:
        self._descriptor = os.dup(descriptor)
        self._file = os.fstat(descriptor)
        self._dropped = dropped
        self._pid = os.getpid()
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._count = threading.RLock()  # reentrant: a signal handler or finalizer may write during a write
        self._bytes = 0
        """How many bytes wait in the queue."""
        self._torn = False
        """Whether the last line in the log lacks its end."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="toc-log", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Queue this, or drop it. Returns at once and never raises."""
        if os.getpid() != self._pid:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, data)
            return
        with self._count:
            if self._closed or self._bytes + len(data) > QUEUE_BYTES:
                self._drop(data)
            else:
                self._bytes += len(data)
                self._queue.put(data)

    def close(self, seconds: float) -> None:
        """Take nothing more, and wait at most ``seconds`` for what is queued. May be called twice."""
        if os.getpid() != self._pid:
            return
        with self._count:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(seconds)

    def _drop(self, data: bytes) -> None:
        if data:
            self._dropped(data.count(b"\n") or 1)

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = [self._queue.get()]
            # Together: after each write the thread may wait 5 ms for a busy interpreter.
            with contextlib.suppress(Empty):
                while lines[-1] is not None:
                    lines.append(self._queue.get_nowait())
            ended = lines[-1] is None
            data = b"".join(line for line in lines if line is not None)
            self._drop(self._write_out(data))
            with self._count:
                self._bytes -= len(data)
        if self._is_log():
            os.close(self._descriptor)

    def _is_log(self) -> bool:
        """Whether it is still the log's: a handler may have closed it, and its number be a connection's."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._file)
        except OSError:
            return False

    def _write_out(self, data: bytes) -> bytes:
        """Write it whole, however long that takes. Returns what the log refuses."""
        left = memoryview(b"\n" + data if self._torn else data)
        try:
            while left and self._is_log():
                written = os.write(self._descriptor, left)
                left = left[written:]
                self._torn = left.nbytes > 0
        except OSError:
            pass
        return bytes(left)


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
    raw = cast(Any, _Unhurried(writer, stream))
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=by_line)


def _has_file(stream: object) -> TypeGuard[io.TextIOWrapper]:
    """Whether the stream has a file. False if it is None, in memory, or the application's own object."""
    if not isinstance(stream, io.TextIOWrapper):
        return False
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError):
        return False
