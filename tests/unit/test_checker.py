"""The checker on histories made by hand: each invariant, kept and broken, and what explains a duplicate."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from harness.checker import INVARIANTS, Limits, Verdict, check
from harness.final import Final, Place, Row
from harness.history import FAULTS

from toc import TaskStatus, Topic
from toc.model.topic import Delivery, Slot

S = 1_000_000_000
DUE = 10 * S
"""All tasks of these tests are due ten seconds after the epoch; the monotonic clock is the wall clock."""


class Story:
    """A history in the making, told in seconds after the tasks are due; and the state it ended in."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lines: list[dict[str, Any]] = []
        self._number = 0
        self._rows: dict[int, Row] = {}
        self._index: dict[int, list[Place]] = {}
        self.retries = 3
        self.delivery = Delivery.HANDLER

    def line(self, event: str, at: float, pid: int, **fields: Any) -> Self:
        instant = DUE + int(at * S)
        self._lines.append({"e": event, **fields, "wall": instant, "mono": instant, "pid": pid})
        return self

    def submit(
        self, job: int = 1, answer: str = "ok", due: float = 0.0, at: float = -9, took: float = 0.1
    ) -> Self:
        self._number += 1
        due_ms = (DUE + int(due * S)) // 1_000_000
        self.line("invoke", at, 100, call=self._number, op="submit", biz=[job], due=[due_ms])
        if answer:
            jobs = {"jobs": [job]} if answer == "ok" else {}
            self.line(answer, at + took, 100, call=self._number, **jobs)
        return self

    def call(self, op: str, at: float, outcome: str = "", job: int = 1, due: float = 0.0) -> Self:
        self._number += 1
        due_ms = (DUE + int(due * S)) // 1_000_000
        what: dict[str, Any] = {"jobs": [job]} if op == "redrive" else {"job": job, "due": due_ms}
        self.line("invoke", at, 100, call=self._number, op=op, **what)
        if outcome:
            self.line("ok", at + 0.01, 100, call=self._number, outcome=outcome)
        return self

    def run(
        self, start: float, end: float | None = None, out: str = "ok", *, pid: int = 1, attempt: int = 1,
        version: int = 0, job: int = 1, until: float | None = None, acked: float | None = None,
    ) -> Self:  # fmt: skip
        lease = {} if until is None else {"until": DUE + int(until * S)}
        self.line("start", start, pid, job=job, v=version, biz=job, **{"try": attempt}, **lease)
        if end is not None:
            self.line("end", end, pid, job=job, out=out, **{"try": attempt})
        if acked is not None:
            self.line("acked", acked, pid, job=job, **{"try": attempt})
        return self

    def fault(self, kind: str, begin: float, end: float, *pids: int) -> Self:
        self._number += 1
        self.line("fault", begin, 100, id=self._number, kind=kind, pids=list(pids))
        return self.line("fault_end", end, 100, id=self._number)

    def row(
        self, status: TaskStatus = TaskStatus.PROCESSED, ended: float = 0.5, *, job: int = 1,
        attempts: int = 0, version: int = 0, crashes: int = 0, due: float = 0.0,
    ) -> Self:  # fmt: skip
        action, after = ((DUE + int(at * S)) // 1_000_000 for at in (due, ended))
        self._rows[job] = Row(job, job, 7, int(status), action, after, version, attempts, crashes, 5, 4)
        return self

    def place(self, queue: str, slot: int = 1, job: int = 1) -> Self:
        self._index.setdefault(job, []).append(Place(queue, Slot("t", slot), 0.0))
        return self

    def verdict(self, **limits: Any) -> Verdict:
        by_pid: dict[int, list[dict[str, Any]]] = {}
        for line in self._lines:
            by_pid.setdefault(line["pid"], []).append(line)
        for pid, lines in by_pid.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.directory / f"{pid}.jsonl").write_text(text + '{"e":"start","jo')  # a line half written
        topic = Topic("t", 7, 4, retries=self.retries, max_runtime=20, delivery=self.delivery)
        now_ms = DUE // 1_000_000 + 1_000_000
        return check(
            self.directory,
            Final({7: topic}, iter(self._rows.values()), self._index, now_ms),
            Limits(**limits),
        )


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def broken(verdict: Verdict) -> str:
    return "".join(name for name in INVARIANTS if verdict.breaches[name])


