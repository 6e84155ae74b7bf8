"""Checks the invariants of the whole system over a history and the state that it ended in.

    L lost        an acknowledged task has not ended, has vanished, ended by nobody's doing, lost its deadline
    E early       a handler started before the action_time that was acknowledged for that version
    C cancel      a handler ran although a cancel (or a reschedule) had been answered so that it could not
    D duplicate   a try ran twice and no declared fault explains it; one process ran an id twice at once
    X dead        a dead task came back without an operator, or its DeadQueue entry is missing or wrong
    R retries     tries were charged that were neither the task's own nor a crash's, or were forgotten; a
                  task died of a crash; a failed try did not raise the number of tries
    T settle      after its due time, and after the last fault before it, a task waited longer than stated, or
                  a later try for longer than that and its backoff and prepare_timeout
    U unexpected  a handler or a row of a task that nobody submitted; a start after the row had ended
    O orphan      an index entry without a row, or in two places, or in another slot than the row says

A call counts as acknowledged only if its ``ok`` is in the history; one without an answer may or may not have
happened. Faults explain only what was in flight when they happened and only on the processes that they name
(``_explain``); what no fault explains is an error. What was pulled is its consumer's until its lease ends,
whatever breaks; it comes again then only if something broke meanwhile, and never after an ack that was
answered in time. Everything is judged by the machine's monotonic clock, except being early and the ends of
leases: these are judged by the wall clock that the worker or consumer saw.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from harness.final import Final, Place, Row
from harness.history import lines
from toc import CancelOutcome, RescheduleOutcome, TaskStatus
from toc.model.topic import Delivery, Slot, Topic

INVARIANTS = "LECDXRTUO"
SHOWN = 100
"""Findings that are kept for each invariant; the others are only counted."""
NS = 1_000_000_000
SKEW_MS = 100
COMMIT = NS // 2
"""How long after the instant that it carries an end is committed."""

PENDING, PROCESSED = int(TaskStatus.PENDING), int(TaskStatus.PROCESSED)
CANCELLED, DEAD = int(TaskStatus.CANCELLED), int(TaskStatus.DEAD)
FAILED = ("raise", "dead")
_MOVED = (RescheduleOutcome.RESCHEDULED.value, RescheduleOutcome.MAY_HAVE_STARTED.value)
CHARGING = ("kill", "pause", "cut", "redis_loss", "redis_down")
"""Faults that may end a try without its own doing."""
DYING_NS = NS
"""A process that was sent SIGKILL takes what comes due until it is gone, and what it has sent is executed: so
long after the end of such a fault a try may still be lost to it."""


class Finding(NamedTuple):
    """One breach of one invariant."""

    invariant: str
    job_id: int
    text: str


@dataclass
class Verdict:
    """What the checker found. ``clean`` is the verdict; ``str`` is for people."""

    findings: dict[str, list[Finding]] = field(default_factory=lambda: {name: [] for name in INVARIANTS})
    breaches: Counter[str] = field(default_factory=Counter)
    """By invariant; ``findings`` keeps at most SHOWN of each."""
    counts: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    """Explained duplicates by the kind of fault that explains them."""
    faults: Counter[str] = field(default_factory=Counter)
    lateness_ms: list[float] = field(default_factory=list)
    """First start minus due time, sorted."""
    settled_s: float = 0.0
    """The longest that a task waited after it was due and the faults before it had ended."""

    @property
    def clean(self) -> bool:
        """Whether every invariant holds."""
        return not self.breaches

    def breach(self, invariant: str, job_id: int, text: str) -> None:
        """Note a breach."""
        self.breaches[invariant] += 1
        if len(self.findings[invariant]) < SHOWN:
            self.findings[invariant].append(Finding(invariant, job_id, text))

    def late(self, share: float) -> float:
        """The lateness in milliseconds that this share of the tasks did not exceed; 0 if none ran."""
        late = self.lateness_ms
        return late[min(int(len(late) * share), len(late) - 1)] if late else 0.0

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        late = f"p50 {self.late(0.5):.1f} p99 {self.late(0.99):.1f} max {self.late(1):.1f}"
        report = [
            f"{'CLEAN' if self.clean else 'BROKEN: ' + _counted(self.breaches)}; {counts}",
            f"faults: {_counted(self.faults)}; explained duplicates: {_counted(self.duplicates)}",
            f"lateness ms {late}; settled within {self.settled_s:.2f} s",
        ]
        for invariant, found in self.findings.items():
            report += [f"  {invariant} {finding.job_id}: {finding.text}" for finding in found[:8]]
            if self.breaches[invariant] > 8:
                report.append(f"  {invariant} ... {self.breaches[invariant]} in all")
        return "\n".join(report)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed. All in seconds."""

    settle: float = 30.0
    """How long a task may wait after it was due and the faults before had ended."""
    write: float = 2.0
    """From a handler's end until its row is written; a store fault in between makes it longer."""
    hold: float = 5.0
    """From the row check until the handler starts: what was checked may wait for a thread."""
    crash_limit: int | None = None
    """Crashes in a row after which a task is run alone; None: no task may die of crashes."""


