"""A task's body: bytes with a content type, beside the row, read only when asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from toc.model.errors import BodyTooLarge, InvalidBody, shown

DEFAULT_CONTENT_TYPE = "application/octet-stream"
MAX_CONTENT_TYPE_CHARS = 255
MAX_BODY = 4 << 20
"""Most bytes of a body that a setting can allow."""


class Content(NamedTuple):
    """What a body consists of."""

    content_type: str
    data: bytes

    def fingerprint(self) -> bytes:
        """Return the row's ``body_sha256``: of the content type, a zero byte and the data.

        If two bodies differ in their type or their data, the fingerprints differ. So bodies can be
        compared without reading them.
        """
        digest = hashlib.sha256(self.content_type.encode() + b"\0")
        digest.update(self.data)
        return digest.digest()


class Body:
    """A stored body. ``length`` is known; the rest is read from the task table when it is first asked for."""

    __slots__ = ("_content", "_read", "length")

    def __init__(
        self, length: int, content: Content | None = None, read: Callable[[], Content] | None = None
    ) -> None:
        self.length = length
        self._content = content
        self._read = read

    @property
    def content(self) -> Content:
        """The bytes and their type. Raises BodyGone or StoreUnavailable if they cannot be read."""
        if self._content is None:
            assert self._read is not None  # noqa: S101 - it is one of the two
            self._content = self._read()
        return self._content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and (self is other or self.content == other.content)

    def __hash__(self) -> int:
        return hash(self.length)

    def __repr__(self) -> str:  # tasks are logged: never the bytes
        return f"<{self.length} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled task carries its body
        return Body, (self.length, self.content)


def check_body(body: object, content_type: object, most: int) -> Content | None:
    """Return what a caller submits as a body of at most ``most`` bytes, None without one.

    Raises InvalidBody.
    """
    if body is None:
        if content_type is not None:
            raise InvalidBody("a content_type is given without a body", "content_type")
        return None
    if not isinstance(body, bytes):
        raise InvalidBody(f"body must be bytes, not {type(body).__name__}")
    if len(body) > most:
        raise BodyTooLarge(
            f"body has {len(body)} bytes; {most} are allowed (TOC_MAX_BODY): keep it elsewhere and put its "
            "address here"
        )
    if content_type is None:
        return Content(DEFAULT_CONTENT_TYPE, body)
    if not isinstance(content_type, str):
        raise InvalidBody(f"content_type must be a text, not {type(content_type).__name__}", "content_type")
    if not (0 < len(content_type) <= MAX_CONTENT_TYPE_CHARS and content_type.isascii()) or (
        not content_type.isprintable()
    ):
        raise InvalidBody(
            f"content_type {shown(content_type)} must be 1 to {MAX_CONTENT_TYPE_CHARS} printable ASCII "
            "characters, such as application/json",
            "content_type",
        )
    return Content(content_type, body)