def test_a_task_that_ran_once_when_it_was_due_is_clean(story: Story) -> None:
    verdict = story.submit().run(0.01, 0.1).row().verdict()
    assert verdict.clean, verdict
    assert verdict.lateness_ms == [10.0]
    assert verdict.counts["acknowledged"] == verdict.counts["processed"] == verdict.counts["starts"] == 1
    assert str(verdict).startswith("CLEAN")


def test_lost_an_acknowledged_task_without_a_row(story: Story) -> None:
    assert broken(story.submit().verdict()) == "L"


def test_lost_an_acknowledged_task_that_still_waits(story: Story) -> None:
    assert broken(story.submit().row(TaskStatus.PENDING, 0).verdict()) == "L"


def test_lost_a_task_that_was_due_and_was_put_off_without_a_try(story: Story) -> None:
    assert broken(story.submit().row(TaskStatus.PENDING, ended=2000).verdict()) == "L"


def test_lost_a_task_that_nobody_ran_and_that_is_marked_as_processed(story: Story) -> None:
    assert broken(story.submit().row().verdict()) == "L"
    assert broken(story.run(0.1).verdict()) == "L"  # a start is no success


def test_lost_a_task_that_nobody_cancelled(story: Story) -> None:
    assert broken(story.submit().row(TaskStatus.CANCELLED).verdict()) == "L"


def test_lost_a_deadline_that_was_acknowledged(story: Story) -> None:
    story.submit().call("reschedule", -5, "rescheduled", due=2).run(0.1, 0.2).row()
    assert "L" in broken(story.verdict())


def test_lost_what_ended_and_changed_afterwards(story: Story) -> None:
    story.submit().run(0.1, 0.2).line("seen", 1, 100, job=1, status=3, v=0).row()
    assert broken(story.verdict()) == "L"


def test_a_task_whose_submit_failed_may_be_absent_but_not_present(story: Story) -> None:
    assert story.submit(answer="fail").verdict().clean
    assert broken(story.run(0.1, 0.2).row().verdict()) == "U"


@pytest.mark.parametrize("answer", ["unknown", ""])
def test_a_task_whose_submit_is_unknown_may_be_absent_or_must_be_handled(story: Story, answer: str) -> None:
    assert story.submit(answer=answer).verdict().clean
    assert broken(story.row(TaskStatus.PENDING, 0).verdict()) == "L"
    assert story.run(0.1, 0.2).row().verdict().clean


def test_early_by_a_millisecond(story: Story) -> None:
    assert broken(story.submit().run(-0.001, 0.1).row().verdict()) == "E"


def test_early_for_a_deadline_that_was_moved(story: Story) -> None:
    story.submit().call("reschedule", -5, "rescheduled", due=2).row(ended=2.5, version=1, due=2)
    assert broken(story.run(1.9, 2.5, version=1).verdict()) == "E"


def test_early_for_the_last_of_two_deadlines_though_not_for_the_first(story: Story) -> None:
    story.submit().call("reschedule", -5, "rescheduled", due=2).call("reschedule", -4, "rescheduled", due=6)
    story.row(ended=6.5, version=2, due=6)
    assert broken(story.run(4, 6.5, version=2).verdict()) == "E"


def test_a_run_for_the_old_deadline_breaks_a_reschedule_that_was_in_time(story: Story) -> None:
    story.submit().call("reschedule", -5, "rescheduled", due=2).run(0.1, 0.2)
    story.run(2.01, 2.4, version=1).row(ended=2.5, version=1, due=2)
    assert broken(story.verdict()) == "C"


def test_a_handler_ran_after_its_cancel_was_acknowledged(story: Story) -> None:
    story.submit().call("cancel", -1, "cancelled").row(TaskStatus.CANCELLED, -1)
    assert story.verdict().clean
    assert "C" in broken(story.run(0.1, 0.2).verdict())