class _Run:
    """One start of a handler. Instants are nanoseconds, monotonic but for ``wall``; ``end`` 0: none seen."""

    __slots__ = ("acked", "attempt", "end", "mono", "outcome", "pid", "until", "version", "wall")

    def __init__(self, mono: int, wall: int, pid: int, attempt: int, version: int, until: int) -> None:
        self.mono, self.wall, self.pid, self.attempt, self.version = mono, wall, pid, attempt, version
        self.until = until
        """When the lease of a consumer ends, wall clock; 0: it is no consumer."""
        self.end = self.acked = 0
        self.outcome = ""


class _Call(NamedTuple):
    op: str
    began: int
    ended: int
    wall: int
    """When it ended, wall clock."""
    outcome: str
    """What the SDK answered; "?" when it is not known."""
    due: int


class _Job:
    __slots__ = ("acked", "biz", "calls", "due", "runs", "seen")

    def __init__(self) -> None:
        self.acked = False
        self.due: int | None = None
        self.biz: int | str = -1
        self.runs: list[_Run] = []
        self.calls: list[_Call] | None = None
        self.seen: list[tuple[int, int]] | None = None


class _Fault(NamedTuple):
    begin: int
    end: int
    kind: str
    pids: frozenset[int]

    def holds(self, *pids: int) -> bool:
        return not self.pids or not self.pids.isdisjoint(pids)


FOREVER = 1 << 62


