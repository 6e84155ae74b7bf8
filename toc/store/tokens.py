"""The table of access tokens. It holds their SHA-256, never the tokens.

A row stays for good: the name of a revoked token is not used again, so that the audit stays unambiguous. Each
change adds one to a version, so every change alters (number of rows, sum of versions).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from toc.model.access import NAME, Role, Token
from toc.model.documents import parse, parse_object
from toc.model.errors import InvalidInput, UnknownToken, shown
from toc.observe.log import get_logger
from toc.store.server import Param, Statement
from toc.store.unsharded_table import UnshardedTable

log = get_logger(__name__)

State = tuple[int, int]
"""The number of tokens and the sum of their versions."""


class TokenTable(UnshardedTable):
    """The tokens. Any method raises StoreUnavailable or SchemaBehind."""

    def create(self, token: Token, sha256: bytes) -> None:
        """Add a token. Raises NameTaken."""
        end = "NULL" if token.expires_at is None else self._server.instant(token.expires_at)
        insert = (
            f"INSERT INTO {self._table} (name,sha256,roles,topics,limits,expires_at,created_by,gmt_create,"
            f"version) VALUES (%s,%s,%s,%s,%s,{end},%s,{self._server.instant(token.created)},1)"
        )
        roles = json.dumps(sorted(token.roles))
        limits = json.dumps({} if token.rate is None else {"rate": token.rate})
        texts: list[Param] = [
            token.name,
            sha256,
            roles,
            json.dumps(list(token.topics)),
            limits,
            token.created_by,
        ]
        self._add(insert, texts, f"there is, or was, a token {token.name!r} already; give another name")

    def revoke(self, name: str) -> Token:
        """End a token for good and return it. Revoking it again changes nothing. Raises UnknownToken."""
        if not NAME.fullmatch(name):  # MySQL takes a name with a trailing space for the same name
            raise _unknown(name)
        update = (
            f"UPDATE {self._table} SET revoked_at={self._now()},version=version+1 "
            "WHERE name=%s AND revoked_at IS NULL"
        )
        self._server.run([Statement(update, [name])])
        found = next((token for _, token in self._select("WHERE name=%s", name)), None)
        if found is None:
            raise _unknown(name)
        return found

    def list(self) -> Sequence[Token]:
        """Return all tokens by name, the revoked and expired ones too."""
        return [token for _, token in self._select("ORDER BY name")]

    def read(self) -> tuple[State, dict[bytes, Token], frozenset[bytes]]:
        """Return the state, as of before, the tokens that are not revoked, by the SHA-256, and the SHA-256 of
        the others."""
        state = self.state()  # first: a change in between is then read once more
        revoked = self._rows(f"SELECT sha256 FROM {self._table} WHERE revoked_at IS NOT NULL")
        live = dict(self._select("WHERE revoked_at IS NULL"))
        return state, live, frozenset(bytes(sha256) for (sha256,) in revoked)

    def state(self) -> State:
        """Return the State: another one means that a token has changed."""
        return self._state("version")

    def _select(self, rest: str, *params: str) -> Sequence[tuple[bytes, Token]]:
        ms = self._server.milliseconds
        select = (
            f"SELECT sha256,name,roles,topics,limits,{ms('expires_at')},{ms('revoked_at')},created_by,"
            f"{ms('gmt_create')} FROM {self._table} {rest}"
        )
        tokens = []
        for row in self._rows(select, params):
            sha256, name, roles, topics, limits, end, revoked, by, created = row
            try:
                known = frozenset(Role(role) for role in parse(roles))
                rate = parse_object(limits).get("rate")
                token = Token(name, known, tuple(parse(topics)), end, rate, by, int(created), revoked)
            except (ValueError, TypeError, AttributeError, InvalidInput):
                # Of a later version, or edited by hand: it allows nothing here.
                if self._complains(name):
                    log.warning("token_not_understood", name=name)
                continue
            tokens.append((bytes(sha256), token))
        return tokens


def _unknown(name: object) -> UnknownToken:
    return UnknownToken(f"there is no token {shown(name)}; `toc token list` shows all")