def test_a_handler_ran_before_a_cancel_that_was_answered_cancelled(story: Story) -> None:
    story.submit().run(0.1, 0.2).call("cancel", 0.3, "cancelled").row(TaskStatus.CANCELLED, 0.3)
    assert broken(story.verdict()) == "C"


def test_a_cancel_in_time_holds_also_when_redis_loses_the_entry(story: Story) -> None:
    story.submit().run(0.1, 2).call("cancel", -1, "cancelled").row(TaskStatus.CANCELLED, -1)
    assert "C" in broken(story.fault("redis_loss", -2, 0).verdict())


def test_a_cancel_answers_for_former_deadlines_too(story: Story) -> None:
    story.submit().call("reschedule", 0.15, "may_have_started", due=5)
    story.call("cancel", 3, "cancelled").row(TaskStatus.CANCELLED, 3, version=1, due=5)
    assert story.verdict().clean
    assert broken(story.run(0.1, 0.2).verdict()) == "C", "cancelled means that it has never run"


def test_a_cancel_that_came_late_for_a_former_deadline_allows_the_try_taken_for_it(story: Story) -> None:
    story.submit().call("reschedule", 0.1, "may_have_started", due=9)
    story.call("cancel", 0.2, "may_have_started").row(TaskStatus.CANCELLED, 0.2, version=1, due=9)
    assert story.run(0.3, 0.4).verdict().clean, "checked before it was moved"
    assert broken(story.run(9.1, 9.2, version=1).verdict()) == "C", "in time for the present one"


def test_a_cancel_in_time_for_every_deadline_holds_though_the_present_one_is_sooner(story: Story) -> None:
    story.submit(due=9).call("reschedule", -5, "may_have_started", due=1)
    story.call("cancel", 2, "may_have_started").row(TaskStatus.CANCELLED, 2, version=1, due=1)
    assert story.run(2.1, 2.2, version=1).verdict().clean
    assert broken(story.run(9.1, 9.2).verdict()) == "C", "the former one was seven seconds ahead"


def test_a_cancel_before_the_due_time_holds_whatever_it_was_answered(story: Story) -> None:
    story.submit().call("cancel", -1, "may_have_started").run(0.1, 0.2).row(TaskStatus.CANCELLED, -1)
    assert broken(story.verdict()) == "C"


def test_a_cancel_that_may_have_come_late_allows_the_try_that_was_taken_and_none_after(story: Story) -> None:
    story.submit().call("cancel", 0.01, "may_have_started").row(TaskStatus.CANCELLED, 0.01)
    assert story.run(0.02, 0.2, "raise").verdict().clean
    assert broken(story.run(9, 9.1, attempt=2).verdict()) == "C"


def test_a_cancelled_task_that_is_something_else_at_the_end(story: Story) -> None:
    story.submit().call("cancel", 0.3, "may_have_started").run(0.1, 0.2).row()
    assert broken(story.verdict()) == "C"


def test_a_second_run_that_nothing_explains(story: Story) -> None:
    story.submit().run(0.1, 0.2).run(0.3, 0.4, pid=2).row(ended=0.5)
    assert broken(story.verdict()) == "D"


def test_two_runs_at_once_in_one_process_are_never_explained(story: Story) -> None:
    story.submit().run(0.1, 0.9).run(0.2, 0.8).fault("redis_loss", 0.15, 0.16).row(ended=1)
    assert broken(story.verdict()) == "D"


@pytest.mark.parametrize(("kind", "pids", "explained"), [
    ("kill", [1], True),
    ("kill", [2], False),  # the second run's process
    ("kill", [3], False), ("pause", [1], True),
    ("pause", [2], True),  # checked, then stopped while the first ran
    ("cut", [1], True), ("pause", [3], False), ("cut", [], True), ("cut", [3], False),
    ("redis_loss", [], True),
    *((kind, [], False) for kind in sorted(FAULTS.keys() - {"kill", "pause", "cut", "redis_loss"})),
])  # fmt: skip
def test_what_explains_that_a_run_without_an_end_was_repeated(
    story: Story, kind: str, pids: Sequence[int], explained: bool
) -> None:
    story.submit().run(0.1).run(4, 4.1, pid=2).fault(kind, 0.5, 3.5, *pids).row(ended=4.2)
    verdict = story.verdict()
    assert broken(verdict) == ("" if explained else "D")
    assert verdict.duplicates == ({kind: 1} if explained else {})


