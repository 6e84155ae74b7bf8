"""Numbers over time: what comes due, how the last hour went, which tasks were late, what a pause costs."""

from typing import Any

from toc.console import shown
from toc.console.shown import Block, Content, Form, Heat, Note, Picture, Table, columns
from toc.console.view import Part, View, fields_of, page
from toc.gateway.problems import INVALID, Problem
from toc.model.access import Action
from toc.model.clock import parse_duration, span
from toc.model.errors import InvalidInput

SECONDS = 10.0
"""Readings that are younger are good enough: they ask every server, and most are of whole minutes."""
LATE = 1.0
"""Seconds from which on a start is late, as for those who say why."""
DUE = columns("topic, due: Overdue, hour, day, week, later")
PENDING = ("overdue", "week", "later")
HOUR = columns("topic, starts, processed, failed, dead, lateness_p50: Lateness p50, lateness_p99: p99")
CAUSES = columns(
    "cause, topic, tasks, worst_seconds: Worst, worst_job_id: Worst task, since, until, evidence, "
    "remedy: What to do",
    worst_job_id="/console/tasks/{worst_job_id}",
)
WAITING = tuple(one for one in CAUSES if one.key != "until")
STEPS = columns("at: From, due, waiting: Waiting at its end")


async def _counted(view: View, what: str, name: str, topic: str) -> Part:
    return await view.part(what, name, {"topic": topic} if topic else {}, fresh=SECONDS)


def _missing(tables: list[Any]) -> list[Block]:
    what = f"{len(tables)} tables are not, or not fully, in these numbers."
    return [Note(text=what, level="warn")] if tables else []


async def due(view: View, topic: str = "") -> list[Block]:
    """Return when tasks come due, of a topic or of all that the reader may see."""
    part = await _counted(view, "What comes due", "GET /v1/due", topic)
    if part.value is None:
        return part.notes
    counts, total = part.value, part.value["total"]
    about, weeks = (
        f"Counted up to {span(age)} ago, without what has come or gone since." if age is not None else ""
        for age in (counts["ages"][name]["oldest"] for name in ("minutes", "hours"))
    )
    if counts["capacity"] is not None:
        about += f" All workers have started at most {shown.number(counts['capacity']).text} a minute."
    beyond = min((one["due"] for one in counts["beyond"]), default=0)
    most = beyond - 1 if beyond and not topic else None
    hour, week = counts["minutes_from"], counts["hours_from"]
    pile = shown.following("/console/what-if", {}, topic=topic)
    blocks = [
        *part.notes,
        *_missing(counts["missing"]),
        Picture("Due in the next hour", about, hour, 60, total["minutes"], "tasks a minute", most),
        Picture("Due in the next day", weeks, week, 3600, total["hours"][:24], "tasks an hour"),
        Picture("Due in the next week", weeks, week, 3600, total["hours"], "tasks an hour"),
        Note(text="What would pile up during a pause?", href=pile),
    ]
    if not topic:
        others = [{"topic": "others", **counts["others"]}] if counts["others"] else []
        every = [*counts["topics"], *others]
        some = [{**one, "due": one["overdue"]} for one in every if any(one[key] for key in PENDING)]
        blocks.append(Table("Due by topic", columns=DUE, records=some, empty="Nothing is pending."))
    return blocks


async def lateness(view: View, topic: str = "") -> list[Block]:
    """Return how late starts of the last hour were, and what came of them."""
    part = await _counted(view, "The last hour", "GET /v1/lateness", topic)
    if part.value is None:
        return part.notes
    counts = part.value
    rows, bounds = counts["total"]["lateness"], counts["bounds"]
    late = sum(sum(row[bounds.index(LATE) + 1 :]) for row in rows)
    starts = shown.number(sum(counts["total"]["starts"])).text
    about = f"{starts} starts, {shown.number(late).text} of them more than {LATE:g} s late."
    heat = Heat("Lateness in the last hour", about, counts["minutes_from"], rows, bounds)
    table = Table("The last hour", "", HOUR, counts["topics"], empty="Nothing has started.")
    return [*part.notes, heat, table]


@page("late", Action.FIND_TASKS, menu="Late", live=True, search="GET /v1/late")
async def late(view: View) -> Content:
    """Which tasks were late, and why."""
    part = await view.part("Late tasks", "GET /v1/late", view.query, fresh=SECONDS)
    blocks: list[Block] = [Form(fields=fields_of("GET /v1/late", view.query, leave_out=("limit",)))]
    blocks += part.notes
    if part.value is not None:
        blocks += _missing(part.value["missing"])
        some = "There are more, which are not counted." if part.value["more_waiting"] else ""
        waiting = part.value["waiting"]
        blocks.append(Table("Not started yet", some, WAITING, waiting, empty="No late task was found."))
        more = "There are earlier ones, which are not counted." if part.value["more"] else ""
        blocks.append(Table("Why", more, CAUSES, part.value["causes"], empty="No task has started late."))
    return Content("Late tasks", blocks, part.at)


def drain_of(pile: Any) -> str:
    """Say when what piled up would have started, and what that leaves out."""
    if pile["drained"] is None:
        return "When all of them would have started is not known."
    said = f"{span(pile['drain_seconds'])} later all of them would have started"
    if pile["rate"] is None:
        said += (
            " at the rate of all workers, less other topics. Its concurrency or run time may allow far less"
        )
        if (best := pile["best_minute"]) is not None:
            said += f": in the last hour it has started at most {shown.number(best).text} a minute"
    return f"{said}. Tasks that are not submitted yet are not counted."


@page("what-if", Action.READ_TOPICS, search="GET /v1/due:what-if")
async def what_if(view: View) -> Content:
    """What would pile up during a pause."""
    name = "GET /v1/due:what-if"
    fields = fields_of(name, {"pause": "2h", **view.query})
    blocks: list[Block] = [Form(fields=fields, submit="Show")]
    if "pause" not in view.query:
        return Content("What if a topic is paused?", blocks, view.now_ms)
    try:
        seconds = parse_duration(view.query["pause"])
    except InvalidInput as exc:
        raise Problem(INVALID, str(exc), field="pause") from None
    pile = await view.ask(name, {**view.query, "pause": str(seconds)})
    of = f" of {shown.harmless(pile['topic'])}" if pile["topic"] else ""
    waiting = shown.number(pile["waiting"]).text
    said = f"After a pause of {span(seconds)}, {waiting} tasks{of} would wait. {drain_of(pile)}"
    steps = [one for one in pile["steps"] if one["at"] <= (pile["drained"] or pile["resumed"])]
    blocks += [Note(text=said, level="warn"), *_missing(pile["missing"])]
    blocks.append(Table("Step by step", columns=STEPS, records=steps))
    return Content("What if a topic is paused?", blocks, view.now_ms)
