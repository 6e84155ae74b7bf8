"""What every door refuses: tasks that cannot be, and lines that no command takes.

One table for the SDK (tests/contract), the HTTP API (tests/integration/gateway) and the command line
(tests/fault/test_42_command_line.py). Odd values of every option and every field are made up there, from the
commands and calls that there are.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

LATER = datetime.now(UTC) + timedelta(hours=1)
NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - what is refused


class Odd:
    """Nothing that JSON, a time or an id could be."""


def _deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


MS = timedelta(milliseconds=1)
LOOP: dict[str, Any] = {}
LOOP["me"] = LOOP

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "naive": ("NaiveDatetime", {"action_time": NAIVE}),
    "past": ("NotInFuture", {"action_time": datetime.now(UTC) - timedelta(seconds=1)}),
    "year-1": ("NotInFuture", {"action_time": datetime.min.replace(tzinfo=UTC)}),
    "zero delay": ("NotInFuture", {"delay": 0}),
    "zero timedelta": ("NotInFuture", {"delay": timedelta(0)}),
    "NaN": ("InvalidDelay", {"delay": float("nan")}),
    "inf": ("InvalidDelay", {"delay": float("inf")}),
    "-inf": ("InvalidDelay", {"delay": float("-inf")}),
    "negative": ("InvalidDelay", {"delay": -1}),
    "negative timedelta": ("InvalidDelay", {"delay": timedelta(seconds=-1)}),
    "eleven years": ("InvalidDelay", {"delay": timedelta(days=11 * 366)}),
    "timedelta.max": ("InvalidDelay", {"delay": timedelta.max}),
    "1e300": ("InvalidDelay", {"delay": 1e300}),
    "10**400": ("InvalidDelay", {"delay": 10**400}),
    "year 9999": ("InvalidDelay", {"action_time": datetime.max.replace(tzinfo=UTC)}),
    "delay text": ("InvalidDelay", {"delay": "soon"}),
    "delay bool": ("InvalidDelay", {"delay": True}),
    "action_time text": ("InvalidInput", {"action_time": "2030-01-01T00:00:00Z"}),
    "action_time int": ("InvalidInput", {"action_time": 1893456000}),
    "both": ("InvalidInput", {"delay": 5, "action_time": LATER}),
    "neither": ("InvalidInput", {}),
    "list": ("InvalidAttribute", {"delay": 9, "attribute": [1]}),
    "text": ("InvalidAttribute", {"delay": 9, "attribute": "{}"}),
    "odd": ("InvalidAttribute", {"delay": 9, "attribute": {"a": Odd()}}),
    "set": ("InvalidAttribute", {"delay": 9, "attribute": {"a": {1}}}),
    "bytes": ("InvalidAttribute", {"delay": 9, "attribute": {"a": b"x"}}),
    "datetime": ("InvalidAttribute", {"delay": 9, "attribute": {"a": LATER}}),
    "nan in attribute": ("InvalidAttribute", {"delay": 9, "attribute": {"a": float("nan")}}),
    "inf in attribute": ("InvalidAttribute", {"delay": 9, "attribute": {"a": float("inf")}}),
    "int key": ("InvalidAttribute", {"delay": 9, "attribute": {1: 2}}),
    "surrogate": ("InvalidAttribute", {"delay": 9, "attribute": {"a": "\ud800"}}),
    "loop": ("InvalidAttribute", {"delay": 9, "attribute": LOOP}),
    "deep": ("InvalidAttribute", {"delay": 9, "attribute": _deep(50_000)}),
    "a level too deep": ("InvalidAttribute", {"delay": 9, "attribute": _deep(64)}),
    "too long": ("InvalidAttribute", {"delay": 9, "attribute": {"a": "x" * 4096}}),
    "too long wide": ("InvalidAttribute", {"delay": 9, "attribute": {"a": "😀" * 4096}}),
    "huge int": ("InvalidAttribute", {"delay": 9, "attribute": {"a": 10**5000}}),
    "biz -1": ("InvalidBizId", {"delay": 9, "biz_id": -1}),
    "biz 2**63": ("InvalidBizId", {"delay": 9, "biz_id": 2**63}),
    "biz None": ("InvalidBizId", {"delay": 9, "biz_id": None}),
    "biz float": ("InvalidBizId", {"delay": 9, "biz_id": 1.0}),
    "biz bool": ("InvalidBizId", {"delay": 9, "biz_id": True}),
    "biz bytes": ("InvalidBizId", {"delay": 9, "biz_id": b"1"}),
    "biz empty": ("InvalidBizId", {"delay": 9, "biz_id": ""}),
    "biz long": ("InvalidBizId", {"delay": 9, "biz_id": "x" * 300}),
    "biz surrogate": ("InvalidBizId", {"delay": 9, "biz_id": "\ud800"}),
    "unknown topic": ("UnknownTopic", {"delay": 9, "topic": "no.such"}),
    "topic braces": ("TocError", {"delay": 9, "topic": "a{b}"}),
    "topic None": ("TocError", {"delay": 9, "topic": None}),
    "topic control": ("TocError", {"delay": 9, "topic": "a\nb"}),
    "dedup int": ("InvalidInput", {"delay": 9, "dedup_key": 5}),
    "dedup long": ("InvalidInput", {"delay": 9, "dedup_key": "x" * 300}),
    "dedup surrogate": ("InvalidInput", {"delay": 9, "dedup_key": "\udfff"}),
    "tries -1": ("InvalidTries", {"delay": 9, "tries": -1}),
    "tries 65536": ("InvalidTries", {"delay": 9, "tries": 65_536}),
    "tries bool": ("InvalidTries", {"delay": 9, "tries": True}),
    "tries None": ("InvalidTries", {"delay": 9, "tries": None}),
    "expires before it is due": ("InvalidExpiry", {"action_time": LATER, "expires_at": LATER - MS}),
    "expires in year 9999": ("InvalidExpiry", {"delay": 9, "expires_at": datetime.max.replace(tzinfo=UTC)}),
    "expires naive": ("NaiveDatetime", {"delay": 9, "expires_at": NAIVE}),
    "expires int": ("InvalidInput", {"delay": 9, "expires_at": 4_000_000_000}),
    "slot_basis int": ("InvalidInput", {"delay": 9, "slot_basis": 5}),
    "slot_basis surrogate": ("InvalidInput", {"delay": 9, "slot_basis": "\udfff"}),
}
"""By what is wrong: the error that the SDK raises, and the arguments of the submit."""

_SUBMIT = "submit order.close --biz-id 1 --delay 60"
_CREATE = "topic create t --biz-type 900 --slots 1"
_SCHEDULE = "schedule create s --topic t --every 5"
_TARGET = "target create t --url https://a.example/"

COMMANDS: dict[str, str] = {
    "no-such-command": "No such command",
    # tasks
    "submit none --biz-id 1 --delay 60": "no topic 'none'",
    "submit a{b --biz-id 1 --delay 60": "not a topic name",
    "submit order.close --biz-id 1": "delay or an action_time",
    "submit order.close --delay 60": "Missing option '--biz-id'",
    "submit order.close --biz-id 1 --delay nan": "duration",
    "submit order.close --biz-id 1 --delay=-5": "duration",
    "submit order.close --biz-id 1 --delay 0": "not after now",
    "submit order.close --biz-id 1 --delay 4000d": "TOC_MAX_DELAY",
    "submit order.close --biz-id 1 --action-time tomorrow": "RFC 3339",
    "submit order.close --biz-id 1 --action-time 2030-01-31T12:00:00": "time zone",
    "submit order.close --biz-id 1 --action-time 2020-01-31T12:00:00Z": "not after now",
    "submit order.close --biz-id 1 --action-time 9999-12-31T23:59:59Z": "TOC_MAX_DELAY",
    f"{_SUBMIT} --action-time 2090-01-31T12:00:00Z": "not both",
    f"{_SUBMIT} --attribute {{oops": "not JSON",
    f"{_SUBMIT} --attribute [1]": "JSON object",
    f"{_SUBMIT} --attribute ''": "not JSON",
    f"{_SUBMIT} --attribute '{{\"x\": NaN}}'": "not JSON",
    f'{_SUBMIT} --attribute \'{{"x": "{"y" * 5000}"}}\'': "4096",
    f"{_SUBMIT} --attribute {'[' * 20_000}": "nested more than 64 deep",
    f"{_SUBMIT} --dedup-key ''": "dedup_key",
    f"{_SUBMIT} --slot-basis '\x07'": "control characters",
    "submit order.close --biz-id=-1 --delay 60": "out of range",
    f"submit order.close --biz-id {2**63} --delay 60": "out of range",
    "submit order.close --biz-id '' --delay 60": "biz_id",
    f"submit order.close --biz-id {'x' * 256} --delay 60": "biz_id",
    "get abc": "'abc' is not a job_id",
    "get 0": "not a job_id",
    "get -- -1": "'-1' is not a job_id",
    f"get {2**63}": "not a job_id",
    "find --biz-id=-1": "out of range",
    "find --biz-id 1 --topic none": "no topic 'none'",
    "find --biz-id 1 --status inf": "is no status",
    "cancel": "JOB_ID, or --topic",
    "cancel 1.5": "`toc find --biz-id ID` lists",
    "cancel 5 --biz-id 1": "JOB_ID, or --topic",
    "cancel --topic order.close": "JOB_ID, or --topic",
    "cancel 5 --topic order.close --biz-id 1": "JOB_ID, or --topic",
    "cancel --topic order.close --all": "No such option: --all",
    "cancel --topic none --biz-id 1": "no topic 'none'",
    "reschedule --delay 60": "Missing argument 'JOB_ID'",
    "reschedule 5": "delay or an action_time",
    "reschedule 5 --delay 60 --action-time 2090-01-31T12:00:00Z": "not both",
    "reschedule abc --delay 60": "not a job_id",
    "reschedule 5 --delay 4000d": "TOC_MAX_DELAY",
    # all that match
    "bulk cancel": "say which topic",
    "bulk cancel --topic none": "no topic 'none'",
    "bulk cancel --topic order.close --rate 0": "--rate",
    "bulk reschedule --topic order.close": "delay or an action_time",
    "bulk reschedule --topic order.close --yes --action-time 2020-01-31T12:00:00Z": "not after now",
    "bulk redrive --topic order.close --error ''": "error is empty",
    "bulk redrive --error x": "say which topic",
    "bulk redrive --topic order.close --rate nan": "--rate",
    "bulk redrive --topic order.close --before 1e308s": "is not a",
    "bulk purge --yes": "say which topic",
    "bulk purge --topic order.close --error x --rate=-1": "--rate",
    # topics
    "topic create a{b} --biz-type 900 --slots 1": "not a topic name",
    "topic create 'a\nb' --biz-type 900 --slots 1": "not a topic name",
    f"topic create {'x' * 129} --biz-type 900 --slots 1": "not a topic name",
    "topic create t --slots 1": "--biz-type",
    "topic create t --biz-type 900": "--slots",
    "topic create t --biz-type=-1 --slots 1": "biz_type",
    "topic create t --biz-type 7 --slots 1": "biz_type 7 exists already",
    "topic create order.close --biz-type 900 --slots 1": "exists already",
    "topic create t --biz-type 900 --slots 3": "power of two",
    "topic create t --biz-type 900 --slots 2048": "slot_amount",
    f"{_CREATE} --retries 0": "retries",
    f"{_CREATE} --retries 32": "retries",
    f"{_CREATE} --prepare-timeout 2": "prepare_timeout",
    f"{_CREATE} --backoff-base nan": "duration",
    f"{_CREATE} --backoff linear": "--backoff",
    f"{_CREATE} --type sometimes": "--type",
    "topic alter order.close": "nothing to change",
    "topic alter order.close --slots 3": "power of two",
    "topic alter none --slots 2": "no topic 'none'",
    "topic show none": "order.close",
    "topic pause none": "no topic 'none'",
    # dead tasks
    "dead list --before never": "not a time",
    "dead list --after 1e300w": "is not a",
    "dead list --after 2030-01-31T12:00:00": "no time zone",
    "dead list --after 1h --before 2h": "no task can match",
    "dead list --limit 0": "limit",
    f"dead list --limit {'9' * 30}": "--limit",
    "find --biz-id 1 --limit 1e3": "--limit",
    "dead list --topic none": "no topic 'none'",
    "dead redrive": "JOB_IDs; for all that match there is `toc bulk redrive`",
    "dead redrive --topic order.close --all": "No such option",
    "dead purge 5 abc": "'abc' is not a job_id",
    "dead purge -- -5": "'-5' is not a job_id",
    "dead purge": "`toc bulk purge`",
    # what comes due
    "due none": "no topic 'none'",
    "due --what-if 2h": "No such option: --what-if",
    "what-if order.close": "Missing option '--pause'",
    "what-if --pause soon": "duration",
    "what-if --pause 8d": "at most 604800 s (7d)",
    "what-if --pause 2h --rate 0": "--rate must be a number of at least 0.001",
    # schedules and targets
    "schedule alter s": "there is no schedule 's'",
    f"{_SCHEDULE} --anchor 2030-01-31T12:00:00": "no time zone",
    f"{_SCHEDULE} --dst skip": "dst has no effect",
    f"{_SCHEDULE} --zone Europe/Berlin": "zone has no effect",
    "schedule create s --topic t --cron '0 9 * * *' --anchor 2030-02-01T00:00:00Z": "anchor has no effect",
    "schedule backfill s --from 2030-01-31T12:00:00 --to 2030-02-01T00:00:00Z": "no time zone",
    f"{_TARGET} --dead-on 500": "422, not 500",
    f"{_TARGET} --timeout 1h": "timeout",
    f"{_TARGET} --headers missing": "'missing' cannot be read",
    "target create t --url http://example.com/": "TOC_WEBHOOK_ALLOW",
    "target create t --url https://u:canary@example.com/": "password",
    # workers and hosts
    "worker --app nothing": "package.module:center",
    "worker --app 'a\nb/c:d\ne'": "write it as a\\nb.c:d\\ne",
    "worker --app no.such.module:center": "no module",
    "worker --app json:center": "module 'json' has no 'center'",
    "worker --app json:loads": "must be a toc.TimeoutCenter",
    "worker --app toc.dev.demo:center": "demo.order.close",
    "worker --app toc.dev.demo:center --processes 0": "TOC_PROCESSES=0",
    "worker --app toc.dev.demo:center --threads 9999": "TOC_THREADS=9999",
    "slots --topic none": "no topic 'none'",
    "slots --watch --json": "not both",
    f"pin order.close_{'1' * 5000} h1 --absent": "not a slot",
    f"unpin order.close_{'1' * 5000}": "not a slot",
    "weight h1 nan --absent": "not nan",
    "weight h/1 1": "is not a name",
    # directories
    f"demo --count {'9' * 30}": "--count",
    "dev --directory /dev/null": "cannot be used as a directory",
    f"dev --directory {'x' * 5000}": "cannot be used as a directory",
}
"""By a line of ``toc``, as a shell takes it apart: what its error says. Its exit code is 2."""