def test_an_outage_of_redis_explains_nothing_by_itself(story: Story) -> None:
    """Neither for what began before or in it nor for what had ended; and MySQL was away only afterwards."""
    story.submit(1).run(0.1, job=1).run(6, 6.1, pid=2, job=1).row(ended=6.2, job=1)
    story.submit(2).run(2, 7, job=2).run(3, 7, pid=2, job=2).row(ended=7, job=2)
    story.submit(3).run(0.1, 0.9, job=3).run(4, 4.1, pid=2, job=3).row(ended=4.2, job=3)
    story.fault("redis_down", 1, 5).fault("store_down", 5.1, 5.5).fault("zk_down", 0, 6)
    verdict = story.verdict()
    assert [(finding.invariant, finding.job_id) for finding in verdict.findings["D"]] == [
        ("D", 1),
        ("D", 2),
        ("D", 3),
    ]
    assert not verdict.duplicates


def test_both_servers_out_of_reach_cut_off_what_was_in_flight_then(story: Story) -> None:
    story.submit(1).run(0.1, job=1).run(6, 6.1, pid=2, job=1).row(ended=6.2, job=1)
    story.fault("redis_down", 1, 5).fault("store_down", 0.5, 2)
    verdict = story.verdict()
    assert verdict.clean, verdict
    assert verdict.duplicates == {"redis_down": 1}
    story.submit(2).run(7.5, 9, job=2).run(8, 9, pid=2, job=2).row(ended=9, job=2)
    assert broken(story.verdict()) == "D", "that began long after"


def test_a_fault_long_before_the_first_run_explains_nothing(story: Story) -> None:
    story.submit().run(0.1).run(4, 4.1, pid=2).fault("redis_loss", -8, -7).row(ended=4.2)
    assert broken(story.verdict()) == "D"


def test_a_pause_that_ended_long_ago_does_not_explain_what_its_process_starts(story: Story) -> None:
    story.submit().run(2).run(9, 9.1, pid=2).fault("pause", -5, 1, 2).row(ended=9.2)
    assert broken(story.verdict()) == "D"


def test_a_fault_after_the_second_run_explains_nothing(story: Story) -> None:
    story.submit().run(0.1).run(4, 4.1, pid=2).fault("kill", 5, 5, 1).row(ended=4.2)
    assert broken(story.verdict()) == "D"


def test_a_fault_explains_nothing_that_had_ended_and_was_written_before_it(story: Story) -> None:
    story.submit().run(0.1, 0.2).run(5, 5.1, pid=2).fault("kill", 4.5, 4.5, 1).row(ended=5.2)
    assert broken(story.verdict()) == "D"
    assert story.verdict(write=5.0).clean


def test_a_failed_try_that_was_not_charged(story: Story) -> None:
    story.submit().run(0.1, 0.2, "raise").run(0.5, 0.6, pid=2).row(ended=0.7)
    assert broken(story.verdict()) == "R"


def test_a_try_that_failed_twice_at_once_for_a_reason_is_charged_once(story: Story) -> None:
    story.submit().run(0.1, 0.11, "raise").run(0.14, 0.15, "raise", pid=2).run(0.3, 0.4, attempt=2)
    story.row(attempts=1, ended=0.5).fault("redis_loss", -4, -2)
    assert story.verdict().clean
    assert broken(story.run(0.2, 0.25, "raise", attempt=2).verdict()) == "R"


def test_a_try_that_was_charged_for_nothing(story: Story) -> None:
    story.submit().run(0.1, 0.2, attempt=2).row(attempts=1)
    assert broken(story.verdict()) == "R"
    assert story.fault("kill", 0.05, 0.06, 3).verdict().clean  # its holder may have died before it started


