"""The model of the protocol (spec/README.md) is searched exhaustively, and can fail."""

from pathlib import Path

import pytest
from spec.spin import Search, need_spin, run, searches

pytestmark = pytest.mark.timeout(1800)


def parameters(kind: str) -> list[object]:
    return [
        pytest.param(search, id=search.name, marks=[pytest.mark.slow] if search.slow else [])
        for search in searches(kind)
    ]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where searches are made; those that two tests want are made once."""
    need_spin()
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("search", parameters("safety"))
def test_no_order_of_events_breaks_an_invariant(search: Search, place: Path) -> None:
    result = run(search, place)
    assert result.errors == 0, result.output
    assert result.complete, result.output


@pytest.mark.parametrize("search", parameters("liveness"))
def test_the_task_always_ends_and_the_index_settles(search: Search, place: Path) -> None:
    result = run(search, place)
    assert result.errors == 0, result.output
    assert result.complete, result.output


@pytest.mark.parametrize("search", parameters("mutation"))
def test_the_model_finds_what_goes_wrong_without_a_guard(search: Search, place: Path) -> None:
    result = run(search, place)
    assert result.errors > 0, f"nothing was found in {result.states} states"
    assert search.finds in result.error, result.output
