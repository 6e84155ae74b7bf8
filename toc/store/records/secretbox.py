"""Encryption at rest, with Fernet: AES-128 in CBC mode, and an HMAC. The only importer of cryptography."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING

from toc.model.errors import NotInstalled, SecretsLocked

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet


class SecretBox:
    """Seals and opens texts by the keys of TOC_SECRET_KEY. Any method raises SecretsLocked without a key, and
    NotInstalled."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(keys)
        self._made: MultiFernet | None = None

    def seal(self, text: str) -> str:
        """Encrypt with the first key."""
        return self._fernet().encrypt(text.encode()).decode()

    def open(self, sealed: str, whose: str) -> str:
        """Decrypt with whichever key fits. ``whose`` is named in an error. Raises SecretsLocked."""
        fernet = self._fernet()
        from cryptography.fernet import InvalidToken

        try:
            return fernet.decrypt(sealed.encode()).decode()
        except (InvalidToken, ValueError) as exc:
            raise SecretsLocked(
                f"the secrets of {whose} cannot be read: no key of TOC_SECRET_KEY encrypted them; add the "
                f"key that did, behind the others"
            ) from exc

    def _fernet(self) -> MultiFernet:
        if self._made is None:
            if not self._keys:
                raise SecretsLocked(
                    "the secrets of webhook targets need TOC_SECRET_KEY: `toc secrets key` prints a new one; "
                    "every host that sends webhooks or changes targets needs the same key"
                )
            try:
                from cryptography.fernet import Fernet, MultiFernet
            except ImportError as exc:
                raise NotInstalled("the secrets of targets need cryptography", "webhooks") from exc
            self._made = MultiFernet([Fernet(key) for key in self._keys])
        return self._made


def key_mark(key: str) -> str:
    """Return a short hash of a key, by which members compare their keys.

    The key cannot be computed from it.
    """
    return sha256(b"toc " + key.encode()).hexdigest()[:16]


def new_key() -> str:
    """Return a new key for TOC_SECRET_KEY. Raises NotInstalled."""
    try:
        from cryptography.fernet import Fernet
    except ImportError as exc:
        raise NotInstalled("the secrets of targets need cryptography", "webhooks") from exc
    return Fernet.generate_key().decode()
