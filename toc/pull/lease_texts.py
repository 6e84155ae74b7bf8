"""Leases as consumers have them: texts, sealed with the secret of the task table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from toc.model.errors import InvalidLease
from toc.model.pull import PullLease


class LeaseTexts:
    """Writes and reads the texts of leases. ``secret``: the secret, if it is known already.

    Otherwise ``read`` gets it from its table, once.
    """

    def __init__(self, read: Callable[[], bytes], secret: bytes = b"") -> None:
        self._read = read
        self._secret = secret

    async def load(self) -> None:
        """Get the secret, without which there is no text. Raises StoreUnavailable or SchemaBehind."""
        if not self._secret:
            self._secret = await asyncio.to_thread(self._read)

    def text(self, lease: PullLease) -> str:
        """Return the text of a lease."""
        return lease.text(self._secret)

    def parse(self, text: object) -> PullLease:
        """Return the lease of a text. Raises InvalidLease."""
        if not self._secret:  # an empty one would be known to everybody
            raise InvalidLease("there is no secret of leases")
        return PullLease.parse(text, self._secret)
