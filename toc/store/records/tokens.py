"""The table of access tokens. It holds their SHA-256, never the tokens.

A row stays for good: the name of a revoked token is not used again, so that the audit stays unambiguous. Each
change adds one to a version, so every change alters (number of rows, sum of versions).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, update

from toc.model.access import NAME, Role, Token
from toc.model.documents import parse, parse_object
from toc.model.errors import UnknownToken
from toc.observe.log import get_logger
from toc.store.records.table import NamedTable, State

log = get_logger(__name__)


class TokenTable(NamedTable[Token]):
    """The tokens, also the revoked and expired ones. Any method raises StoreUnavailable or SchemaBehind."""

    noun, names_fit, unknown = "token", NAME, UnknownToken

    def create(self, token: Token, sha256: bytes) -> None:
        """Add a token. Raises NameTaken."""
        self._add(
            f"there is, or was, a token {token.name!r} already; give another name",
            name=token.name,
            sha256=sha256,
            roles=json.dumps(sorted(token.roles)),
            topics=json.dumps(token.topics),
            limits=json.dumps({} if token.rate is None else {"rate": token.rate}),
            expires_at=token.expires_at,
            created_by=token.created_by,
            gmt_create=token.created,
            version=1,
        )

    def revoke(self, name: str) -> Token:
        """End a token for good and return it. Revoking it again changes nothing. Raises UnknownToken."""
        lives = self._name == self._possible(name), self._column.revoked_at.is_(None)
        values = {"revoked_at": self._clock.now_ms(), "version": self._column.version + 1}
        self._server.run([self._compiled(update(self._table).where(*lives).values(values))])
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
            row["name"],
            frozenset(Role(role) for role in parse(row["roles"])),
            tuple(parse(row["topics"])),
            row["expires_at"],
            parse_object(row["limits"]).get("rate"),
            row["created_by"],
            row["gmt_create"],
            row["revoked_at"],
        )

    def _complain(self, name: str, _exc: Exception) -> None:
        log.warning("token_not_understood", name=name)  # it allows nothing here
