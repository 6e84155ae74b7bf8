"""Access tokens: making and revoking them, and the book by which a gateway knows them.

A token is ``toc_`` and 32 random bytes as text. It is shown once; only its SHA-256 is kept. So a token is
found by a lookup of its hash, whose time tells nothing about any token.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from toc.model.access import MAX_PATTERNS, Role, Token, check_grant
from toc.model.access import Action as Right
from toc.model.clock import Clock
from toc.model.errors import InvalidInput, NotGranted, TocError, TokensUnavailable, UnknownToken
from toc.observe.log import get_logger
from toc.operate.operation import REQUIRED, Doing, Param, Record, Value, operation
from toc.operate.records import token_record

if TYPE_CHECKING:
    from toc.sdk.client import TimeoutCenter
    from toc.store.records.access import TokenTable
    from toc.store.records.table import State
    from toc.store.store import Store

log = get_logger(__name__)

PREFIX = "toc_"
SECRET_BYTES = 32
LONGEST = 200
"""Characters. A longer text is not a token of ours, and is not hashed."""

MAX_GIVEN = 200
"""Most tokens that are made by the holder of one, also by means of those, and have not ended a day ago: all
are read whenever one has changed."""
LATELY_MS = 86_400_000
REFRESH_SECONDS = 0.4
"""Seconds between two looks at the table: a change is in force everywhere within 1 s."""
KEPT_SECONDS = 600.0
"""For how many seconds the tokens that were read last hold while the table is away; no longer."""
FRESH_SECONDS = 2.0
"""If the table has not answered for this many seconds, an unknown token may be a new one. Then it
is not refused as invalid."""


class Made(NamedTuple):
    """A new token and its secret text, which is nowhere else and cannot be shown again."""

    token: Token
    secret: str


def create_token(
    center: TimeoutCenter, name: str, *, roles: Collection[Role], topics: Sequence[str], by: str,
    expires: float | None = None, rate: float | None = None, giver: Token | None = None, secret: str = "",
) -> Made:  # fmt: skip
    """Make a token that ends after ``expires`` seconds (None: when it is revoked).

    ``giver``: the token by which the caller asks; None for an operator at the command line, who may grant
    all. ``secret``: its text, for one that clients have already; it begins with PREFIX. Raises InvalidInput,
    NameTaken, NotGranted.
    """
    store, now = center.store, center.clock.now_ms()
    if expires is not None and not 1 <= expires <= 10 * 366 * 86_400:
        raise InvalidInput("a token may last 1 s to 10 years, or have no expiry", "expires")
    expires_at = None if expires is None else now + round(expires * 1000)
    token = Token(name, frozenset(roles), tuple(topics), expires_at, rate, by, now)
    if giver is not None:
        check_grant(giver, roles, topics, expires_at, rate)
        first, given = _made(store.tokens.list(), giver, now - LATELY_MS)
        if given >= MAX_GIVEN:
            many = f"{given} tokens that live or ended within a day"
            raise NotGranted(f"token {first!r} has made {many}: an operator may make more")
    secret = secret or PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    store.tokens.create(token, digest(secret))
    return Made(token, secret)


def _made(tokens: Sequence[Token], giver: Token, since: int) -> tuple[str, int]:
    """Return the token from which ``giver`` comes, and how many were made by it, and by these in turn: else
    each of them could make as many. One for all topics counts for itself, and those that it makes begin
    anew. What had ended by ``since`` (ms) does not count."""
    maker = {one.name: one.created_by.partition(": ")[0] for one in (*tokens, giver)}
    wide = {one.name for one in (*tokens, giver) if one.everywhere}

    def first(name: str) -> str:
        for _ in maker:  # rows that were changed by hand may name each other
            above = maker[name]
            if name in wide or above in wide or above not in maker:
                break
            name = above
        return name

    origin = first(giver.name)
    of = maker.__getitem__ if giver.everywhere else first
    lived = [one.name for one in tokens if min(one.revoked_at or since, one.expires_at or since) >= since]
    return origin, sum(of(name) == origin != name for name in lived)


def revoke_token(store: Store, name: str, *, giver: Token | None = None) -> Token:
    """End a token for good. Raises UnknownToken, also for one that has more than ``giver``."""
    if giver is not None:
        other = next((token for token in store.tokens.list() if token.name == name), None)
        if other is None or not giver.covers(other):  # it may hold what this version does not understand
            raise UnknownToken(f"there is no token {name!r}; `toc token list` shows all")
    return store.tokens.revoke(name)


def digest(secret: str) -> bytes:
    """Return what the table keeps of a token."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class TokenBook:
    """The tokens as a gateway process knows them. Thread-safe; asks no server when a token is looked up.

    Call ``run_once`` on a thread of its own, again after the seconds that it returns; before the first answer
    of the table nothing is known.
    """

    def __init__(self, table: TokenTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._tokens: Mapping[bytes, Token] = {}
        """By SHA-256. Replaced, never changed in place."""
        self._revoked: Set[bytes] = frozenset()
        """The SHA-256 of those that were revoked."""
        self._named: Mapping[str, Token] = {}
        self._state: State | None = None
        self._answered = float("-inf")
        """When the last successful read of the table began (monotonic)."""
        self._away = False
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}
        """Token -> requests that it may make now, as of an instant (monotonic)."""

    def run_once(self) -> float:
        """Read the tokens if one has changed. Returns the seconds until the next call."""
        began = self._clock.monotonic()
        try:
            if self._state is None or self._table.state() != self._state:
                self._state, self._tokens, self._revoked = self._table.read()
                self._named = {token.name: token for token in self._tokens.values()}
        except TocError as exc:
            if not self._away:
                self._away = True
                log.warning("tokens_not_read", error=str(exc))
        else:
            self._answered, self._away = began, False
        return max(0.0, REFRESH_SECONDS - (self._clock.monotonic() - began))

    @property
    def known(self) -> bool:
        """Whether those tokens hold that were read last: the table has answered within KEPT_SECONDS."""
        return self._clock.monotonic() - self._answered <= KEPT_SECONDS

    def find(self, secret: str) -> Token | None:
        """Return the token of a text, or None if it is unknown, revoked or expired.

        Raises TokensUnavailable if that cannot be told: the table has not answered for KEPT_SECONDS, or for
        FRESH_SECONDS and the token is not known.
        """
        if not secret.startswith(PREFIX) or len(secret) > LONGEST:
            return None
        return self.of(digest(secret))

    def of(self, sha256: bytes) -> Token | None:
        """Return the token whose text has this SHA-256, as ``find`` does."""
        age = self._clock.monotonic() - self._answered
        if age <= KEPT_SECONDS:
            token = self._tokens.get(sha256)
            if token is not None:
                return token if token.lives(self._clock.now_ms()) else None
            if age <= FRESH_SECONDS:
                return None
        raise TokensUnavailable("the table of access tokens is out of reach; try again")

    def why_not(self, secret: str) -> str:
        """Say of a text for which ``find`` returned None why it lets nobody in."""
        sha256 = digest(secret[:LONGEST])
        if sha256 in self._revoked:
            return "this access token was revoked"
        return "this access token has expired" if sha256 in self._tokens else "there is no such access token"

    def in_force(self, token: Token) -> bool:
        """Whether a token that was found is neither revoked nor expired now, as far as is known."""
        return self._named.get(token.name) == token and token.lives(self._clock.now_ms())

    def wait(self, token: Token) -> float:
        """Take one request from what a token's rate allows this process. Returns 0.0 if it is admitted.

        Otherwise nothing is taken, and it returns the seconds after which to try again. A second's worth may
        come at once.
        """
        rate = token.rate
        if rate is None:
            return 0.0
        most = max(rate, 1.0)
        with self._lock:
            now = self._clock.monotonic()
            left, at = self._buckets.get(token.name, (most, now))
            left = min(most, left + (now - at) * rate)
            admitted = left >= 1
            self._buckets[token.name] = (left - 1 if admitted else left, now)
            return 0.0 if admitted else (1 - left) / rate


