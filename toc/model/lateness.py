"""Why a task started late: which causes fill the time from when it was due to its start, and the sentence.

    Span        a cause held from then to then, as somebody saw it
    LateStart   one try that started late, with the spans in it: a line of the row's ``late``
    explain     what the row, its lines and its failed tries say together
    Why         the causes by their share, and the sentence that every door shows

Pure: whoever starts a task measures, this only adds up. The share that is the largest is the cause; a second
one is named if it is at least NAMED_SHARE.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from toc.model.clock import from_ms
from toc.model.documents import instant, parse, seconds
from toc.model.sharding import created_ms

LATE_MS = 1000
"""A task that starts later than this after its time is late (ms)."""
NAMED_SHARE = 0.25
MAX_LATE_CHARS = 600
"""Characters kept of a row's late starts: the last three or more."""
EVIDENCE_CHARS = 80
"""Characters of the evidence of a share that a row keeps."""
SHARES = 3
"""Most shares of a start that a row keeps: the largest."""


class Cause(StrEnum):
    """Why a task waited. Stored by its name."""

    STORED_LATE = "stored_late"
    PAUSED = "paused"
    WORKER_KILLED = "worker_killed"
    NO_OWNER = "no_owner"
    REDIS = "redis"
    DATABASE = "database"
    CLOCK = "clock"
    HALTED = "halted"
    RESUME_RATE = "resume_rate"
    CONCURRENCY = "concurrency"
    THREADS = "threads"
    EVENT_LOOP = "event_loop"
    BACKLOG = "backlog"
    NO_CONSUMER = "no_consumer"
    TTR = "ttr"
    TARGET = "target"
    BACKOFF = "backoff"
    MISFIT = "misfit"
    UNKNOWN = "unknown"


class About(NamedTuple):
    """The words of a cause, after "because", and what to do about it."""

    words: str
    remedy: str

    def of(self, topic: str) -> str:
        """Return the remedy with the name of a topic."""
        return self.remedy.replace("TOPIC", topic)


CAUSES: dict[Cause, About] = {  # where several hold at once, the first of them counts
    Cause.STORED_LATE: About("it was stored after its time", "submit and commit earlier; else toc doctor"),
    Cause.PAUSED: About("its topic was paused", "if still: toc topic resume TOPIC"),
    Cause.CLOCK: About("clocks differed", "toc doctor; let a time service set that host's clock"),
    Cause.HALTED: About("its process stood still", "look for a paused or starved machine"),
    Cause.REDIS: About("Redis did not answer", "toc doctor; look at that Redis node"),
    Cause.DATABASE: About("the database did not answer in time", "toc doctor; look at that database server"),
    Cause.WORKER_KILLED: About("its worker died or stopped", "its host: out of memory, a deploy, a crash?"),
    Cause.NO_OWNER: About("no worker served its slot", "toc slots --topic TOPIC; start or undrain workers"),
    Cause.RESUME_RATE: About("its resume's rate held it back", "if still: toc topic resume TOPIC --rate 0"),
    Cause.CONCURRENCY: About("the topic's concurrency was used up", "toc topic alter TOPIC --concurrency N"),
    Cause.THREADS: About("all handler threads were busy", "more TOC_THREADS, or shorter handlers"),
    Cause.EVENT_LOOP: About("a coroutine blocked the event loop", "asyncio.to_thread for what blocks"),
    Cause.BACKLOG: About("more was due than could start at once", "more hosts, or spread the due times"),
    Cause.NO_CONSUMER: About("no consumer asked for it", "start consumers of TOPIC"),
    Cause.TTR: About("a consumer had it and did not answer", "a shorter ttr, or look at that consumer"),
    Cause.TARGET: About("its target could not take it", "toc target show NAME; toc target resume NAME"),
    Cause.BACKOFF: About("earlier tries had failed", "toc get JOB_ID shows their errors"),
    Cause.MISFIT: About("it was given back, as its payload did not fit", "toc get JOB_ID names the field"),
    Cause.UNKNOWN: About("of something that nobody recorded", "toc doctor"),
}
_NOT_YET = About("of something that cannot be told before its try ends", "look again when its try has ended")