class _Past:
    """The history, by task."""

    def __init__(self, directory: Path) -> None:
        self.jobs: dict[int, _Job] = {}
        self.maybe: dict[int | str, set[int]] = {}
        """biz_id -> due times of submits of which it is not known whether they took place."""
        self.counts: Counter[str] = Counter()
        self.faults: list[_Fault] = []
        self.deaths: list[tuple[int, int]] = []
        """When handlers killed their own process, and which."""
        self.starts_of: Counter[int] = Counter()
        """By pid."""
        self._open: dict[tuple[int, int], dict[str, Any]] = {}
        faults: dict[tuple[int, int], dict[str, Any]] = {}
        ends: dict[tuple[int, int], dict[str, Any]] = {}
        for line in lines(directory):
            event = line["e"]
            if event == "start":
                self._start(line)
            elif event == "end":
                self._end(line)
            elif event == "acked":
                self._run_of(line).acked = line["mono"]
            elif event == "fault":
                faults[line["pid"], line["id"]] = line
            elif event == "fault_end":
                ends[line["pid"], line["id"]] = line
            elif event == "seen":
                job = self._job(line["job"])
                job.seen = [*(job.seen or ()), (line["status"], line["v"])]
            elif event == "invoke":
                self._open[line["pid"], line["call"]] = line
            else:
                self._answer(self._open.pop((line["pid"], line["call"])), line)
        for invoke in self._open.values():
            self._answer(invoke, {"e": "unknown", "mono": FOREVER, "wall": FOREVER})
        for key, line in faults.items():
            end = ends.get(key, {"mono": FOREVER})
            pids = frozenset([*line["pids"], *end.get("pids", ())])
            self.faults.append(_Fault(line["mono"], end["mono"], line["kind"], pids))
        self.faults.sort()
        self.deaths.sort()
        for job in self.jobs.values():
            if len(job.runs) > 1:
                job.runs.sort(key=lambda run: run.mono)

    def _job(self, job_id: int) -> _Job:
        job = self.jobs.get(job_id)
        if job is None:
            job = self.jobs[job_id] = _Job()
        return job

    def _start(self, line: dict[str, Any]) -> None:
        job = self._job(line["job"])
        job.biz = line["biz"]
        self.starts_of[line["pid"]] += 1
        run = _Run(line["mono"], line["wall"], line["pid"], line["try"], line["v"], line.get("until", 0))
        job.runs.append(run)

    def _run_of(self, line: dict[str, Any]) -> _Run:
        """The newest try of a consumer that a line is about."""
        runs = self.jobs[line["job"]].runs
        return next(run for run in reversed(runs) if (run.pid, run.attempt) == (line["pid"], line["try"]))

    def _end(self, line: dict[str, Any]) -> None:
        pid = line["pid"]
        # The oldest that is open: two of one process at once are an error anyway. A copy of a process has
        # begun none, and its file may be the first to be read.
        for run in self._job(line["job"]).runs:
            if run.pid == pid and not run.end and run.attempt == line["try"]:
                run.end, run.outcome = line["mono"], line["out"]
                break
        if line["out"] == "die":
            self.deaths.append((line["mono"], pid))

    def _answer(self, invoke: dict[str, Any], answer: dict[str, Any]) -> None:
        op, how = invoke["op"], answer["e"]
        self.counts[f"{op} {how}"] += 1
        if how == "fail":
            return
        if op == "submit":
            self._submitted(invoke, answer)
            return
        outcome = answer.get("outcome", "?") if how == "ok" else "?"
        call = _Call(op, invoke["mono"], answer["mono"], answer["wall"], outcome, invoke.get("due", 0))
        # What a redrive that was answered did not change it did not touch.
        jobs = [invoke["job"]] if "job" in invoke else invoke["jobs"]
        for job_id in answer.get("jobs", jobs):
            job = self._job(job_id)
            job.calls = [*(job.calls or ()), call]

    def _submitted(self, invoke: dict[str, Any], answer: dict[str, Any]) -> None:
        known = answer["e"] == "ok"
        jobs = answer["jobs"] if known else [None] * len(invoke["biz"])
        for job_id, biz, due in zip(jobs, invoke["biz"], invoke["due"], strict=True):
            if job_id is not None:
                job = self._job(job_id)
                job.biz = biz
                if not job.acked:  # else its dedup_key led to what was stored before
                    job.acked, job.due = True, due
            elif not known or answer.get("maybe"):
                self.maybe.setdefault(biz, set()).add(due)


def check(directory: Path, final: Final, limits: Limits = Limits()) -> Verdict:
    """Compare what happened with what was promised. Everything that was due must have had time to end."""
    return _Check(_Past(directory), final, limits).run()


