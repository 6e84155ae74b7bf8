"""Leases as tests ask for them."""

from collections.abc import Collection, Mapping

from toc.model.task import TryRow
from toc.store.tasks.leases import Leases


def taken(
    leases: Leases,
    seconds: Mapping[int, int],
    tries: Mapping[int, TryRow] | None = None,
    renew: Collection[int] = frozenset(),
) -> set[int]:
    """Ask for leases; the job_ids of those that are the asker's now."""
    answers = leases.take(seconds, tries, renew)
    assert not answers.unanswered
    return {job_id for job_id, ours in answers.items() if ours}