class Span(NamedTuple):
    """A cause held from ``since`` until ``until`` (ms); ``evidence`` says what was seen."""

    cause: Cause
    since: int
    until: int
    evidence: str = ""

    def shown(self) -> dict[str, Any]:
        """Return it for display, as a share."""
        length, since = seconds(self.until - self.since), instant(self.since)
        return {"cause": self.cause.value, "seconds": length, "since": since, "evidence": self.evidence}


class LateStart(NamedTuple):
    """A try of ``version`` that was due at ``due`` and started at ``started`` (ms), or was put off until
    then. The spans do not overlap; the largest comes first. ``taken`` and ``read`` are when a worker took it
    from its queue and had read its row (ms; 0: no worker did)."""

    version: int
    due: int
    started: int
    spans: Sequence[Span]
    taken: int = 0
    read: int = 0

    @property
    def cause(self) -> Cause:
        """The cause with the largest share."""
        return self.spans[0].cause if self.spans else Cause.UNKNOWN

    def line(self) -> str:
        """Encode it as appended to the row, in JSON: times from ``due`` on, in ms."""
        due = self.due
        spans = [
            f'["{cause.value}",{since - due:d},{until - since:d},"{_plain(evidence)}"]'
            for cause, since, until, evidence in self.spans[:SHARES]
        ]
        stages = "".join(f",{at - due:d}" for at in (self.taken, self.read) if at)
        return f"[{self.version:d},{due:d},{self.started - due:d},[{','.join(spans)}]{stages}]\n"


@lru_cache(256)
def _plain(evidence: str) -> str:
    """Shorten evidence, which may be another's text, to characters of which each takes one in a line."""
    text = evidence[:EVIDENCE_CHARS].encode("ascii", "replace").decode()
    if len(evidence) > EVIDENCE_CHARS:
        text = text.rpartition(" ")[0] or text
    return re.sub(r'[\x00-\x1f"\\\x7f]', "?", text)


def late_starts(text: str | None, version: int) -> list[LateStart]:
    """Parse what a row has of late starts of this version, oldest first."""
    found = []
    for line in (text or "").split("\n"):
        try:
            of, due, took, spans, *stages = parse(line)
            parts = [
                Span(Cause(cause), int(due + since), int(due + since + ms), str(evidence))
                for cause, since, ms, evidence in spans
            ]
            times = [int(due + at) for at in stages[:2]]
            for at in (due, due + took, *times, *(time for part in parts for time in part[1:3])):
                instant(at)
            if of == version:
                found.append(LateStart(of, int(due), int(due + took), parts, *times))
        # the first line, cut off, or of a later version of toc
        except (ValueError, TypeError, OverflowError):
            continue
    return found


def stored_late(job_id: int, version: int, due: int) -> list[Span]:
    """Return the span until a task was stored, if that was after its time and it was not changed since."""
    if version or (stored := created_ms(job_id)) <= due:
        return []
    return [Span(Cause.STORED_LATE, due, stored, f"at {clock_time(stored)} UTC")]