def test_a_try_that_was_charged_for_a_kill_long_before(story: Story) -> None:
    story.submit().run(0.3, 0.4, attempt=2).row(attempts=1)
    assert broken(story.fault("kill", -3, -2, 3).verdict()) == "R"


def test_a_try_that_was_charged_for_a_fault_after_a_deadline_that_was_brought_forward(story: Story) -> None:
    story.submit(due=20).call("reschedule", -5, "rescheduled")
    story.run(0.1, 0.2, version=1).row(attempts=1, version=1, ended=5)
    assert broken(story.verdict()) == "R"
    assert story.fault("redis_loss", -3, 0.15).verdict().clean


def test_an_orderly_stop_charges_nothing(story: Story) -> None:
    story.submit().run(0.1, 0.2, attempt=2).row(attempts=1).fault("stop", 0.05, 0.06, 3)
    assert broken(story.verdict()) == "R"


def test_a_task_that_died_of_a_crash(story: Story) -> None:
    story.retries = 2
    story.submit().place("dead").row(TaskStatus.DEAD, 2, attempts=2)
    story.run(0.1, 0.2, "raise").run(1, attempt=2).fault("kill", 1.5, 1.5, 1)
    assert broken(story.verdict()) == "R"


def test_a_late_failure_of_a_paused_worker_killed_a_task_that_a_newer_try_had_done(story: Story) -> None:
    story.submit().place("dead").row(TaskStatus.DEAD, 9, attempts=2).fault("pause", 0.5, 6, 1)
    assert broken(story.run(0.1, 8, "dead").run(5, 8.5, pid=2, attempt=2).verdict()) == "R"


def test_tries_that_were_counted_down(story: Story) -> None:
    story.submit().run(0.1, 0.2, "raise").run(1, 1.1, "raise", attempt=2)
    assert broken(story.run(2, 2.1, attempt=1).row(ended=3, attempts=2).verdict()) == "R"


def test_a_task_that_killed_its_process_again_and_again_may_die_of_it_by_the_rule(story: Story) -> None:
    story.submit().place("dead").row(TaskStatus.DEAD, 5, attempts=2, crashes=4)
    for number in range(4):
        story.run(number + 0.1, number + 0.2, "die", attempt=min(number + 1, 3), pid=number + 1)
    assert broken(story.verdict()) == "R"
    assert story.verdict(crash_limit=3).clean
    assert broken(story.verdict(crash_limit=4)) == "R", "too soon"
    story.submit(2).run(3.05, 3.06, pid=4, job=2).row(job=2, ended=3.07)
    assert broken(story.verdict(crash_limit=3)) == "R", "not alone: it may have been the other"


def test_more_tries_than_the_topic_has(story: Story) -> None:
    for attempt in (1, 2, 3):
        story.run(attempt, attempt + 0.1, "raise", attempt=attempt)
    story.submit().run(4, 4.1, attempt=4).row(attempts=3, ended=4.5)
    assert broken(story.verdict()) == "R"


def test_a_dead_task_without_its_entry_and_an_entry_of_a_task_that_is_not_dead(story: Story) -> None:
    story.submit().run(0.1, 0.2, "dead").row(TaskStatus.DEAD, attempts=1)
    assert broken(story.verdict()) == "X"
    assert story.place("dead").verdict().clean
    story.row()
    assert "X" in broken(story.verdict())


def test_a_dead_task_that_ran_again(story: Story) -> None:
    story.submit().run(0.1, 0.2, "dead").row(TaskStatus.DEAD, attempts=1).place("dead")
    assert "X" in broken(story.run(9, 9.2, attempt=2).verdict())


def test_a_dead_task_that_came_back_without_an_operator(story: Story) -> None:
    story.submit().run(0.1, 0.2, "dead").run(9, 9.1, version=1).row(ended=9.2, version=1)
    story.line("seen", 5, 100, job=1, status=4, v=0)
    assert "X" in broken(story.verdict())
    verdict = story.call("redrive", 8, "ok").verdict()
    assert verdict.clean, verdict


