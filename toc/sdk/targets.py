"""``center.targets``: receivers of webhooks, their limits and their secrets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from toc.model.clock import Duration, named_seconds
from toc.model.errors import InvalidInput, InvalidTarget, NotInstalled, UnknownTarget, shown
from toc.model.target import (
    MAX_PREVIOUS_SECONDS,
    NOTICED_SECONDS,
    PREVIOUS_SECONDS,
    Target,
    TargetSecrets,
    check_headers,
    check_url,
    new_secret,
)
from toc.store.records.targets import Resealed, TargetBook, no_target

if TYPE_CHECKING:
    from toc.sdk.parts import Parts
    from toc.webhooks.sender import TestAnswer

Changed = TypeVar("Changed")

LIMITS = frozenset({"timeout", "concurrency", "rate", "dead_on", "topics"})
"""What ``alter`` changes beside the URL and the headers."""


class NewSecret(NamedTuple):
    """A target with a new signing secret, which nothing shows again."""

    target: Target
    secret: str

    def __repr__(self) -> str:
        return f"NewSecret(target={self.target!r}, secret='***')"


class Targets:
    """The webhook targets. Any method raises StoreUnavailable.

    Those that read or write secrets raise SecretsLocked without TOC_SECRET_KEY. ``alter``, ``rotate``,
    ``pause`` and ``delete`` return when every sender knows the change, NOTICED_SECONDS after it was written;
    without ``wait``, at once.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._book: TargetBook | None = None

    def create(
        self, /, name: str, url: str, *, headers: Mapping[str, str] | None = None, **limits: Any
    ) -> NewSecret:
        """Register a receiver, and return it with the secret by which it checks signatures.

        ``headers`` go with every request; they are encrypted and never shown. ``limits``: ``timeout``
        (seconds for a request, 15), ``concurrency`` (requests in flight over all workers, 50), ``rate``
        (requests a second over all workers; None: no limit), ``dead_on`` (which of the answers 400, 404 and
        422 make a task dead at once; none) and ``topics`` (patterns of the topics that may use it; all).
        Raises InvalidTarget or NameTaken before anything is written.
        """
        target = Target(name, check_url(url, self._parts.settings.allow), **_limits(limits))
        opened = TargetSecrets(new_secret(), None, check_headers(headers or {}))
        return NewSecret(self._parts.store.targets.create(target, opened), opened.secret)

    def get(self, name: str) -> Target | None:
        """Return a target, or None."""
        with suppress(UnknownTarget):
            return self._parts.store.targets.get(name)
        return None

    def list(self) -> list[Target]:
        """Return all targets by name. Leaves out rows that this version does not understand."""
        return [*self._parts.store.targets.list()]

    def alter(
        self, /, name: str, *, url: str | None = None, headers: Mapping[str, str] | None = None,
        wait: bool = True, **limits: Any,
    ) -> Target:  # fmt: skip
        """Change a target. ``headers`` replace all that it had; ``limits`` are those of ``create``.

        Raises InvalidInput (nothing to change), InvalidTarget or UnknownTarget.
        """
        changes = _limits(limits)
        if url is not None:
            changes["url"] = check_url(url, self._parts.settings.allow)
        if not changes and headers is None:
            raise InvalidInput(f"nothing to change on {shown(name)}: name the url, headers or a limit")
        secrets = None
        if headers is not None:
            secrets = partial(replace, headers=check_headers(headers))
        return self._noticed(self._parts.store.targets.change(name, changes, secrets), wait=wait)

    def rotate(self, name: str, *, keep: Duration = PREVIOUS_SECONDS, wait: bool = True) -> NewSecret:
        """Give a target a new secret. The former one signs too for ``keep``, by default a day.

        Raises UnknownTarget, InvalidDelay, and InvalidTarget for a ``keep`` of more than 30 days.
        """
        seconds = named_seconds("keep", keep)
        if not seconds <= MAX_PREVIOUS_SECONDS:
            raise InvalidTarget(f"keep must be 0 to {MAX_PREVIOUS_SECONDS:g} seconds, not {shown(keep)}")
        secret = new_secret()
        until = self._parts.clock.now_ms() + round(seconds * 1000) if seconds else None

        def rotated(opened: TargetSecrets) -> TargetSecrets:
            return replace(opened, secret=secret, previous=opened.secret if seconds else None)

        changed = self._parts.store.targets.change(name, {"previous_until": until}, rotated)
        return NewSecret(self._noticed(changed, wait=wait), secret)

    def test(self, name: str) -> TestAnswer:
        """Send a target, paused or not, one signed request that belongs to no task; return the answer.

        Takes as long as the target's timeout. Raises UnknownTarget, and NotInstalled without the packages for
        webhooks.
        """
        try:
            from toc.webhooks.sender import send_test
        except ImportError as exc:
            raise NotInstalled("requests to targets need aiohttp", "webhooks") from exc
        table = self._parts.store.targets
        target = table.get(name)
        return send_test(target, table.open(target), self._parts.settings.allow)

    def pause(self, name: str, *, why: str = "", by: str = "", wait: bool = True) -> Target:
        """Send nothing more to a target; its tasks wait. Requests in flight end. Raises UnknownTarget."""
        self._parts.store.targets.pause(name, by=by, why=why)
        return self._noticed(self._parts.store.targets.get(name), wait=wait)

    def resume(self, name: str) -> Target:
        """Send to a paused target again. Raises UnknownTarget."""
        values = {"paused": False, "paused_by": "", "paused_why": ""}
        return self._parts.store.targets.change(name, values)

    def delete(self, name: str, *, wait: bool = True) -> None:
        """Remove a target. Its tasks wait until there is one of that name again. Raises UnknownTarget."""
        self._parts.store.targets.delete(name)
        self._noticed(None, wait=wait)

    def _noticed(self, changed: Changed, *, wait: bool) -> Changed:
        """Return what was changed when senders know it: what follows from the return must be true."""
        if wait:
            time.sleep(NOTICED_SECONDS)
        return changed

    # --- which topics may use which

    def serves(self, name: str, topic: str) -> bool:
        """Whether a topic may use a target, by what was read last. Asks no server."""
        book = self._book  # ``forget`` may come at any time
        return book is not None and book.serves(name, topic)

    def check_usable(self, name: str, topic: str) -> None:
        """Raise InvalidTarget unless there is a target of this name that a topic may use.

        Asks the first database for one that was not there when it was read last, unless that is away.
        """
        if self.serves(name, topic):
            return
        store = self._parts.store
        if (book := self._book) is None:
            book = self._book = TargetBook(store.targets, self._parts.clock)
        if (away := store.away(0)) is None:
            book.run_once()
        if not book.serves(name, topic):
            raise away or book.error or InvalidTarget(no_target(name, topic), "target")

    def refresh(self) -> None:
        """Read the targets again if any task has named one. Follows each read of the topics; never raises."""
        if (book := self._book) is not None:
            book.run_once()

    def forget(self) -> None:
        """Forget what was read: the store is another one from now on."""
        self._book = None

    def reseal(self) -> Resealed:
        """Encrypt the secrets of all targets with the first key of TOC_SECRET_KEY. May be repeated."""
        return self._parts.store.targets.reseal()


def _limits(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return limits in the types of Target, which checks them. Raises InvalidTarget for an unknown name."""
    for name in given.keys() - LIMITS:
        raise InvalidTarget(f"{name} is not a limit of a target; there are {', '.join(sorted(LIMITS))}")
    limits = dict(given)
    for name, kind in (("topics", tuple), ("dead_on", frozenset)):
        if not isinstance(limits.get(name, ""), str):
            with suppress(TypeError):
                limits[name] = kind(limits[name])
    return limits