def fill(due: int, started: int, spans: Iterable[Span], rest: Span | None = None) -> list[Span]:
    """Return which of the spans fill the time from ``due`` to ``started``, the largest first.

    Where some overlap, the first of them counts. What none covers goes to ``rest``, whose times do not
    matter. Spans of one cause are joined; they keep the evidence of the largest.
    """
    left_over = [] if rest is None else [Span(rest.cause, due, started, rest.evidence)]
    if not (spans := list(spans)):
        return left_over
    gaps = [(due, started)]
    found: list[Span] = []
    for span in spans + left_over:
        left = []
        for since, until in gaps:
            first, last = max(since, span.since), min(until, span.until)
            if first >= last:
                left.append((since, until))
                continue
            found.append(Span(span.cause, first, last, span.evidence))
            left += [gap for gap in ((since, first), (last, until)) if gap[0] < gap[1]]
        gaps = left
    return joined(found)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Join the spans of each cause, from its first beginning on, and lay them one behind the other."""
    by_cause: dict[Cause, list[Span]] = {}
    for span in spans:
        by_cause.setdefault(span.cause, []).append(span)
    whole = []
    for some in by_cause.values():
        if some[1:]:
            since = min(span.since for span in some)
            some = [max(some, key=_length)._replace(since=since, until=since + sum(map(_length, some)))]
        whole += some
    end = 0
    for place, span in enumerate(whole := sorted(whole, key=lambda span: span.since)):
        since = max(span.since, end)
        end = since + _length(span)
        whole[place] = span._replace(since=since, until=end)
    return sorted(whole, key=_length, reverse=True)


def _length(span: Span) -> int:
    return span.until - span.since


class Episode(NamedTuple):
    """Tasks of a topic that started late for one cause, in the process ``who``, one after the other.

    They were due from ``since`` on and started by ``until``. ``tasks``: how many. ``worst`` is the latest
    (ms), of the task ``job_id``, with its evidence. ``began`` is when the episode was first counted (ms).
    """

    episode_id: int
    topic: str
    cause: Cause
    who: str
    since: int
    until: int
    began: int
    tasks: int = 0
    worst: int = 0
    job_id: int = 0
    evidence: str = ""

    def with_tasks(self, starts: Sequence[tuple[int, LateStart]]) -> Episode:
        """Return it with more tasks, given with their job_ids."""
        job_id, latest = max(starts, key=lambda one: one[1].started - one[1].due)
        more = self._replace(
            since=min(self.since, *[late.due for _, late in starts]),
            until=max(self.until, *[late.started for _, late in starts]),
            tasks=self.tasks + len(starts),
        )
        if latest.started - latest.due <= self.worst:
            return more
        evidence = latest.spans[0].evidence if latest.spans else self.evidence
        return more._replace(worst=latest.started - latest.due, job_id=job_id, evidence=_plain(evidence))

    def shown(self) -> dict[str, Any]:
        """Return it for display."""
        return {
            "topic": self.topic, "cause": self.cause.value, "tasks": self.tasks,
            "worst_seconds": seconds(self.worst), "since": instant(self.since), "until": instant(self.until),
            "worst_job_id": str(self.job_id), "evidence": self.evidence, "worker": self.who or None,
        }  # fmt: skip


E = TypeVar("E", Span, Episode)
_NAMING = (Cause.DATABASE, Cause.REDIS, Cause.NO_OWNER, Cause.THREADS, Cause.WORKER_KILLED)


def without_servers(one: E) -> E:
    """Return it without evidence that may name servers, hosts or others' topics, for who may not see them."""
    return one._replace(evidence="") if one.cause in _NAMING else one


def by_cause(episodes: Iterable[Episode]) -> list[Episode]:
    """Join the episodes of each topic and cause, of whatever process; most tasks first."""
    found: dict[tuple[str, Cause], Episode] = {}
    for one in episodes:
        same = found.get((one.topic, one.cause))
        if same is not None:
            worst = one if one.worst > same.worst else same
            since, until = min(one.since, same.since), max(one.until, same.until)
            one = worst._replace(since=since, until=until, tasks=one.tasks + same.tasks)
        found[one.topic, one.cause] = one
    return sorted(found.values(), key=lambda one: one.tasks, reverse=True)


