"""Who may change what, and who has: the tables of access tokens and of the audit.

Of tokens it holds the SHA-256, never the tokens. A row stays for good: the name of a revoked token is not
used again, so that the audit stays unambiguous. Each change adds one to a version, so every change alters
(number of rows, sum of versions).

The audit has for each change that an operator makes a row of intent before it and one of the result after;
its rows are only ever added, and deleted when their retention is over. ``action_id`` joins the two rows. An
intent without a result means that the program ended in between, or could not write the result.
"""

import json
from collections.abc import Mapping, Sequence
from operator import eq, ge, lt
from typing import Any, NamedTuple

from sqlalchemy import insert, select

from toc.model.access import NAME, Role, Token
from toc.model.documents import parse, parse_object
from toc.model.errors import UnknownToken
from toc.store.records.table import NamedTable, RecordTable, State
from toc.store.tasks import rows as sql


class TokenTable(NamedTable[Token]):
    """The tokens, also the revoked and expired ones. Any method raises StoreUnavailable or SchemaBehind."""

    in_schema, noun, names_fit, unknown = "timeout_token", "token", NAME, UnknownToken

    def create(self, token: Token, sha256: bytes) -> None:
        """Add a token. Raises NameTaken."""
        self._add(
            f"there is, or was, a token {token.name!r} already; give another name",
            name=token.name, sha256=sha256, roles=json.dumps(sorted(token.roles)),
            topics=json.dumps(token.topics),
            limits=json.dumps({} if token.rate is None else {"rate": token.rate}),
            expires_at=token.expires_at, created_by=token.created_by, gmt_create=token.created, version=1,
        )  # fmt: skip

    def revoke(self, name: str) -> Token:
        """End a token for good and return it. Revoking it again changes nothing. Raises UnknownToken."""
        lives = self._name == self._possible(name), self._column.revoked_at.is_(None)
        self._change(*lives, revoked_at=self._clock.now_ms(), version=self._column.version + 1)
        return self._find(name)[0]

    def read(self) -> tuple[State, dict[bytes, Token], frozenset[bytes]]:
        """Return the state, as of before, the tokens that are not revoked, by the SHA-256, and the SHA-256 of
        the others."""
        state = self.state()  # first: a change in between is then read once more
        gone = self._rows(select(self._column.sha256).where(self._column.revoked_at.is_not(None)))
        live = {bytes(row["sha256"]): token for token, row in self._every() if token.revoked_at is None}
        return state, live, frozenset(bytes(sha256) for (sha256,) in gone)

    def _parse(self, row: Mapping[str, Any]) -> Token:
        return Token(
            row["name"], frozenset(Role(role) for role in parse(row["roles"])), tuple(parse(row["topics"])),
            row["expires_at"], parse_object(row["limits"]).get("rate"), row["created_by"], row["gmt_create"],
            row["revoked_at"],
        )  # fmt: skip


INTENT, RESULT = "intent", "result"
_OF_INTENT = ("audit_id", "action_id", "gmt_create", "actor", "action", "target", "details")
"""The columns from which the first fields of an AuditRow come."""
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

    in_schema = "timeout_audit"

    def intend(self, action_id: str, actor: str, action: str, target: str, details: str) -> None:
        """Record what is about to be done."""
        self._record(action_id, actor, action, target, phase=INTENT, details=details)

    def conclude(self, action_id: str, actor: str, action: str, target: str, result: str) -> None:
        """Record the result."""
        self._record(action_id, actor, action, target, phase=RESULT, details="{}", result=result)

    def list(
        self, limit: int, *, actor: str | None = None, action: str | None = None,
        target: str | None = None, since: int | None = None, below: int | None = None,
    ) -> Sequence[AuditRow]:  # fmt: skip
        """Return actions, the latest first: at most ``limit``, begun since ``since`` (ms).

        ``below``: only those with a smaller audit_id, for the next page. The other filters are exact.
        """
        column = self._column
        filters = [
            (column.actor, eq, actor), (column.action, eq, action), (column.target, eq, target),
            (column.gmt_create, ge, since), (column.audit_id, lt, below),
        ]  # fmt: skip
        where = [column.phase == INTENT]
        where += [holds(one, value) for one, holds, value in filters if value is not None]
        what = select(*(column[name] for name in _OF_INTENT))
        begun = self._rows(what.where(*where).order_by(column.audit_id.desc()).limit(limit))
        if not begun:
            return []
        ended = select(column.action_id, column.gmt_create, column.result).where(
            column.phase == RESULT,
            column.audit_id > min(row[0] for row in begun),
            column.action_id.in_([row[1] for row in begun]),
        )
        ends = {row[0]: row[1:] for row in self._rows(ended.order_by(column.audit_id))}  # the last one holds
        return [AuditRow(*row, *ends.get(row[1], (None, None))) for row in begun]

    def purge(self, keep: int) -> bool:
        """Delete the oldest rows that are older than ``keep`` ms. Returns whether more may be left."""
        return sql.delete_oldest(self._server, str(self._table), "audit_id", keep)

    def _record(self, action_id: str, actor: str, action: str, target: str, **more: str) -> None:
        row = insert(self._table).values(
            action_id=action_id, actor=actor[:MAX_ACTOR], action=action[:MAX_ACTION],
            target=target[:MAX_TARGET], gmt_create=self._clock.now_ms(), **more,
        )  # fmt: skip
        # Written twice after a lost answer, it says the same twice: readers join by action_id.
        self._rows(row)
