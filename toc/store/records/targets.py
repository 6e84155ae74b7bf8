"""The table of webhook targets. Their secrets and headers are in it encrypted (toc.store.records.secretbox).

Each change gives a row another random change_id: it guards changes, and (number of rows, sum of change_ids)
tells whether anything has changed. ``settings`` is JSON: timeout, concurrency, rate, dead_on, topics,
header_names.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import Table, update

from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.errors import SecretsLocked, UnknownTarget, shown
from toc.model.target import Target, TargetSecrets
from toc.model.topic import NAME
from toc.observe.log import get_logger
from toc.store.records.secretbox import SecretBox
from toc.store.records.table import REPEATS, NamedTable
from toc.store.servers.server import DatabaseServer

log = get_logger(__name__)

Change = Callable[[Target, TargetSecrets | None], tuple[Target, TargetSecrets | None]]
"""Takes a target as it is, and returns it as it is to be.

It takes and returns the secrets as well if the caller of ``change`` asked for them.
"""

MAX_WHY = 255
_SETTINGS = ("timeout", "concurrency", "rate", "dead_on", "topics", "header_names")
_SAME = ("name", "url", "paused_by", "paused_why", "previous_until", "change_id", "sealed")
"""Columns that are fields of a Target as they are."""
_CHANGE_IDS = 2**48
"""Upper bound of change_ids: the sum over any table still fits into 64 bits."""


class Resealed(NamedTuple):
    """The result of a rotation of keys: targets encrypted anew, and targets that no key opens."""

    done: int
    locked: Sequence[str]


class TargetTable(NamedTable[Target]):
    """The targets. Any method raises StoreUnavailable or SchemaBehind."""

    noun, names_fit, unknown, guard = "target", NAME, UnknownTarget, "change_id"

    def __init__(self, server: DatabaseServer, table: Table, box: SecretBox, clock: Clock) -> None:
        super().__init__(server, table, clock)
        self._box = box

    def get(self, name: str) -> Target:
        """Return a target. Raises UnknownTarget."""
        return self._find(name)[0]

    def check_usable(self, name: str, topic: str) -> None:
        """Raise UnknownTarget unless there is a target of this name that a topic may use.

        The error does not tell which: whoever may change a topic may not know of all targets.
        """
        with suppress(UnknownTarget):
            if self.get(name).serves(topic):
                return
        raise UnknownTarget(no_target(name, topic))

    def open(self, target: Target) -> TargetSecrets:
        """Decrypt the secrets and headers of a target. Asks no server. Raises SecretsLocked."""
        values = parse_object(self._box.open(target.sealed, f"target {target.name!r}"))
        if values["name"] != target.name:  # copied from another row
            raise SecretsLocked(f"the secrets of target {target.name!r} are those of another target")
        return TargetSecrets(values["secret"], values["previous"], values["headers"])

    def create(self, target: Target, opened: TargetSecrets) -> Target:
        """Add a target and return it. Raises NameTaken and SecretsLocked."""
        values = self._values(self._sealed(target, opened))
        self._add(
            f"there is a target {target.name!r} already; alter it",
            **values,
            name=target.name,
            gmt_create=values["gmt_modified"],
        )
        return self.get(target.name)

    def change(self, name: str, change: Change, *, with_secrets: bool = False) -> Target:
        """Change a target and return it. Raises UnknownTarget, and SecretsLocked if ``with_secrets``."""
        for _ in range(REPEATS):
            target = self.get(name)
            changed, opened = change(target, self.open(target) if with_secrets else None)
            if changed == target and not with_secrets:
                return target
            if opened is not None:
                changed = self._sealed(changed, opened)
            if self._replace(changed, target.change_id):
                return self.get(name)
        raise self._keeps_changing(name)

    def pause(self, name: str, *, by: str, why: str, change_id: int | None = None) -> bool:
        """Send nothing more to a target until it is resumed. False: it was changed since ``change_id``.

        Without one, it is paused whatever it has become; pausing it again changes nothing. Raises
        UnknownTarget.
        """

        def paused(target: Target) -> Target:
            return replace(target, paused=True, paused_by=by[:128], paused_why=why[:MAX_WHY])

        if change_id is not None:
            return self._replace(paused(self.get(name)), change_id)
        self.change(name, lambda target, _: (target if target.paused else paused(target), None))
        return True

    def delete(self, name: str) -> None:
        """Remove a target. Its tasks wait until there is one of that name again. Raises UnknownTarget."""
        self._delete(name)

    def reseal(self) -> Resealed:
        """Encrypt the secrets of all targets with the first key. May be repeated. Raises SecretsLocked."""
        self._box.seal("")  # raises if there is no key at all
        done, locked = 0, []
        for target in self.list():
            try:
                self.change(target.name, lambda target, opened: (target, opened), with_secrets=True)
                done += 1
            except UnknownTarget:  # deleted meanwhile
                continue
            except SecretsLocked:
                locked.append(target.name)
        return Resealed(done, locked)

    def _sealed(self, target: Target, opened: TargetSecrets) -> Target:
        values = {
            "name": target.name,
            "secret": opened.secret,
            "previous": opened.previous,
            "headers": dict(opened.headers),
        }
        return replace(target, sealed=self._box.seal(json.dumps(values)), header_names=tuple(opened.headers))

    def _replace(self, target: Target, change_id: int) -> bool:
        """Write a target over the one with this change_id. False if there is none any more."""
        values = self._values(target)
        change = update(self._table).where(self._at(target.name, change_id)).values(values)
        changed = self._server.run([self._compiled(change)])[0].matched == 1
        # Sent again after its reply was lost, it changes nothing more.
        return changed or self.get(target.name).change_id == values["change_id"]

    def _values(self, target: Target) -> dict[str, Any]:
        """Return the columns of a target that change, with a new change_id."""
        settings = {name: getattr(target, name) for name in _SETTINGS}
        return {
            "url": target.url,
            "settings": json.dumps(settings | {"dead_on": sorted(target.dead_on)}),
            "paused": target.paused,
            "paused_by": target.paused_by,
            "paused_why": target.paused_why,
            "sealed": target.sealed,
            "change_id": 1 + secrets.randbelow(_CHANGE_IDS - 1),
            "previous_until": target.previous_until,
            "gmt_modified": self._clock.now_ms(),
        }

    def _parse(self, row: Mapping[str, Any]) -> Target:
        settings = parse_object(row["settings"])
        same = {name: settings[name] for name in ("timeout", "concurrency", "rate")}
        same |= {name: row[name] for name in _SAME}
        return Target(
            **same,
            dead_on=frozenset(settings["dead_on"]),
            topics=tuple(settings["topics"]),
            header_names=tuple(settings["header_names"]),
            paused=bool(row["paused"]),
            created=row["gmt_create"],
            modified=row["gmt_modified"],
        )

    def _complain(self, name: str, exc: Exception) -> None:
        log.warning("target_not_understood", target=name, error=type(exc).__name__)  # its tasks wait


def no_target(name: str, topic: str) -> str:
    """Return what a topic is told that names a target which is not there, or not for it."""
    return f"there is no target {shown(name)} that topic {topic!r} may use; `toc target list` shows all"
