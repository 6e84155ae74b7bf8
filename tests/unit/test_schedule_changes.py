"""What a change of a schedule does to its occurrences, case by case."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from toc.model.clock import to_ms
from toc.model.schedule import Definition
from toc.model.schedule_state import Planned, State, change, new_state, step

NOW = to_ms(datetime(2026, 1, 1, tzinfo=UTC))
SECOND = 1000


def every(seconds: int, **options: Any) -> Definition:
    return Definition("n", "t", every=timedelta(seconds=seconds), **options)


def running(definition: Definition) -> tuple[State, list[Planned]]:
    """A schedule after its first step at NOW, and the tasks that it has ahead."""
    made, state = step(definition, new_state(definition, 1, NOW), NOW, ended=True)
    return state, [Planned(number, one.nominal) for number, one in enumerate(made, 1)]


def at(*nominals: int) -> list[float]:
    """In seconds from NOW."""
    return [(nominal - NOW) / SECOND for nominal in nominals]


@pytest.mark.parametrize(
    ("paused", "missed"), [(None, 0), (True, 3)], ids=["the policy of missed decides", "a pause counts them"]
)
def test_what_is_due_and_not_decided_is_never_lost_in_silence(paused: bool | None, missed: int) -> None:
    """As when the topic was closed meanwhile."""
    state, _ = running(every(60))
    later = NOW + 185 * SECOND  # those of 60, 120 and 180 s are due and no tasks
    changed = change(every(60), state, every(60, attribute={"a": 1}), [], later, paused=paused)
    assert changed.state.missed == missed
    assert (changed.state.after < NOW + 60 * SECOND) == (paused is None)


def test_another_rule_does_not_fire_for_times_before_it() -> None:
    state, _ = running(every(3600))
    later = NOW + 1000 * SECOND
    minutely = every(60)
    changed = change(every(3600), state, minutely, [], later, paused=None)
    made = step(minutely, changed.state, later, ended=True).made
    assert at(*(one.nominal for one in made)) == [1020]


@pytest.mark.parametrize("options", [{"paused": True}, {"overlap": "skip"}])
def test_an_occurrence_that_waits_is_dropped_and_counted_by_a_pause_and_by_overlap_skip(
    options: dict[str, Any],
) -> None:
    buffering = every(10, overlap="buffer_one")
    state, _ = running(buffering)
    waiting = state._replace(buffered=NOW)
    paused = options.pop("paused", None)
    changed = change(buffering, waiting, buffering.changed(**options), [], NOW, paused=paused)
    assert (changed.state.buffered, changed.state.skipped) == (None, 1)
