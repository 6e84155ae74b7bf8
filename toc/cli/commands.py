"""All commands. Those that are made of an operation take all but this from its declaration: how the result is
printed, and what the help adds."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import typer

from toc.cli import daemons, dev, importing, setup, task, watch
from toc.cli.operations import Show, made
from toc.cli.output import print_job_id, print_json, say, show, show_one
from toc.operate import (
    admin,
    audit,
    bulk,
    cluster,
    dead,
    due,
    late,
    running,
    schedules,
    targets,
    tasks,
    templates,
    tokens,
    topics,
)
from toc.operate.operation import Operation, Record

_MEANS = {
    "may_have_started": "a try may be running, or have run",
    "too_late": "it has ended already; `toc get` shows how",
    "unknown": "there is no such task; finished ones are purged after their topic's retention",
}
"""The explanation of each outcome other than the one that was asked for."""
_MORE = "more follow: repeat it with --next"
_RARE = "dedup_key expired tries expires_at body_length unreadable"

# --- how results are printed


def _rows(key: str, empty: str, columns: str = "", *, rare: str = "", more: str = "") -> Show:
    """Return what prints the list that a record has under a key. In a table it has only these columns, if any
    are named, and ``rare`` ones that some row has a value for. ``more`` says how to see those that follow."""

    def show_rows(record: Record, *, as_json: bool) -> None:
        rows = record[key]
        if columns and not as_json:
            some = [name for name in rare.split() if any(one.get(name) for one in rows)]
            rows = [{name: one.get(name) for name in [*columns.split(), *some]} for one in rows]
        show(rows, as_json=as_json, empty=empty)
        if more and record["next"] is not None:
            say(f"{more} {record['next']}")

    return show_rows


def _state(record: Record, *, as_json: bool) -> None:
    """Print what a pause or resume has changed; as JSON all of the topic."""
    some = {name: record[name] for name in ("name", "paused", "resume_rate")}
    show_one(record if as_json else some, as_json=as_json)


def _secret(key: str, text: str) -> Show:
    """Return what prints the secret of what was made, and nothing else on stdout."""

    def show_secret(record: Record, *, as_json: bool) -> None:
        if as_json:
            print_json(record)
            return
        print(record[key])
        say(f"keep it: it is not shown again. {text}")

    return show_secret


def _outcomes(done: str) -> Show:
    """Return what prints what came of one task or of many, and exits with 1 unless all are ``done``."""

    def show_outcomes(record: Record, *, as_json: bool) -> None:
        found = record.get("tasks")
        if found is None:
            show_one(record, as_json=as_json)
            counts = {record["outcome"]: 1} if "outcome" in record else record
        else:
            show(found, as_json=as_json, empty="no such tasks")
            counts = Counter(one["outcome"] for one in found)
        if any(key.startswith("would_") for key in record) or sum(counts.values()) <= counts.get(done, 0):
            return
        if "outcome" in record:
            say(_MEANS[record["outcome"]])
        raise typer.Exit(1)

    return show_outcomes


def _changed(record: Record, *, as_json: bool) -> None:
    """Exit with 1 if some of the tasks failed or were left alone, with 4 if they are out of reach."""
    unknown, failed = record.pop("unknown", 0), record.get("failed")
    show_one(record, as_json=as_json)
    if record.get("left"):
        say(f"{record['left']} were left: a server or table is out of reach; do it again")
        raise typer.Exit(4)
    if failed:
        say(f"{failed} failed: `toc bulk list` has the job and an error; do it again for them")
    if unknown:
        say(f"{unknown} of them are unknown or not dead, and were left unchanged")
    if failed or unknown:
        raise typer.Exit(1)


def _resumed(record: Record, *, as_json: bool) -> None:
    show_one(record, as_json=as_json)
    say("a gateway goes on with it; without a gateway it waits")


def _running(record: Record, *, as_json: bool) -> None:
    """Exit with 4 if tables did not answer, which may hold others."""
    show(record["tasks"], as_json=as_json, empty="none was found" if record["more"] else "nothing runs")
    watch.say_missing(record)
    if record["more"]:
        say("others may run: give --topic or --limit")
    if record["missing"]:
        raise typer.Exit(4)


def _late(record: Record, *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    if record["waiting"]:
        say("late, and not started yet:")
        show(record["waiting"], as_json=False, empty="")
    causes = [{name: one[name] for name in one if name != "worker"} for one in record["causes"]]
    show(causes, as_json=False, empty="no task has started late")
    watch.say_missing(record)
    if record["more"]:
        say("there was more: give --limit, or a later --after")
    if record["more_waiting"]:
        say("more are late than were looked at: give --topic")


def _lateness(record: Record, *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    show(record["topics"], as_json=False, empty="no numbers of the last hour; workers write them each minute")
    say("lateness: seconds, estimated from buckets; below a second it may exceed that of the latest start")
    for one in record["members"] or ():
        say(f"{one['member']} wrote its numbers {one['age']:.0f} s ago")


def _answer(record: Record, *, as_json: bool) -> None:
    show_one(record, as_json=as_json)
    if record["status"] is None or not 200 <= record["status"] < 300:
        raise typer.Exit(1)


def _rotated(record: Record, *, as_json: bool) -> None:
    show_one(record, as_json=as_json)
    if record["locked"]:
        say("no key of TOC_SECRET_KEY opens the locked ones: add theirs behind the others, or recreate them")
        raise typer.Exit(3)


# --- the commands


Command = Operation | Callable[..., None]
"""An operation is printed as it is, a line for each value."""


def _commands(some: Iterable[Command]) -> dict[str, Callable[..., None]]:
    """Return commands by name."""
    made_of = [made(one) if isinstance(one, Operation) else one for one in some]
    return {one.__name__: one for one in made_of}


def _group(text: str, *commands: Command, **named: Callable[..., None]) -> typer.Typer:
    group = typer.Typer(no_args_is_help=True, help=text)
    for name, run in (named | _commands(commands)).items():
        group.command(name)(run)
    return group


# fmt: off
PANELS = {
    "Try and develop": _commands([dev.demo, dev.dev]),
    "Tasks": _commands([
        task.submit, task.get,
        made(tasks.search, _rows(
            "tasks", "no such tasks",
            "job_id topic biz_id status action_time next_time ended attempt attribute",
            rare=_RARE, more=_MORE,
        ), "find", limit=replace(tasks.LIMIT, most=10_000)),
        made(late.late, _late, "late"),
        made(running.tasks, _running),
        made(bulk.cancel, _outcomes("cancelled")),
        made(bulk.reschedule, _outcomes("rescheduled")),
    ]),
    "Set up and operate": _commands([
        daemons.worker, daemons.gateway, watch.top,
        made(due.show, watch.show_due, "due"), made(due.what_if, watch.show_what_if, "what-if"),
        made(due.lateness, _lateness, "lateness"),
        watch.slots,
        made(cluster.workers, _rows(
            "workers", "no workers; start one on each host with `toc worker --app ...`",
            "worker host pid version protocol weight owned assigned tables drained leader joined topics "
            "metrics out_of_reach lost_threads",
        ), "workers"),
        made(cluster.intents, _rows(
            "intents", "no drains, pins or weights: slots go where balance puts them",
        ), "intents"),
        cluster.drain, cluster.undrain,
        made(cluster.pin, arguments=2),
        cluster.unpin,
        made(cluster.weigh, arguments=2),
        cluster.unweigh,
        made(cluster.rebalance, _rows("moves", "nothing to move: all is even")),
        made(audit.audit, _rows("actions", "no actions", "at by action target outcome details result"),
             "audit", limit=replace(audit.LIMIT, default=50, most=10_000), next=None),
        setup.sweep, setup.rebuild, setup.doctor,
    ]),
}
"""The commands that have one word, by their place in the help."""
_SIGNING = _secret("secret", "The receiver checks signatures with it.")
_MANY = (
    (bulk.cancel_all, _outcomes("cancelled")), (bulk.reschedule_all, _outcomes("rescheduled")),
    (bulk.redrive_all, _changed), (bulk.purge_all, _changed),
)
GROUPS = {
    "db": setup.db,
    "topic": _group(
        "Create topics and change their policies.",
        topics.create,
        made(topics.list_topics, _rows(  # `show` prints all policies: they fit on no screen
            "topics", "no topics yet; toc topic create order.close --biz-type 1001 --slots 8",
            "name biz_type slot_amount topic_type paused retries backoff",
        )),
        topics.alter, setup.sync, topics.show_topic, made(topics.pause, _state), made(topics.resume, _state),
        made(topics.delete, lambda done, *, as_json: show_one({"deleted": done["name"]}, as_json=as_json)),
    ),
    "template": _group(
        "Patterns by which doors create topics when tasks come.",
        templates.create,
        made(templates.list_templates, _rows(
            "templates", "no templates; toc template create 'shop.*' --slots 8",
        )),
        templates.show_template, templates.alter, templates.delete,
    ),
    "schedule": _group(
        "Recurring tasks: by cron expression or interval.",
        schedules.create,
        made(schedules.list_schedules, _rows(
            "schedules", "no schedules; toc schedule create NAME --topic TOPIC --cron '0 2 * * *'",
            "name topic cron zone every paused next_time fired skipped missed",
            rare="stuck", more="there may be more: --after",
        ), limit=replace(schedules.LIMIT, default=1000, most=10_000)),
        schedules.alter, schedules.show_schedule, schedules.pause, schedules.resume,
        made(schedules.trigger, lambda done, *, as_json: print_job_id(done["job_id"], as_json=as_json)),
        schedules.backfill,
        made(schedules.preview_given, _rows("fires", "it does not fire within a hundred years")),
        schedules.delete,
    ),
    "target": _group(
        "Receivers of webhooks.",
        made(targets.create, _SIGNING),
        made(targets.list_targets, _rows(
            "targets", "no targets; toc target create NAME --url https://host/path",
        )),
        targets.alter,
        made(targets.rotate, _SIGNING),
        made(targets.send_test, _answer),
        targets.show_target, targets.pause, targets.resume, targets.delete,
    ),
    "secrets": _group(
        "The keys that encrypt the secrets of webhook targets.",
        setup.key, made(targets.rotate_keys, _rotated),
    ),
    "import": importing.app,
    "dead": _group(
        "Tasks that ran out of tries.",
        made(dead.list_dead, _rows(
            "tasks", "no dead tasks",
            "job_id topic biz_id action_time failed_tries crashes ended last_error", rare=_RARE, more=_MORE,
        ), status=None, newest=None, limit=replace(tasks.LIMIT, most=10_000)),
        made(dead.groups, _rows("groups", "no dead tasks")),
        made(dead.redrive, _changed),
        made(dead.purge, _changed),
        show=task.get,
    ),
    "bulk": _group(
        "Change many tasks: all that match.",
        made(bulk.list_jobs, _rows(
            "jobs", "no bulk jobs", "name kind topic state done tasks counts by error created",
        )),
        made(bulk.outcomes, _rows("tasks", "no such tasks here", more=_MORE)),
        bulk.show, bulk.stop, made(bulk.resume, _resumed),
        *(made(bulk.typed(one), told, tasks=None, confirm=None, rate=bulk.RATE) for one, told in _MANY),
    ),
    "index": _group(
        "Whether there is an index in Redis, or the database alone.",
        admin.on, admin.off,
    ),
    "token": _group(
        "Access tokens of the gateway.",
        made(tokens.create, _secret("token", "It is in force within a second.")),
        made(tokens.list_tokens, _rows(
            "tokens", "no tokens; toc token create NAME --role produce --topic 'shop.*'",
        )),
        tokens.revoke,
    ),
    "config": setup.config,
}
# fmt: on
"""The groups, each a command of two words."""
