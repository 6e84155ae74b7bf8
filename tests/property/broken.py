"""Guards of the product, each taken away: the state machine must see it, else it proves nothing.

The product has no hooks for any of it: what stands here patches it within the test's process.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from harness.scripts import SCRIPTS, rewrite

from toc.index.queues import Queues
from toc.maintenance.sweep import Sweep, SweepCounts
from toc.model.task import TaskStatus, TryRow
from toc.model.verdict import Check, Failure
from toc.model.verdict import after_crash as after_crash_of
from toc.model.verdict import check as check_row
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.tasks.batch import Batches
from toc.store.tasks.plan import TRIED_BEFORE
from toc.worker import check as check_stage
from toc.worker import reclaim
from toc.worker.entry import Entry, Held, Inflight, State

Patch = pytest.MonkeyPatch


def _sql(patch: Patch, pattern: str, instead: str, *, during: Callable[..., Any] | None = None) -> None:
    """Every statement with this in it says something else; while a method of ``Batches`` runs, if given."""
    running = [during is None]

    def marked(self: Batches, *asked: Any) -> Any:
        assert during is not None
        running[0] = True
        try:
            return during(self, *asked)
        finally:
            running[0] = False

    def changed(send: Callable[..., Any]) -> Callable[..., Any]:
        def sent(self: DatabaseServer, statements: Sequence[Statement], **how: bool) -> Any:
            if running[0]:
                statements = [one._replace(sql=re.sub(pattern, instead, one.sql)) for one in statements]
            return send(self, statements, **how)

        return sent

    for name in ("run", "begin"):
        patch.setattr(DatabaseServer, name, changed(getattr(DatabaseServer, name)))
    if during is not None:
        patch.setattr(Batches, during.__name__, marked)


def _lua(patch: Patch, name: str, pattern: str, instead: str) -> None:
    source, found = re.subn(pattern, instead, SCRIPTS[name].source)
    assert found == 1, f"{name}.lua does not look like this any more: {pattern}"
    rewrite(SCRIPTS[name], source, patch)


def _last_look(patch: Patch) -> None:
    def start(self: Inflight, entry: Entry, now: float) -> bool:
        if self.get(entry.job_id) is not entry:
            return False
        entry.state, entry.started = State.RUNS, now
        return True

    patch.setattr(Inflight, "start", start)


def _held_once(patch: Patch) -> None:
    right = Inflight.hold

    def hold(self: Inflight, entry: Entry) -> Held:
        self.drop(filter(None, [self.get(entry.job_id)]))
        return right(self, entry)

    patch.setattr(Inflight, "hold", hold)


def _row_check(patch: Patch, **pretended: Any) -> None:
    def check(row: TryRow, *, now: int, taken: int) -> Check:
        return check_row(row._replace(**pretended), now=now, taken=taken)

    patch.setattr(check_stage, "check", check)


def _whole_score(patch: Patch) -> None:
    def by_fence(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(self: Queues, entries: Mapping[Any, Sequence[tuple[int, float, Any]]]) -> Any:
            return move(
                self,
                {
                    slot: [(job_id, score % 1000, *rest) for job_id, score, *rest in some]
                    for slot, some in entries.items()
                },
            )

        return moved

    for name in ("commit", "rollback", "bury"):
        patch.setattr(Queues, name, by_fence(getattr(Queues, name)))


def _never_the_last(patch: Patch) -> None:
    def after_crash(row: TryRow, *how: Any, **more: Any) -> Failure | None:
        failure = after_crash_of(row, *how, **more)
        return None if failure is None else failure._replace(new_attempts=row.attempts + 1)

    patch.setattr(reclaim, "after_crash", after_crash)


def _no_mark(patch: Patch, kind: str) -> None:
    mark = Batches.mark_begun

    def mark_begun(self: Batches, job_ids: Iterable[int], what: str) -> Any:
        return {} if what == kind else mark(self, job_ids, what)

    patch.setattr(Batches, "mark_begun", mark_begun)


_LEASE = r"(?= AND \(lease_owner)"
_PAIR = rf" AND attempts=\d+ AND crashes=\d+{_LEASE}"

WITHOUT: dict[str, Callable[[Patch], None]] = {
    "last-look": _last_look,
    "held-once": _held_once,
    "row-check: status": lambda patch: _row_check(patch, status=TaskStatus.PENDING),
    "row-check: next_time": lambda patch: _row_check(patch, next_time=0),
    "success-fence: version": lambda patch: _sql(patch, r"(status=2,.*) AND version=\d+$", r"\1"),
    "success-fence: status": lambda patch: _sql(patch, r"(status=2,.*) AND status=0( AND version=)", r"\1\2"),
    "failure-fence: attempts, crashes": lambda patch: _sql(patch, _PAIR, ""),
    "failure-fence: crashes": lambda patch: _sql(patch, rf" AND crashes=\d+{_LEASE}", ""),
    "failure-fence: version": lambda patch: _sql(patch, rf" AND version=\d+({_PAIR})", r"\1"),
    "queue-fence: rollback": lambda patch: _lua(
        patch, "rollback", r"if score and \([^\n]*\) then", "if score then"
    ),
    "whole-score": _whole_score,
    "prepared-stays": lambda patch: _lua(patch, "add", r"if not prepared\[n\] then", "if true then"),
    "never-the-last": _never_the_last,
    "mark-tried: cancelled": lambda patch: _sql(
        patch, r"SET attempts=\w+\(attempts,1\)", "SET attempts=attempts", during=Batches.finish
    ),
    "mark-tried: moved": lambda patch: _no_mark(patch, TRIED_BEFORE),
    "mark-tried: reclaimed": lambda patch: _no_mark(patch, reclaim.BEFORE_MOVED),
    "dead-restored": lambda patch: patch.setattr(Queues, "restore_dead", lambda *_: {}),
    "swept": lambda patch: patch.setattr(Sweep, "add", lambda *_, **__: (SweepCounts(), set())),
}
"""By the rule (spec/README.md) that is broken then; ``swept`` is the sweep itself. Which law each breaks:
tests/fault/broken.

Not the fences of commit and bury: only what has ended is committed, and only what is dead buried; whoever
else holds that has little to lose. Nor crash-counted and one-way: their cases are too rare for so few
examples; the model has them.
"""