NAME = Param("name", Value.TEXT, "Who uses it, such as shop-backend.", REQUIRED)


@operation("token.list", "GET /v1/tokens", Right.READ_TOKENS, "List access tokens")
def list_tokens(doing: Doing) -> Record:
    """List the tokens, without secrets. Who has a token sees those that have no more than his.

    toc: Revoked ones stay in the list.
    """
    tokens, giver, now = doing.center.store.tokens.list(), doing.token, doing.center.clock.now_ms()
    return {"tokens": [token_record(one, now) for one in tokens if giver is None or giver.covers(one)]}


@operation(
    "token.create", "POST /v1/tokens", Right.CHANGE_TOKENS, "Make an access token",
    NAME,
    Param("roles", Role, "What it may do. May be repeated.", REQUIRED, least=1, most=len(Role), many=True,
          option="--role"),
    Param("topics", Value.TEXT, "On which topics: shop.*, or * for all. May be repeated.", REQUIRED, least=1,
          most=MAX_PATTERNS, many=True, option="--topic", metavar="PATTERN"),
    Param("expires", Value.SECONDS, "Ends after: 12h, 90d. Default: never.", above=0),
    Param("rate", Value.NUMBER, "Requests per second that each gateway process accepts.", above=0),
    takes="NewToken", status=201,
)  # fmt: skip
def create(doing: Doing, name: str, **given: Any) -> Record:
    """Make a token and show it, only this once. It can have no more than that by which it is made.

    toc: Example: toc token create shop-backend --role produce --topic 'shop.*' --expires 90d
    """
    made = create_token(doing.center, name, by=doing.by, giver=doing.token, **given)
    return token_record(made.token, doing.center.clock.now_ms()) | {"token": made.secret}


@operation("token.revoke", "DELETE /v1/tokens/{name}", Right.CHANGE_TOKENS, "Revoke an access token", NAME)
def revoke(doing: Doing, name: str) -> Record:
    """Revoke a token for good, everywhere within a second. Its name is not used again; its bulk jobs go
    on."""
    revoked = revoke_token(doing.center.store, name, giver=doing.token)
    return token_record(revoked, doing.center.clock.now_ms())
