"""Decides whether two rows are the same task."""

from __future__ import annotations

from collections.abc import Sequence

from toc.model.errors import DedupConflict
from toc.model.task import TaskRow

WholeKey = tuple[int, int, str]
"""biz_type, biz_id and dedup_key."""


def whole_key(row: TaskRow) -> WholeKey:
    """Return what a dedup_key is unique in: topic, biz_id, and the key; "" without one."""
    return row.biz_type, row.biz_id, row.dedup_key or ""


def twins_of(rows: Sequence[TaskRow]) -> dict[int, int]:
    """Return which rows repeat the dedup_key of an earlier one, by position."""
    first: dict[WholeKey, int] = {}
    return {
        index: earlier
        for index, row in enumerate(rows)
        if row.dedup_key is not None and (earlier := first.setdefault(whole_key(row), index)) != index
    }


def job_id_or_conflict(row: TaskRow, other: TaskRow, job_id: int) -> int | DedupConflict:
    """Return the job_id of the stored task ``other`` that has this row's dedup_key, or the conflict."""
    try:
        same_task(row, other._replace(job_id=job_id))
    except DedupConflict as exc:
        return exc
    return job_id


def same_task(row: TaskRow, other: TaskRow, *, stored: bool = True) -> int:
    """Return the job_id of the task that has this row's dedup_key. Raises DedupConflict if it differs."""
    differs = (
        "biz_id" if row.biz_key != other.biz_key  # two texts with one number
        else "attribute" if row.attribute != other.attribute
        else "body" if row.body_sha256 != other.body_sha256
        else None
    )  # fmt: skip
    if differs is None:
        return other.job_id
    whose = f"task {other.job_id}" if stored else "another task of this call"
    raise DedupConflict(
        f"dedup_key {row.dedup_key!r} of biz_id {row.biz_id if row.biz_key is None else row.biz_key!r} "
        f"is taken by {whose} with another {differs}",
        other.job_id if stored else None,
    )


def equal(row: TaskRow, other: TaskRow) -> bool:
    """Whether ``other`` is ``row`` as submitted, whatever changed since."""
    return all(
        getattr(row, name) == getattr(other, name)
        for name in (
            "biz_id",
            "biz_key",
            "biz_type",
            "attribute",
            "slot_crc",
            "slot_amount",
            "dedup_key",
            "gmt_create",
            "body_sha256",
        )
    )
