"""Traces: the path of a task from its submit to its last try, as one OpenTelemetry trace.

A row stores no trace context. Instead, the trace id and the id of the parent span of all spans of a task are
the first 24 bytes of SHA-256 of ``toc:JOB_ID``. The submitter, the worker and anyone who searches for the
trace of a job_id derive the same ids. The parent span itself is never written. The price: the trace is not
the caller's, only linked with it.

Which tasks are traced is derived as well, so that a trace is complete or absent: the trace id, read as
``TraceIdRatioBased`` samplers read it, must lie within the share TOC_TRACES.

Attributes are names, ids and numbers of toc, never what a task carries. Of an error only the class is
written, because its text may quote the task.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from toc.model.errors import ConfigError
from toc.model.raised import Postponed
from toc.model.task import Dead, Retry, Submission, Task
from toc.observe.log import get_logger, stack

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span

log = get_logger(__name__)

FLUSH_SECONDS = 3.0
"""For how many seconds a process that ends waits until its spans are exported."""

Attributes = dict[str, str | int | float]


def trace_id(job_id: int) -> str:
    """Return the trace id of a task as 32 hexadecimal digits."""
    return _digest(job_id)[:16].hex()


def is_traced(job_id: int, share: float) -> bool:
    """Whether the task belongs to this share (0 to 1) of all tasks. Every process gives the same answer."""
    return int.from_bytes(_digest(job_id)[8:16], "big") < round(share * 2**64)


def traceparent(job_id: int) -> str:
    """Return the header of W3C's Trace Context for what a try of this task sends.

    Under the span of the try, if there is one; else under the derived parent of all spans of the task, not
    sampled.
    """
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import trace

        current = trace.get_current_span().get_span_context()
        if current.is_valid:
            return f"00-{current.trace_id:032x}-{current.span_id:016x}-{current.trace_flags:02x}"
    digest = _digest(job_id)
    return f"00-{digest[:16].hex()}-{digest[16:24].hex()}-00"


class Tracing:
    """Writes the spans of a share of all tasks with the application's tracer. Thread-safe.

    Raises ConfigError when OpenTelemetry is not installed.
    """

    def __init__(self, share: float) -> None:
        try:
            from opentelemetry import context, trace
        except ImportError as exc:
            raise ConfigError(
                f"TOC_TRACES={share:g} needs OpenTelemetry, which is not installed: "
                f"pip install 'timeout-center[otel]', or set TOC_TRACES=0"
            ) from exc
        self._share = share
        self._trace = trace
        self._empty = context.Context
        self._tracer = trace.get_tracer("toc")

    # --- submit

    def submitted(
        self, began_ns: int, tasks: Sequence[Submission], outcomes: Sequence[int | BaseException | None]
    ) -> None:
        """Write spans for tasks submitted since ``began_ns``: each became the task of a job_id, or failed.

        Written afterwards, because only then are the job_ids certain; linked with the caller's span.
        """
        try:
            self._submitted(began_ns, tasks, outcomes)
        except Exception as exc:  # a sampler or exporter failed: a stored task must still be acknowledged
            log.warning("trace_failed", stack=stack(exc))

    def _submitted(
        self, began_ns: int, tasks: Sequence[Submission], outcomes: Sequence[int | BaseException | None]
    ) -> None:
        caller = self._trace.get_current_span()
        links = [self._trace.Link(caller.get_span_context())] if caller.get_span_context().is_valid else []
        now = time.time_ns()
        for one, outcome in zip(tasks, outcomes, strict=True):
            job_id = outcome if isinstance(outcome, int) else one.row.job_id
            if not is_traced(job_id, self._share):
                continue
            span = self._start(
                "send", self._trace.SpanKind.PRODUCER, job_id, one.topic, {}, links=links, start_ns=began_ns
            )
            if isinstance(outcome, BaseException):
                self._fail(span, outcome)
            span.end(now)
            if caller.is_recording():
                caller.add_link(span.get_span_context(), {"messaging.message.id": str(job_id)})

    # --- tries

    @contextmanager
    def trying(
        self, tasks: Sequence[Task], *, current: bool
    ) -> Iterator[Callable[[Mapping[int, BaseException | None]], None]]:
        """Write the spans of a try of these tasks of one topic. Yields a function for the errors by job_id.

        Within the block a span is the current one only if asked for, with one task.
        """
        spans = {one.job_id: self._start_try(one) for one in tasks if is_traced(one.job_id, self._share)}
        errors: dict[int, BaseException | None] = {}
        with ExitStack() as stack:
            for span in spans.values() if current else ():
                use = self._trace.use_span(span, record_exception=False, set_status_on_exception=False)
                stack.enter_context(use)
            try:
                yield errors.update
            except BaseException as exc:
                errors = dict.fromkeys(spans, exc)
                raise
            finally:
                for job_id, span in spans.items():
                    self._end_try(span, errors.get(job_id))

    def flush(self) -> None:
        """Export the written spans, before the process ends without its usual exit steps."""
        export = getattr(self._trace.get_tracer_provider(), "force_flush", None)
        if export is not None:
            # a thread, because not every exporter keeps to its timeout
            thread = threading.Thread(target=export, args=[int(FLUSH_SECONDS * 1000)], daemon=True)
            thread.start()
            thread.join(FLUSH_SECONDS)

    # --- inside

    def _start_try(self, task: Task) -> Span:
        more: Attributes = {
            "toc.attempt": task.attempt,
            "toc.version": task.version,
            "toc.action_time": task.action_time.isoformat(timespec="milliseconds"),
        }
        return self._start("process", self._trace.SpanKind.CONSUMER, task.job_id, task.topic, more)

    def _end_try(self, span: Span, error: BaseException | None) -> None:
        kinds = {type(None): "processed", Dead: "dead", Retry: "retry", Postponed: "postponed"}
        outcome = next((name for kind, name in kinds.items() if issubclass(type(error), kind)), "failed")
        span.set_attribute("toc.outcome", outcome)
        if error is not None and outcome != "postponed":
            self._fail(span, error)
        span.end()

    def _start(
        self, operation: str, kind: object, job_id: int, topic: str, more: Attributes, *,
        links: Sequence[Link] = (), start_ns: int | None = None,
    ) -> Span:  # fmt: skip
        return self._tracer.start_span(
            f"{operation} {topic}",
            self._above(job_id),
            kind,  # type: ignore[arg-type]  # its type can be named only where it is installed
            {
                "messaging.system": "toc",
                "messaging.operation.type": operation,
                "messaging.operation.name": operation,
                "messaging.destination.name": topic,
                "messaging.message.id": str(job_id),
                **more,
            },
            links,
            start_time=start_ns,
        )

    def _above(self, job_id: int) -> Context:
        """Return the context of all spans of a task: the parent that nobody writes."""
        digest, flags = _digest(job_id), self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        trace, span = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")
        above = self._trace.SpanContext(trace, span, is_remote=True, trace_flags=flags)
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(above), self._empty())

    def _fail(self, span: Span, error: BaseException) -> None:
        name = type(error).__name__
        span.set_attribute("error.type", name)
        span.set_status(self._trace.StatusCode.ERROR, name)


def _digest(job_id: int) -> bytes:
    return hashlib.sha256(f"toc:{job_id}".encode()).digest()
