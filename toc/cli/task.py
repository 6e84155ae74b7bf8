"""toc submit | get"""

import hashlib
from base64 import b64encode
from typing import Annotated

import typer

from toc.cli.output import print_bytes, print_job_id, show_one
from toc.cli.values import Json, attribute, biz_id, file_bytes, flag, job_number, opened, option
from toc.model.clock import parse_duration
from toc.model.documents import parse_instant
from toc.model.errors import BodyGone, InvalidInput, UnknownTask, UnreadableTask
from toc.model.task import OnConflict
from toc.observe.tracing import is_traced, trace_id
from toc.operate.records import row_record, task_or_damage

_KEEP = OnConflict.KEEP
TEXT_TYPE = "text/plain; charset=utf-8"


def submit(
    topic: Annotated[str, typer.Argument(help="The topic, as `toc topic list` shows it.")],
    biz: str = option(
        "ID", "Id of the order or other object; a number if all digits.", "--biz-id", default=...
    ),
    delay: str | None = option("TIME", "From now: seconds, 500ms, 30m, 7d."),
    action_time: str | None = option("TIME", "When: RFC 3339 with a zone, 2030-01-31T12:00:00Z."),
    attribute_json: str | None = option("JSON", "The task's data for the handler.", "--attribute"),
    dedup_key: str | None = option("KEY", "A second submit with this key returns the first task."),
    slot_basis: str | None = option("TEXT", "Chooses the slot instead of the biz_id."),
    text: bool = flag("--text", "Treat the biz_id as a text even if it is all digits."),
    tries: int = option("N", "How many tries, instead of the topic's; 65535: no limit.", default=0),
    expires_at: str | None = option("TIME", "No try starts after it: RFC 3339 with a zone."),
    body: str | None = option("TEXT", "The task's body, as UTF-8."),
    body_file: str | None = option("FILE", "The task's body: the bytes of a file; - is stdin."),
    content_type: str | None = option(
        "TYPE", "Of the body. Default application/octet-stream; text/plain for --body."
    ),
    on_conflict: OnConflict = option(
        None, "If a task has the dedup key: keep it, refuse with an error, or replace it.", default=_KEEP
    ),
    past: str = option(
        "refuse|run", "Of a time that has passed, on a timed topic: refuse it, or run now.", default="refuse"
    ),
    target: str | None = option("NAME", "The webhook target to send it to. Default: its topic's."),
    url: str | None = option("URL", "A URL of its own; with --target a path: /paid."),
    as_json: Json = False,
) -> None:
    """Submit a task and print its job_id.

    Examples: toc submit order.close --biz-id 42 --delay 30m --attribute '{"reason": "unpaid"}'
              toc submit mail.send --biz-id 42 --delay 1d --body-file mail.eml --content-type message/rfc822
    """
    if body is not None and body_file is not None:
        raise InvalidInput("give --body or --body-file, not both")
    with opened() as center:
        job_id = center.submit(
            topic,
            biz_id=biz_id(biz, as_text=text),
            delay=None if delay is None else parse_duration(delay),
            action_time=None if action_time is None else parse_instant(action_time),
            attribute=attribute(attribute_json),
            dedup_key=dedup_key,
            slot_basis=slot_basis,
            tries=tries,
            expires_at=None if expires_at is None else parse_instant(expires_at),
            body=_body(body, body_file, center.settings.max_body),
            content_type=TEXT_TYPE if body is not None and content_type is None else content_type,
            on_conflict=on_conflict,
            past=past,
            target=target,
            url=url,
        )
    print_job_id(job_id, as_json=as_json)


def _body(text: str | None, file: str | None, most: int) -> bytes | None:
    """Return the body that the options name."""
    if text is not None:
        return text.encode(errors="surrogateescape")  # as it was typed, whatever the terminal's encoding
    return None if file is None else file_bytes("--body-file", file, most)


def get(
    wanted: Annotated[str, typer.Argument(metavar="JOB_ID", help="The number that submit returned.")],
    body: bool = flag("--body", "Print the task's body and nothing else; with --json, in base64."),
    as_json: Json = False,
) -> None:
    """Show one task with the error of each failed try, or print its body. One that runs has an owner, with
    its host, and since when it has it.

    Examples: toc get 894573895733248
              toc get 894573895733248 --body > mail.eml
    """
    from toc.operate import late, running

    job_id = job_number(wanted)
    with opened() as center:
        center.store.check_layout()
        if (row := center.store.get(job_id)) is None:
            why = "finished ones are purged after their topic's retention"
            raise UnknownTask(f"there is no task {job_id}; {why}")
        topic = center.catalog.of_type(row.biz_type)
        name = f"biz_type-{row.biz_type}" if topic is None else topic.name
        record = task_or_damage(row_record, row, name)
        content = None
        if row.body_length is not None and (body or "unreadable" not in record):
            try:
                content = center.store.body_of(row)
                digest = hashlib.sha256(content.data).hexdigest()
                record |= {"content_type": content.content_type, "body_sha256": digest}
            except (BodyGone, UnreadableTask) as exc:
                if body:
                    raise
                record["body"] = str(exc)
        if body and not as_json:
            if content is None:
                raise InvalidInput(f"task {job_id} has no body")
            print_bytes(content.data)
            return
        if body and content is not None:
            record["body_base64"] = b64encode(content.data).decode()
        record["history"] = [failed.shown() for failed in center.store.history(job_id)]
        found = None if "unreadable" in record else late.why(center, row, topic)
        record["late"] = found if found is None or as_json else found["sentence"]
        where = None if topic is None else running.where_of(center, row, topic)
        if where is not None:
            record |= where.shown()
        elif topic is not None:
            record["slot"] = str(topic.slot(row.slot_crc, row.slot_amount))
        share = center.settings.traces
    if is_traced(job_id, share):
        record["trace_id"] = trace_id(job_id)
    show_one(record, as_json=as_json)
