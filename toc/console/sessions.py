"""Who is logged in: a sealed cookie that ends with its token, and a CSRF token made of it.

The cookie holds the SHA-256 of the access token and when the login ends, under an HMAC with a key made of the
secret of the task table. So nothing is stored, every gateway process knows it, and a token that is revoked,
expired or made anew ends it within a second.
"""

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

from toc.model.access import Token
from toc.model.clock import Clock
from toc.operate.tokens import TokenBook, digest

COOKIE = "__Host-toc"
LASTS_MS = 12 * 3_600_000
_HASH, _END = 32, 8


@dataclass(frozen=True, slots=True)
class Session:
    """A login."""

    token: Token
    csrf: str
    """What its forms carry. The lengths of compressed pages could give it away (BREACH), but another site
    could do nothing with it: its forms come without this login's cookie (SameSite=Strict), those of another
    port or sibling of this host are refused by their Origin."""


class Sessions:
    """Seals and reads cookies, without a server. For one event loop."""

    def __init__(self, book: TokenBook, clock: Clock, secret: bytes) -> None:
        self._book = book
        self._clock = clock
        self._key = hmac.digest(secret, b"toc console", "sha256")

    def begin(self, secret: str) -> str | None:
        """Return the cookie of a new login by an access token, None if it lets nobody in.

        Raises TokensUnavailable.
        """
        token = self._book.find(secret)
        if token is None:
            return None
        ends = self._clock.now_ms() + LASTS_MS
        payload = digest(secret) + ends.to_bytes(_END)
        return urlsafe_b64encode(payload + self._seal(payload, token.name)).decode()

    def find(self, cookies: str | None) -> Session | None:
        """Return the login that a header of cookies has, None if there is none or it has ended.

        Raises TokensUnavailable.
        """
        pairs = [one.strip().partition("=") for one in (cookies or "").split(";")]
        values = [value for name, _, value in pairs if name == COOKIE]
        if len(values) != 1 or len(values[0]) > 200:
            return None
        try:
            data = urlsafe_b64decode(values[0])
        except ValueError:
            return None
        payload, seal = data[: _HASH + _END], data[_HASH + _END :]
        if int.from_bytes(payload[_HASH:]) <= self._clock.now_ms():
            return None
        token = self._book.of(payload[:_HASH])
        if token is None or not hmac.compare_digest(seal, self._seal(payload, token.name)):
            return None
        return Session(token, hmac.digest(self._key, b"csrf" + data, "sha256").hex())

    def _seal(self, payload: bytes, name: str) -> bytes:
        return hmac.digest(self._key, payload + name.encode(), "sha256")
