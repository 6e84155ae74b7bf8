"""The table of webhook targets. Their secrets and headers are in it encrypted (toc.store.secretbox).

Each change gives a row another random change_id: it guards changes, and (number of rows, sum of change_ids)
tells whether anything has changed. ``settings`` is JSON: timeout, concurrency, rate, dead_on, topics,
header_names.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.errors import InvalidTarget, SecretsLocked, UnknownTarget, shown
from toc.model.target import Target, TargetSecrets
from toc.model.topic import NAME
from toc.observe.log import get_logger
from toc.store.secretbox import SecretBox
from toc.store.server import DatabaseServer, Lost, Param
from toc.store.unsharded_table import REPEATS, UnshardedTable

log = get_logger(__name__)

State = tuple[int, int]
"""The number of targets and the sum of their change_ids."""

Change = Callable[[Target, TargetSecrets | None], tuple[Target, TargetSecrets | None]]
"""Takes a target as it is, and returns it as it is to be.

It takes and returns the secrets as well if the caller of ``change`` asked for them.
"""

MOST_WHY = 255
_CHANGE_IDS = 2**48
"""Upper bound of change_ids: the sum over any table still fits into 64 bits."""


class Resealed(NamedTuple):
    """The result of a rotation of keys: targets encrypted anew, and targets that no key opens."""

    done: int
    locked: Sequence[str]


class TargetTable(UnshardedTable):
    """The targets. Any method raises StoreUnavailable or SchemaBehind."""

    def __init__(self, server: DatabaseServer, table: str, box: SecretBox, clock: Clock) -> None:
        super().__init__(server, table, clock)
        self._box = box

    def list(self) -> Sequence[Target]:
        """Return all targets, by name."""
        return self._select("ORDER BY name")

    def get(self, name: str) -> Target:
        """Return a target. Raises UnknownTarget."""
        found = self._select("WHERE name=%s", _possible(name))
        if not found:
            raise _unknown(name)
        return found[0]

    def check_usable(self, name: str, topic: str) -> None:
        """Raise UnknownTarget unless there is a target of this name that a topic may use.

        The error does not tell which: whoever may change a topic may not know of all targets.
        """
        found = self._select("WHERE name=%s", _possible(name))
        if not found or not found[0].serves(topic):
            raise UnknownTarget(no_target(name, topic))

    def open(self, target: Target) -> TargetSecrets:
        """Decrypt the secrets and headers of a target. Asks no server. Raises SecretsLocked."""
        values = parse_object(self._box.open(target.sealed, f"target {target.name!r}"))
        if values["name"] != target.name:  # copied from another row
            raise SecretsLocked(f"the secrets of target {target.name!r} are those of another target")
        return TargetSecrets(values["secret"], values["previous"], values["headers"])

    def create(self, target: Target, opened: TargetSecrets) -> Target:
        """Add a target and return it. Raises NameTaken and SecretsLocked."""
        now = self._clock.now_ms()
        target = self._sealed(replace(target, created=now), opened)
        names, placeholders, params = self._values(target, now, _new_change_id())
        insert = (
            f"INSERT INTO {self._table} (name,gmt_create,{','.join(names)}) "
            f"VALUES (%s,{self._server.instant(now)},{','.join(placeholders)})"
        )
        self._add(insert, [target.name, *params], f"there is a target {target.name!r} already; alter it")
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
        raise self._keeps_changing(f"target {name!r}")

    def pause(self, name: str, *, by: str, why: str, change_id: int | None = None) -> bool:
        """Send nothing more to a target until it is resumed. False: it was changed since ``change_id``.

        Without one, it is paused whatever it has become; pausing it again changes nothing. Raises
        UnknownTarget.
        """

        def paused(target: Target, _opened: TargetSecrets | None) -> tuple[Target, None]:
            return replace(target, paused=True, paused_by=by[:128], paused_why=why[:MOST_WHY]), None

        if change_id is None:
            self.change(name, lambda target, _: (target, None) if target.paused else paused(target, None))
            return True
        return self._replace(paused(self.get(name), None)[0], change_id)

    def delete(self, name: str) -> None:
        """Remove a target. Its tasks wait until there is one of that name again. Raises UnknownTarget."""
        if not self._write(f"DELETE FROM {self._table} WHERE name=%s", [_possible(name)]):
            raise _unknown(name)

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

    def state(self) -> State:
        """Return the State: another one means that a target has changed."""
        return self._state("change_id")

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
        new_id = _new_change_id()
        names, placeholders, params = self._values(target, self._clock.now_ms(), new_id)
        sets = ",".join(
            f"{name}={placeholder}" for name, placeholder in zip(names, placeholders, strict=True)
        )
        update = f"UPDATE {self._table} SET {sets} WHERE name=%s AND change_id={change_id:d}"
        lost: Lost | None = None
        for _ in range(2):  # not more: callers of other targets wait while a server hangs
            try:
                written = self._write(update, [*params, target.name]) == 1
            except Lost as exc:  # it may have been written; sent again, it changes nothing more
                lost = exc
                continue
            if written or lost is None or self.get(target.name).change_id == new_id:
                return written or lost is not None
            break
        assert lost is not None  # noqa: S101 - for the type checker
        raise lost

    def _values(
        self, target: Target, now: int, change_id: int
    ) -> tuple[Sequence[str], Sequence[str], Sequence[Param]]:
        """Return columns, the SQL of their values, and parameters for it."""
        settings = {
            "timeout": target.timeout,
            "concurrency": target.concurrency,
            "rate": target.rate,
            "dead_on": sorted(target.dead_on),
            "topics": target.topics,
            "header_names": target.header_names,
        }
        until = target.previous_until
        columns: dict[str, str | int | None] = {
            "url": target.url,
            "settings": json.dumps(settings),
            "paused": int(target.paused),
            "paused_by": target.paused_by,
            "paused_why": target.paused_why,
            "sealed": target.sealed,
            "change_id": change_id,
        }
        placeholders = ["%s" if isinstance(value, str) else f"{value:d}" for value in columns.values()]
        return (
            [*columns, "previous_until", "gmt_modified"],
            [
                *placeholders,
                "NULL" if until is None else self._server.instant(until),
                self._server.instant(now),
            ],
            [value for value in columns.values() if isinstance(value, str)],
        )

    def _select(self, rest: str, *params: str) -> Sequence[Target]:
        ms = self._server.milliseconds
        select = (
            f"SELECT name,url,settings,paused,paused_by,paused_why,{ms('previous_until')},{ms('gmt_create')},"
            f"{ms('gmt_modified')},change_id,sealed FROM {self._table} {rest}"
        )
        found = []
        for name, url, settings, *others in self._rows(select, params):
            try:
                values = parse_object(settings)
                limits = (values["timeout"], values["concurrency"], values["rate"])
                dead_on, topics = frozenset(values["dead_on"]), tuple(values["topics"])
                headers = tuple(values["header_names"])
                paused, *rest_of = others
                found.append(Target(name, url, *limits, dead_on, topics, headers, bool(paused), *rest_of))
            except (ValueError, TypeError, KeyError, InvalidTarget) as exc:
                # Of a later version, or edited by hand: its tasks wait here.
                if self._complains(name):
                    log.warning("target_not_understood", target=name, error=type(exc).__name__)
        return found


def _new_change_id() -> int:
    return 1 + secrets.randbelow(_CHANGE_IDS - 1)


def _possible(name: object) -> str:
    """Return a name that a target can have. MySQL takes a name with a trailing space for the same name."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _unknown(name)
    return name


def no_target(name: str, topic: str) -> str:
    """Return what a topic is told that names a target which is not there, or not for it."""
    return f"there is no target {shown(name)} that topic {topic!r} may use; `toc target list` shows all"


def _unknown(name: object) -> UnknownTarget:
    return UnknownTarget(f"there is no target {shown(name)}; `toc target list` shows all")