class _Check:
    def __init__(self, past: _Past, final: Final, limits: Limits) -> None:
        self.past = past
        self.final = final
        self.limits = limits
        self.verdict = Verdict()
        self._hold = int(limits.hold * NS)
        self._write = int(limits.write * NS)
        self._late = array("d")
        self._begins = [fault.begin for fault in past.faults]
        self._recovered: list[int] = []
        """By fault, in their order: when this one and all before it had ended."""
        until = 0
        for fault in past.faults:
            until = max(until, fault.end)
            self._recovered.append(until)

    def run(self) -> Verdict:
        verdict = self.verdict
        verdict.faults.update(fault.kind for fault in self.past.faults)
        if self.past.deaths:
            verdict.faults["die"] = len(self.past.deaths)
        jobs = self.past.jobs
        verdict.counts["starts"] = sum(len(job.runs) for job in jobs.values())
        if pulled := sum(run.until > 0 for job in jobs.values() for run in job.runs):
            verdict.counts["pulled"] = pulled
        verdict.counts["acknowledged"] = sum(job.acked for job in jobs.values())
        index = dict(self.final.index)
        for row in self.final.rows:
            verdict.counts["rows"] += 1
            verdict.counts[TaskStatus(row.status).name.lower()] += 1
            job = jobs.pop(row.job_id, None) or _Job()
            self._job(row, job)
            if self.final.indexed:
                self._places(row, index.pop(row.job_id, ()))
        for job_id, job in jobs.items():
            self._no_row(job_id, job)
        for job_id, places in index.items():
            verdict.breach("O", job_id, f"stands in {_named(places)} and has no row")
        verdict.counts.update(
            {"calls unknown": sum(n for k, n in self.past.counts.items() if "unknown" in k)}
        )
        verdict.lateness_ms = sorted(self._late)
        return verdict

    # --- one task ----------------------------------------------------------------------------------------

    def _job(self, row: Row, job: _Job) -> None:
        if not job.acked:
            dues = self.past.maybe.get(row.biz)
            if dues is None:
                self.verdict.breach("U", row.job_id, f"a row that nobody submitted (biz_id {row.biz})")
                return
            job.due = min(dues)
            self.verdict.counts["unacknowledged but stored"] += 1
        topic = self.final.topics[row.biz_type]
        calls = job.calls or ()
        self._status(row, job, calls)
        if calls:
            self._cancels(row, job, calls)
        if job.seen:
            self._ended_stays(row, job.seen, calls)
        if job.runs:
            self._early(row, job, calls)
            self._duplicates(row, job, topic)
            self._after_end(row, job)
            self._settled(row, job)
            self._resumed(row, job, topic)
        self._retries(row, job, topic)

    def _no_row(self, job_id: int, job: _Job) -> None:
        if job.acked:
            if not any(call.op == "purge" for call in job.calls or ()):
                self.verdict.breach("L", job_id, "was acknowledged and has no row")
        elif job.runs:
            self.verdict.breach("U", job_id, f"ran, and has no row (biz_id {job.biz})")

    def _status(self, row: Row, job: _Job, calls: Sequence[_Call]) -> None:
        breach = self.verdict.breach
        dues = _deadlines(job)
        if row.action_time not in dues:
            breach("L", row.job_id, f"its deadline became {row.action_time}, acknowledged were {_list(dues)}")
        if row.status == PENDING and row.next_time <= self.final.now_ms:
            breach("L", row.job_id, f"is pending, due {self.final.now_ms - row.next_time} ms ago{_runs(job)}")
        elif row.status == PENDING and (row.attempts or row.action_time <= self.final.now_ms):
            breach("L", row.job_id, f"has not ended: waits for try {row.attempts + 1}{_runs(job)}")
        elif row.status == PENDING:
            self.verdict.counts["not due yet"] += 1
        elif row.status == PROCESSED and not any(
            run.outcome == "ok" and run.version == row.version for run in job.runs
        ):
            breach("L", row.job_id, f"is marked as processed and no try succeeded{_runs(job)}")
        elif row.status == CANCELLED and not any(call.op == "cancel" for call in calls):
            breach("L", row.job_id, "is cancelled and nobody cancelled it")

    def _cancels(self, row: Row, job: _Job, calls: Sequence[_Call]) -> None:
        breach = self.verdict.breach
        version = 0
        """What the row's version was before the call; -1 when an unknown outcome makes that unknowable."""
        for call in sorted(calls, key=lambda call: call.began):
            if call.op == "cancel":
                self._cancel(row, job, call)
            elif call.op == "redrive":
                version = version + 1 if version >= 0 and call.outcome != "?" else version
            elif call.outcome == "?":
                version = -1
            elif call.outcome == RescheduleOutcome.UNKNOWN.value:
                breach("L", row.job_id, "a reschedule was told that there is no such task")
            elif call.outcome != RescheduleOutcome.TOO_LATE.value:
                moved = call.outcome == RescheduleOutcome.RESCHEDULED.value  # not: may have started
                ran = [run for run in job.runs if run.version == version]
                if moved and version >= 0 and ran:
                    breach("C", row.job_id, f"ran for a deadline that was moved in time{_runs(job)}")
                version = version + 1 if version >= 0 else version

    def _cancel(self, row: Row, job: _Job, call: _Call) -> None:
        breach = self.verdict.breach
        if call.outcome == CancelOutcome.UNKNOWN.value:
            breach("L", row.job_id, "a cancel was told that there is no such task")
        elif call.outcome == CancelOutcome.CANCELLED.value:
            if job.runs and not self._index_forgot(row, job, call):
                breach("C", row.job_id, f"ran although its cancel was answered CANCELLED{_runs(job)}")
        elif call.outcome == CancelOutcome.MAY_HAVE_STARTED.value and any(
            run.mono > call.ended and _in_time(call, run, row, job) for run in job.runs
        ):
            breach("C", row.job_id, f"ran although its cancel was acknowledged before it was due{_runs(job)}")
        held = (CancelOutcome.CANCELLED.value, CancelOutcome.MAY_HAVE_STARTED.value)
        if call.outcome in held and row.status != CANCELLED:
            breach("C", row.job_id, f"its cancel was acknowledged and it is {TaskStatus(row.status).name}")

    def _index_forgot(self, row: Row, job: _Job, call: _Call) -> bool:
        """Whether a cancel after a due time could not see that a worker held it: Redis had lost that."""
        run = job.runs[0]
        if any(_in_time(call, other, row, job, 0) for other in job.runs):
            return False
        return any(
            fault.kind == "redis_loss" and fault.end >= run.mono - self._hold and fault.begin <= call.ended
            for fault in self.past.faults
        )

    def _ended_stays(self, row: Row, seen: Sequence[tuple[int, int]], calls: Sequence[_Call]) -> None:
        redriven = any(call.op == "redrive" for call in calls)
        for status, version in seen:
            if status in (PROCESSED, CANCELLED) and row.status != status:
                self.verdict.breach(
                    "L", row.job_id, f"was {TaskStatus(status).name} and changed to {row.status}"
                )
            elif status == DEAD and (row.status != DEAD or row.version != version) and not redriven:
                self.verdict.breach("X", row.job_id, f"was dead and is {TaskStatus(row.status).name}")

    def _early(self, row: Row, job: _Job, calls: Sequence[_Call]) -> None:
        for run in job.runs:
            if run.version == 0:
                due = job.due
            else:
                dues = [call.due for call in calls if call.op == "reschedule" and call.began < run.mono]
                if any(call.op == "redrive" for call in calls) and job.due is not None:
                    dues.append(job.due)
                due = min(dues, default=None)
                if due is not None and run.version == row.version:  # of former ones: one of these
                    due = row.action_time
            if due is None:
                self.verdict.breach("U", row.job_id, f"ran as version {run.version}, which nobody made")
            elif run.wall < due * 1_000_000:
                early = due - run.wall / 1e6
                self.verdict.breach("E", row.job_id, f"try {run.attempt} started {early:.3f} ms early")

    def _duplicates(self, row: Row, job: _Job, topic: Topic) -> None:
        overtime = topic.max_runtime * NS
        for before, run in pairwise(job.runs):
            lapsed = 0 < before.until <= run.wall
            running = (not before.end or before.end > run.mono) and not lapsed
            if 0 < before.acked < run.mono:
                self.verdict.breach("D", row.job_id, f"ran again after an ack in time{_runs(job)}")
                continue
            if running and run.pid == before.pid:
                self.verdict.breach("D", row.job_id, f"process {run.pid} ran it twice at once{_runs(job)}")
                continue
            if run.version != before.version:
                justified = not running
            else:
                failed = before.outcome in FAILED and not running
                justified = failed or run.mono - before.mono >= overtime
                if failed and run.attempt <= before.attempt and not self._explain(row, before, run):
                    self.verdict.breach("R", row.job_id, f"a failed try was not charged{_runs(job)}")
                buried = before.outcome == "dead" and not running and not lapsed
                if buried and not self._explain(row, before, run):
                    self.verdict.breach(
                        "X", row.job_id, f"ran again after its handler had declared it dead{_runs(job)}"
                    )
            counted_down = run.version == before.version and run.attempt < before.attempt
            if counted_down and not self._explain(row, before, run):
                self.verdict.breach("R", row.job_id, f"its tries were counted down{_runs(job)}")
            if justified:
                continue
            if before.until and not lapsed:
                self.verdict.breach("D", row.job_id, f"ran again before its lease had ended{_runs(job)}")
                continue
            cause = self._unacked(before, run) if lapsed else self._explain(row, before, run)
            if cause is None:
                self.verdict.breach("D", row.job_id, f"ran twice and no fault explains it{_runs(job)}")
            else:
                self.verdict.duplicates[cause] += 1
        for run in job.runs:
            if run.attempt > topic.retries:
                self.verdict.breach("R", row.job_id, f"had try {run.attempt} of {topic.retries}")

    def _explain(self, row: Row, before: _Run, run: _Run) -> str | None:
        """The kind of the fault that let ``run`` start although ``before`` had not failed: one that names its
        process if there is one, then a loss of Redis.

        ``before`` must have been in flight when it happened: not ended, or ended and perhaps not written. Or
        ``run`` was taken, checked and held by a process that was stopped or cut off until it was too late.
        That Redis was out of reach explains nothing by itself: leases on rows say meanwhile what runs. Only
        when MySQL was out of reach at the same time was ``before`` cut off.
        """
        if before.outcome == "die":
            return "die"
        ended = FOREVER
        if before.end and before.outcome not in FAILED:
            ended = self._written(before.end, self._write)
            if row.status == PROCESSED and row.version == before.version:
                stamped = row.next_time * 1_000_000 + before.mono - before.wall
                ended = min(ended, self._written(stamped, COMMIT))
        everywhere: str | None = None
        for fault in self.past.faults:
            if fault.begin > run.mono:
                break
            if fault.kind not in CHARGING:
                continue
            if fault.kind == "kill":
                if before.pid in fault.pids and before.mono <= fault.end + DYING_NS and fault.begin <= ended:
                    return fault.kind
            elif fault.end >= before.mono - self._hold:
                if fault.kind == "pause":
                    both = (fault.holds(before.pid) and fault.begin <= ended) or (
                        fault.holds(run.pid) and run.mono <= fault.end + self._hold
                    )
                elif fault.kind == "cut":
                    both = fault.holds(run.pid, before.pid) and fault.begin <= ended
                else:
                    both = fault.begin <= ended and (
                        fault.kind == "redis_loss" or self._without_mysql(fault, before, min(ended, run.mono))
                    )
                if both and fault.pids:
                    return fault.kind
                if both and everywhere in (None, "redis_down"):
                    everywhere = fault.kind
        for death, pid in self.past.deaths:  # a handler has killed the process that ran its neighbours
            # Its threads may have begun more between its last word and its end.
            if pid == before.pid and death <= run.mono and death <= ended:
                return "die"
        return everywhere

    def _unacked(self, before: _Run, run: _Run) -> str | None:
        """Why a consumer has not acked before its lease ended: it was killed, or something else broke."""
        meanwhile = [
            fault
            for fault in self.past.faults
            if fault.begin <= run.mono and fault.end + self._write >= before.mono
        ]
        killed = any(fault.kind == "kill" and before.pid in fault.pids for fault in meanwhile)
        return "kill" if killed else "ttr" if meanwhile else None

    def _without_mysql(self, outage: _Fault, before: _Run, until: int) -> bool:
        """Whether MySQL was out of reach during an outage of Redis, while this try was in flight."""
        begin, end = max(outage.begin, before.mono - self._hold), min(outage.end, until)
        return any(
            fault.kind == "store_down" and fault.begin <= end and fault.end >= begin
            for fault in self.past.faults
        )

    def _written(self, ended: int, within: int) -> int:
        """Until when the row of a try may have been unwritten; MySQL's absence makes it longer."""
        until = ended + within
        for fault in self.past.faults:
            if fault.kind in ("store_down", "cut", "pause") and fault.begin <= until and fault.end >= ended:
                until = max(until, fault.end + within)
        return until

    def _after_end(self, row: Row, job: _Job) -> None:
        """Whatever fails, the row check keeps an ended task from starting."""
        if row.status == PENDING:
            return
        last = job.runs[-1]
        allowed = (row.next_time + self.limits.hold * 1000) * 1_000_000
        if last.version != row.version or last.wall <= allowed:
            return
        if any(call.op == "cancel" and call.ended >= last.mono for call in job.calls or ()):
            return  # a transaction of the caller was open until then
        for fault in self.past.faults:
            if fault.kind == "pause" and fault.holds(last.pid) and fault.begin <= last.mono:
                return  # it was checked before its process was stopped
        after = (last.wall // 1_000_000 - row.next_time) / 1000
        invariant = {PROCESSED: "U", CANCELLED: "C", DEAD: "X"}[row.status]
        status = TaskStatus(row.status).name
        self.verdict.breach(invariant, row.job_id, f"started {after:.1f} s after it was {status}{_runs(job)}")

    def _settled(self, row: Row, job: _Job) -> None:
        first = next((run for run in job.runs if run.version == row.version), None)
        if first is None:
            return
        if row.version == 0:
            due = row.action_time
        else:
            answered = [call.wall // 1_000_000 for call in job.calls or () if call.wall < FOREVER]
            due = max([row.action_time, *answered])
        late = first.wall / 1e6 - due
        self._late.append(late)
        number = bisect_right(self._begins, first.mono)
        waited = late / 1000
        if number:
            waited = min(waited, (first.mono - self._recovered[number - 1]) / NS)
        self.verdict.settled_s = max(self.verdict.settled_s, waited)
        if waited > self.limits.settle:
            self.verdict.breach(
                "T", row.job_id, f"started {waited:.1f} s after it was due and all faults had ended"
            )

    def _resumed(self, row: Row, job: _Job, topic: Topic) -> None:
        """A later try may wait for its backoff, and until what held the one before it is given up."""
        overtime = topic.max_runtime * NS
        for before, run in pairwise(job.runs):
            if run.version != before.version:
                continue
            ended = 0 < before.end <= run.mono
            free = before.end if ended else before.mono
            if not ended and free + overtime <= run.mono:
                free += overtime
            if before.until and before.outcome not in FAILED:
                free = max(free, before.mono + before.until - before.wall)
            number = bisect_right(self._begins, run.mono)
            if number:
                free = max(free, self._recovered[number - 1])
            set_back = max(0, (before.wall - before.mono) - (run.wall - run.mono))  # backoff is of that clock
            backoff = min(topic.backoff_base * 2.0**before.attempt, topic.backoff_cap)
            waited = (run.mono - free - set_back) / NS - topic.prepare_timeout - backoff
            if waited > self.limits.settle:
                text = f"try {run.attempt} came {waited:.1f} s after its time and the end of all faults"
                self.verdict.breach("T", row.job_id, text + _runs(job))

    def _retries(self, row: Row, job: _Job, topic: Topic) -> None:
        if row.status == CANCELLED:  # a cancel that came late marks the row as tried
            return
        runs = [run for run in job.runs if run.version == row.version]
        if not row.attempts and row.status != DEAD and not any(run.outcome in FAILED for run in runs):
            return
        failed = sum(run.outcome in FAILED for run in runs)
        overran = sum(_overran(run, row, topic) for run in runs)
        faults = self._charges(job, row, topic)
        if row.attempts > failed + overran + faults:
            self.verdict.breach(
                "R",
                row.job_id,
                f"was charged {row.attempts} tries; {failed} failed, {overran} ran too long, crashes are at "
                f"most {faults}{_runs(job)}",
            )
        elif row.attempts < len({run.attempt for run in runs if run.outcome in FAILED}) and not faults:
            # Of two that were one try, as a duplicate is, one is charged.
            self.verdict.breach(
                "R", row.job_id, f"failed {failed} times and was charged {row.attempts}{_runs(job)}"
            )
        if row.status == DEAD and not self._died_rightly(row, runs, topic):
            self.verdict.breach("R", row.job_id, f"is dead, of no failure of its own last try{_runs(job)}")

    def _charges(self, job: _Job, row: Row, topic: Topic) -> int:
        """How many faults may have ended a try of this task, running or waiting.

        What is pulled is charged as it is handed out, also where MySQL's answer to that is lost.
        """
        charging = (*CHARGING, "store_down", "left") if topic.delivery is Delivery.PULL else CHARGING
        begin, until = 0, FOREVER
        if job.runs:
            monotonic = job.runs[-1].mono - job.runs[-1].wall  # of an instant of the wall clock
            due = min(job.due or 0, row.action_time)  # a holder may have died before a new deadline
            begin = due * 1_000_000 + monotonic
            if row.status != PENDING:
                until = (row.next_time + 1000) * 1_000_000 + monotonic
        return sum(
            fault.kind in charging and fault.end + DYING_NS >= begin and fault.begin <= until
            for fault in self.past.faults
        ) + sum(death + DYING_NS >= begin and death <= until for death, _ in self.past.deaths)

    def _died_rightly(self, row: Row, runs: Sequence[_Run], topic: Topic) -> bool:
        newest = max((run.attempt for run in runs if run.outcome == "ok"), default=0)
        for run in runs:
            if run.attempt < newest:
                continue  # a paused worker's late failure must not touch a newer try
            if run.outcome == "dead":
                return True
            if run.attempt >= topic.retries and (run.outcome == "raise" or _overran(run, row, topic)):
                return True
        limit = self.limits.crash_limit
        if limit is None or not runs or runs[-1].outcome != "die":
            return False
        # It killed a process that ran nothing else, after so many others in which it may have been held.
        alone = self.past.starts_of[runs[-1].pid] == 1
        held = sum(death < runs[-1].mono for death, _ in self.past.deaths)
        return alone and held >= limit

    # --- the index -----------------------------------------------------------------------------------------

    def _places(self, row: Row, places: Sequence[Place]) -> None:
        breach = self.verdict.breach
        topic = self.final.topics[row.biz_type]
        slot = Slot(topic.name, row.slot_crc % row.slot_amount)
        queues = [place.queue for place in places]
        for place in places:
            if place.slot != slot:
                breach("O", row.job_id, f"stands in {_named([place])}, its row says {slot}")
        if len(places) > 1:
            breach("O", row.job_id, f"stands in {_named(places)} at once")
        if row.status == DEAD and "dead" not in queues:
            breach("X", row.job_id, "is dead and has no DeadQueue entry")
        elif row.status != DEAD and "dead" in queues:
            breach("X", row.job_id, f"is {TaskStatus(row.status).name} and has a DeadQueue entry")
        if row.status in (PROCESSED, CANCELLED) and "prepare" in queues:
            breach("O", row.job_id, f"is {TaskStatus(row.status).name} and was left in the PrepareQueue")
        elif row.status in (PROCESSED, CANCELLED) and "store" in queues:
            self.verdict.counts["stale entries"] += 1  # dropped by the row check when they come due


def _overran(run: _Run, row: Row, topic: Topic) -> bool:
    """Whether a try may have been failed because it ran longer than max_runtime, or than its lease."""
    if run.outcome in (*FAILED, "die"):
        return False
    if run.until:
        return row.next_time * 1_000_000 >= run.until
    ran = run.end - run.mono if run.end else row.next_time * 1_000_000 - run.wall
    return ran > topic.max_runtime * NS


def _deadlines(job: _Job) -> set[int | None]:
    """The deadlines that may stand at the end: those that no later acknowledged reschedule replaced."""
    moves = [call for call in job.calls or () if call.op == "reschedule"]
    changed = [call for call in moves if call.outcome in _MOVED]
    given = [(0, job.due), *((call.ended, call.due) for call in moves if call.outcome in (*_MOVED, "?"))]
    return {due for ended, due in given if not any(call.began >= ended for call in changed)}


def _in_time(call: _Call, run: _Run, row: Row, job: _Job, skew_ms: int = SKEW_MS) -> bool:
    """Whether a cancel was answered before the deadline of a run, which may be a former one."""
    if run.version == row.version:
        due: int | None = row.action_time
    elif run.version == 0:
        due = job.due
    else:  # which of them is not always known: some may have been moved by calls without an answer
        moves = [move for move in job.calls or () if move.op == "reschedule" and move.began < run.mono]
        due = min([*(move.due for move in moves), *([] if job.due is None else [job.due])], default=None)
    return due is not None and call.wall // 1_000_000 < due - skew_ms


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "none"


def _named(places: Sequence[Place]) -> str:
    return " and ".join(f"the {place.queue} queue of {place.slot}" for place in places)


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _runs(job: _Job) -> str:
    """The tries, for a message: process, number, when, how it ended."""
    if not job.runs:
        return "; never ran"
    first = job.runs[0].mono
    told = [
        f"try {run.attempt} of version {run.version} on {run.pid} at +{(run.mono - first) / NS:.3f} s "
        + (f"{run.outcome} at +{(run.end - first) / NS:.3f} s" if run.end else "without an end")
        for run in job.runs[:6]
    ]
    return f"; {'; '.join(told)}"