def test_settle_counts_from_the_due_time_and_from_the_end_of_the_fault(story: Story) -> None:
    story.submit().run(50, 50.1).row(ended=50.2)
    assert broken(story.verdict()) == "T"
    verdict = story.fault("zk_down", -1, 45).verdict()
    assert verdict.clean
    assert verdict.settled_s == pytest.approx(5)
    assert broken(story.verdict(settle=4)) == "T"


@pytest.mark.parametrize(("begins", "found"), [(60, ""), (70, "T")])
def test_settle_of_a_later_try_counts_from_the_failure_of_the_one_before(
    story: Story, begins: float, found: str
) -> None:  # 30 s to settle and as long a prepare_timeout; a backoff of at most 2 s
    story.submit().run(0.1, 0.2, "raise").run(begins, begins + 0.1, attempt=2)
    verdict = story.row(ended=begins + 0.1, attempts=1).verdict()
    assert broken(verdict) == found
    assert not found or story.fault("zk_down", 0, 20).verdict().clean


@pytest.mark.parametrize(("begins", "found"), [(60, ""), (90, "T")])
def test_settle_of_a_repeated_try_counts_from_the_faults_end(story: Story, begins: float, found: str) -> None:
    story.submit().run(0.1, pid=1).fault("kill", 0.5, 5, 1).run(begins, begins + 0.1, pid=2, attempt=2)
    assert broken(story.row(ended=begins + 0.1, attempts=1).verdict()) == found


def test_a_start_after_the_row_had_ended(story: Story) -> None:
    story.submit().run(0.1, 0.2).run(9, 9.1, pid=2).row(ended=0.3).fault("redis_loss", 0.1, 8.9)
    assert "U" in broken(story.verdict())


def test_a_task_that_nobody_submitted(story: Story) -> None:
    assert broken(story.run(0.1, 0.2).verdict()) == "U"
    assert broken(story.row().verdict()) == "U"


def test_orphans_and_entries_in_two_places(story: Story) -> None:
    assert broken(story.place("store", job=5).verdict()) == "O"


@pytest.mark.parametrize(("places", "found"), [
    ([("store", 1)], ""),  # dropped by the row check when it comes due
    ([("prepare", 1)], "O"),
    ([("store", 2)], "O"),
    ([("store", 1), ("prepare", 1)], "O"),
])  # fmt: skip
def test_entries_of_a_task_that_ended(story: Story, places: list[tuple[str, int]], found: str) -> None:
    story.submit().run(0.1, 0.2).row()
    for queue, slot in places:
        story.place(queue, slot)
    assert broken(story.verdict()) == found


# --- pulled


def test_what_comes_again_although_nothing_broke_has_no_cause(story: Story) -> None:
    story.submit().run(0.1, until=4).run(4.1, 4.2, pid=2, attempt=2, until=8)
    assert broken(story.row(ended=4.3, attempts=1).verdict()) == "D"


def test_no_fault_lets_a_pulled_task_come_again_before_its_lease_has_ended(story: Story) -> None:
    story.submit().run(0.1, until=4).fault("kill", 0.2, 0.3, 1).run(3.9, 4.2, pid=2, attempt=2, until=8)
    assert broken(story.row(ended=4.3, attempts=1).verdict()) == "D"


def test_nothing_comes_again_after_an_ack_that_was_answered_in_time(story: Story) -> None:
    story.submit().run(0.1, 0.2, until=4, acked=0.3).fault("kill", 0.4, 0.5, 1)
    story.run(4.1, 4.2, pid=2, attempt=2, until=8)
    assert broken(story.row(ended=4.3, attempts=1).verdict()) == "D"


@pytest.mark.parametrize(("delivery", "found"), [(Delivery.PULL, ""), (Delivery.HANDLER, "R")])
def test_only_of_what_is_pulled_a_try_is_charged_that_mysql_has_not_answered(
    story: Story, delivery: Delivery, found: str
) -> None:
    story.delivery = delivery
    story.submit().fault("store_down", 0.0, 2.0).run(4.1, 4.2, attempt=2)
    assert broken(story.row(ended=4.3, attempts=1).verdict()) == found
