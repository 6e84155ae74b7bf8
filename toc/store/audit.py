"""The audit: for each change that an operator makes, a row of intent before it and one of the result after.

Rows are only ever added, and deleted when their retention is over. ``action_id`` joins the two rows. An
intent without a result means that the program ended in between, or could not write the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from toc.store import rows as sql
from toc.store.server import Param, Statement
from toc.store.unsharded_table import UnshardedTable

INTENT, RESULT = "intent", "result"
MOST_ACTOR, MOST_ACTION, MOST_TARGET = 128, 64, 255
MOST_TEXT = 65_535
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


class AuditTable(UnshardedTable):
    """The table of the audit. Any method raises StoreUnavailable or SchemaBehind."""

    def intend(self, action_id: str, actor: str, action: str, target: str, details: str) -> None:
        """Record what is about to be done."""
        self._record(action_id, INTENT, actor, action, target, details, None)

    def conclude(self, action_id: str, actor: str, action: str, target: str, result: str) -> None:
        """Record the result."""
        self._record(action_id, RESULT, actor, action, target, "{}", result)

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
        marks, params = [f"phase='{INTENT}'"], list[Param]()
        for column, value in (("actor", actor), ("action", action), ("target", target)):
            if value is not None:
                marks.append(f"{column}=%s")
                params.append(value)
        if since is not None:
            marks.append(f"gmt_create>={self._server.instant(since)}")
        if below is not None:
            marks.append(f"audit_id<{below:d}")
        at = self._server.milliseconds("gmt_create")
        select = (
            f"SELECT audit_id,action_id,{at},actor,action,target,details FROM {self._table} "
            f"WHERE {' AND '.join(marks)} ORDER BY audit_id DESC LIMIT {limit:d}"
        )
        begun = self._rows(select, params)
        if not begun:
            return []
        ids = [row[1] for row in begun]
        select = (
            f"SELECT action_id,{at},result FROM {self._table} WHERE phase='{RESULT}' "
            f"AND audit_id>{min(row[0] for row in begun):d} AND action_id IN ({','.join(['%s'] * len(ids))})"
        )
        ends = {row[0]: row[1:] for row in self._rows(select, ids)}
        return [AuditRow(*row, *ends.get(row[1], (None, None))) for row in begun]

    def purge(self, keep: int) -> int:
        """Delete the oldest rows that are older than ``keep`` ms. Returns how many."""
        return sql.delete_oldest(self._server, self._table, "audit_id", keep)

    def _record(
        self, action_id: str, phase: str, actor: str, action: str, target: str, *more: str | None
    ) -> None:
        insert = (
            f"INSERT INTO {self._table} (action_id,phase,actor,action,target,details,result,gmt_create) "
            f"VALUES (%s,%s,%s,%s,%s,%s,%s,{self._now()})"
        )
        cut = (actor[:MOST_ACTOR], action[:MOST_ACTION], target[:MOST_TARGET])
        # Written twice after a lost answer, it says the same twice: readers join by action_id.
        self._server.run([Statement(insert, [action_id, phase, *cut, *more])])