class Why(NamedTuple):
    """Why a task that was due at ``due`` started at ``started`` (ms), or, if it has not, waits until then."""

    due: int
    started: int
    spans: Sequence[Span]
    waits: bool = False
    tried: bool = False
    """Whether a try of it has failed, where it waits."""
    taken: int = 0
    read: int = 0
    """As in LateStart, of the start."""
    runs: bool = False
    """Whether a worker runs it: what that saw is not written yet."""

    @property
    def named(self) -> Sequence[Span]:
        """The cause, and a second one with a large share."""
        whole = max(self.started - self.due, 1)
        return [self.spans[0], *(one for one in self.spans[1:2] if _length(one) / whole >= NAMED_SHARE)]

    def _about(self, span: Span) -> About:
        return _NOT_YET if self.runs and span.cause is Cause.UNKNOWN else CAUSES[span.cause]

    def sentence(self) -> str:
        """Say it in a sentence."""
        late = _seconds(self.started - self.due)
        begins = f"started {late} late"
        if self.waits:
            begins = f"{'waits for another try' if self.tried else 'has not started'}, {late} late so far"
        named = self.named
        share = len(named) > 1
        causes = [
            f"{f'{_seconds(_length(span))} ' if share else ''}because {self._about(span).words}"
            f"{f' ({span.evidence})' if span.evidence else ''}"
            for span in named
        ]
        return f"It {begins}{': ' if share else ' '}{', '.join(causes)}."

    def shown(self, topic: str) -> dict[str, Any]:
        """Return it for display, of a task of this topic."""
        return {
            "seconds": seconds(self.started - self.due),
            "prepared": instant(self.taken) if self.taken else None,
            "row_read": instant(self.read) if self.read else None,
            "started": None if self.waits else instant(self.started),
            "cause": self.spans[0].cause.value,
            "sentence": self.sentence(),
            "remedy": self._about(self.spans[0]).of(topic),
            "shares": [span.shown() for span in self.spans],
        }


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.1f} s" if milliseconds < 100_000 else f"{milliseconds / 1000:.0f} s"


def clock_time(milliseconds: int) -> str:
    """Return an instant for a sentence: ``12:00:01``, in UTC."""
    return f"{from_ms(milliseconds):%H:%M:%S}"


class Tried(NamedTuple):
    """A try that failed ``at`` (ms), or whose worker died."""

    at: int
    crashed: bool
    error: str


def explain(
    due: int, starts: Sequence[LateStart], tries: Sequence[Tried], ended: int | None, now: int, *,
    lapsed: bool = False,
) -> Why | None:  # fmt: skip
    """Return why a task that was due at ``due`` is late, or None if nothing says that it is.

    ``starts`` and ``tries`` are those of its version, oldest first. ``ended`` is when it was processed,
    otherwise None, and then it waits until ``now`` for its next try (all ms). ``lapsed``: the ttr of a
    consumer has ended, of which there is no other record.
    """
    last = tries[-1].at if tries else due
    taken = read = 0
    if ended is None:
        until = now
    elif starts and starts[-1].started >= last:
        until, taken, read = starts[-1].started, starts[-1].taken, starts[-1].read
    elif tries or lapsed:
        until = ended  # its last try started at some time before
    else:
        return None
    if until - due <= LATE_MS:
        return None
    spans = [span for start in starts for span in start.spans]
    known = due
    for one in tries:
        began = max([start.started for start in starts if start.started <= one.at], default=known)
        if one.crashed:
            spans.append(Span(Cause.WORKER_KILLED, max(began, known), one.at, one.error))
        known = one.at
    if lapsed:
        rest = Span(Cause.TTR, 0, 0)
    elif tries:
        rest = Span(Cause.BACKOFF, 0, 0, f"{_count(tries)}, the last with {tries[-1].error}")
    else:  # a row keeps the last lines: those before say the same, as a target that waits writes many
        put_off = bool(starts) and starts[0].cause is Cause.TARGET
        rest = starts[0].spans[0] if put_off else Span(Cause.UNKNOWN, 0, 0)
    filled = fill(due, until, spans, rest)
    return Why(due, until, filled, ended is None, bool(tries) or lapsed, taken, read)


def _count(tries: Sequence[Tried]) -> str:
    return "1 try" if len(tries) == 1 else f"{len(tries)} tries"
