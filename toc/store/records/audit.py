"""The audit: for each change that an operator makes, a row of intent before it and one of the result after.

Rows are only ever added, and deleted when their retention is over. ``action_id`` joins the two rows. An
intent without a result means that the program ended in between, or could not write the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import insert, select

from toc.store.records.table import RecordTable
from toc.store.tasks import rows as sql

INTENT, RESULT = "intent", "result"
MAX_ACTOR, MAX_ACTION, MAX_TARGET = 128, 64, 255
MAX_TEXT = 65_535
"""Longest details or result, in bytes of UTF-8: what a TEXT holds."""


class AuditRow(NamedTuple):
    """What an operator did. Instants are ms; ``details`` and ``result`` JSON texts.

    ``result`` and ``ended`` are None while it is running, and for good if its end was not recorded.
    """

    audit_id: int
    action_id: str
    began: int
    actor: str
    action: str
    target: str
    details: str
    ended: int | None
    result: str | None


class AuditTable(RecordTable):
    """The table of the audit. Any method raises StoreUnavailable or SchemaBehind."""

    def intend(self, action_id: str, actor: str, action: str, target: str, details: str) -> None:
        """Record what is about to be done."""
        self._record(action_id, actor, action, target, phase=INTENT, details=details)

    def conclude(self, action_id: str, actor: str, action: str, target: str, result: str) -> None:
        """Record the result."""
        self._record(action_id, actor, action, target, phase=RESULT, details="{}", result=result)

    def list(
        self,
        limit: int,
        *,
        actor: str | None = None,
        action: str | None = None,
        target: str | None = None,
        since: int | None = None,
        below: int | None = None,
    ) -> Sequence[AuditRow]:
        """Return actions, the latest first: at most ``limit``, begun since ``since`` (ms).

        ``below``: only those with a smaller audit_id, for the next page. The other filters are exact.
        """
        column = self._column
        where = [column.phase == INTENT]
        for one, value in ((column.actor, actor), (column.action, action), (column.target, target)):
            if value is not None:
                where.append(one == value)
        if since is not None:
            where.append(column.gmt_create >= since)
        if below is not None:
            where.append(column.audit_id < below)
        what = select(
            column.audit_id, column.action_id, column.gmt_create, column.actor, column.action, column.target,
            column.details,
        )  # fmt: skip
        begun = self._rows(what.where(*where).order_by(column.audit_id.desc()).limit(limit))
        if not begun:
            return []
        ended = select(column.action_id, column.gmt_create, column.result).where(
            column.phase == RESULT,
            column.audit_id > min(row[0] for row in begun),
            column.action_id.in_([row[1] for row in begun]),
        )
        ends = {row[0]: row[1:] for row in self._rows(ended)}
        return [AuditRow(*row, *ends.get(row[1], (None, None))) for row in begun]

    def purge(self, keep: int) -> int:
        """Delete the oldest rows that are older than ``keep`` ms. Returns how many."""
        return sql.delete_oldest(self._server, str(self._table), "audit_id", keep)

    def _record(self, action_id: str, actor: str, action: str, target: str, **more: str) -> None:
        row = insert(self._table).values(
            action_id=action_id,
            actor=actor[:MAX_ACTOR],
            action=action[:MAX_ACTION],
            target=target[:MAX_TARGET],
            gmt_create=self._clock.now_ms(),
            **more,
        )
        self._rows(
            row
        )  # written twice after a lost answer, it says the same twice: readers join by action_id
