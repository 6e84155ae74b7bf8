"""An application with traces: its worker processes write them into TOC_TEST_SPANS when they end."""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from toc import Dead, Retry, Task, TimeoutCenter

center = TimeoutCenter()  # before there is a provider, as an application may order it
tracer = trace.get_tracer("app")


class Lines(SpanExporter):
    """One JSON object per line."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with (Path(os.environ["TOC_TEST_SPANS"]) / f"{os.getpid()}.jsonl").open("a") as file:
            file.writelines(f"{span.to_json(indent=None)}\n" for span in spans)
        return SpanExportResult.SUCCESS


provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(Lines(), schedule_delay_millis=600_000))
trace.set_tracer_provider(provider)


def work(task: Task) -> None:
    """Fails as often as the attribute says, with what nobody may see."""
    with tracer.start_as_current_span("inside", record_exception=False, set_status_on_exception=False):
        text = f"no luck with {task.attribute['canary']}"
        if task.attempt <= task.attribute.get("fail", 0):
            raise ValueError(text)
        if task.attempt <= task.attribute.get("again", 0):
            raise Retry(timedelta(0), text)
        if "dead" in task.attribute:
            raise Dead(text)


@center.handler("test.sync")
def on_thread(task: Task) -> None:
    work(task)


@center.handler("test.async")
async def on_event_loop(task: Task) -> None:
    work(task)


@center.handler("test.batch", batch=50)
def in_batches(tasks: list[Task]) -> dict[int, BaseException | None]:
    return {task.job_id: attempted(task) for task in tasks}


def attempted(task: Task) -> BaseException | None:
    """What became of one of a batch."""
    try:
        work(task)
    except Exception as exc:
        return exc
    return None
