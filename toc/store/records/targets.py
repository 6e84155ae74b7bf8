"""The table of webhook targets, and a process's view of it, from which it sends.

Secrets and headers are in it encrypted, with Fernet: AES-128 in CBC mode, and an HMAC. This is the only
importer of cryptography.

Each change gives a row another random change_id: it guards changes, and (number of rows, sum of change_ids)
tells whether anything has changed. ``settings`` is JSON: timeout, concurrency, rate, dead_on, topics,
header_names.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import update

from toc.model.clock import Clock
from toc.model.documents import parse_object
from toc.model.errors import NotInstalled, SecretsLocked, TocError, UnknownTarget, shown
from toc.model.target import REFRESH_SECONDS, Target, TargetSecrets
from toc.model.topic import NAME
from toc.observe.log import get_logger
from toc.store.records.table import REPEATS, NamedTable, State
from toc.store.servers.shards import Shards

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

log = get_logger(__name__)

Change = Callable[[TargetSecrets], TargetSecrets]
"""Returns what becomes of a target's secrets."""
MAX_WHY = 255
_SETTINGS = ("timeout", "concurrency", "rate", "dead_on", "topics", "header_names")
_SAME = {"name", "url", "paused", "paused_by", "paused_why", "previous_until", "change_id", "sealed"}
"""Columns that are fields of a Target as they are."""
_CHANGE_IDS = 2**48
"""Upper bound of change_ids: the sum over any table still fits into 64 bits."""


class SecretBox:
    """Seals and opens texts by the keys of TOC_SECRET_KEY. Any method raises SecretsLocked without a key, and
    NotInstalled."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(keys)
        self._made: MultiFernet | None = None

    def seal(self, text: str) -> str:
        """Encrypt with the first key."""
        return self._keyring().encrypt(text.encode()).decode()

    def open(self, sealed: str, whose: str) -> str:
        """Decrypt with whichever key fits. ``whose`` is named in an error. Raises SecretsLocked."""
        keyring = self._keyring()
        try:
            return keyring.decrypt(sealed.encode()).decode()
        except (_fernet().InvalidToken, ValueError) as exc:
            raise SecretsLocked(
                f"the secrets of {whose} cannot be read: no key of TOC_SECRET_KEY encrypted them; add the "
                f"key that did, behind the others"
            ) from exc

    def _keyring(self) -> MultiFernet:
        if self._made is None:
            if not self._keys:
                raise SecretsLocked(
                    "the secrets of webhook targets need TOC_SECRET_KEY: `toc secrets key` prints a new one; "
                    "every host that sends webhooks or changes targets needs the same key"
                )
            fernet = _fernet()
            self._made = fernet.MultiFernet([fernet.Fernet(key) for key in self._keys])
        return self._made


def new_key() -> str:
    """Return a new key for TOC_SECRET_KEY. Raises NotInstalled."""
    return str(_fernet().Fernet.generate_key().decode())


def _fernet() -> Any:
    """The module, which only some programs load."""
    try:
        import cryptography.fernet as fernet
    except ImportError as exc:
        raise NotInstalled("the secrets of targets need cryptography", "webhooks") from exc
    return fernet


class Resealed(NamedTuple):
    """The result of a rotation of keys: targets encrypted anew, and targets that no key opens or whose rows
    cannot be understood."""

    done: int
    locked: Sequence[str]


class TargetTable(NamedTable[Target]):
    """The targets. Any method raises StoreUnavailable or SchemaBehind."""

    in_schema, noun, names_fit, unknown = "timeout_target", "target", NAME, UnknownTarget
    guard = "change_id"

    def __init__(self, shards: Shards, box: SecretBox, clock: Clock) -> None:
        super().__init__(shards, clock)
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
        taken = f"there is a target {target.name!r} already; alter it"
        self._add(taken, **values, name=target.name, gmt_create=values["gmt_modified"])
        return self.get(target.name)

    def change(self, name: str, values: Mapping[str, Any], secrets: Change | None = None) -> Target:
        """Give a target other values, and what ``secrets`` makes of its secrets. Returns it.

        Raises UnknownTarget, and with ``secrets`` SecretsLocked.
        """
        for _ in range(REPEATS):
            target = self.get(name)
            changed = replace(target, **values)
            if changed == target and secrets is None:
                return target
            if secrets is not None:
                changed = self._sealed(changed, secrets(self.open(target)))
            if self._replace(changed, target.change_id):
                return self.get(name)
        raise self._keeps_changing(name)

    def pause(self, name: str, *, by: str, why: str, change_id: int | None = None) -> bool:
        """Send nothing more to a target until it is resumed. False: it was changed since ``change_id``.

        Without one, it is paused whatever it has become; pausing it again changes nothing. Raises
        UnknownTarget.
        """
        values: dict[str, Any] = {"paused": True, "paused_by": by[:128], "paused_why": why[:MAX_WHY]}
        target = self.get(name)
        if change_id is not None:
            return self._replace(replace(target, **values), change_id)
        if not target.paused:
            self.change(name, values)
        return True

    def delete(self, name: str) -> None:
        """Remove a target. Its tasks wait until there is one of that name again. Raises UnknownTarget."""
        self._delete(name)

    def reseal(self) -> Resealed:
        """Encrypt the secrets of all targets with the first key. May be repeated. Raises SecretsLocked."""
        self._box.seal("")  # raises if there is no key at all
        done, locked = 0, [*self.damaged()]
        for target in self.list():
            try:
                self.change(target.name, {}, lambda opened: opened)
                done += 1
            except UnknownTarget:  # deleted meanwhile
                continue
            except SecretsLocked:
                locked.append(target.name)
        return Resealed(done, sorted(locked))

    def _sealed(self, target: Target, opened: TargetSecrets) -> Target:
        values = {"secret": opened.secret, "previous": opened.previous, "headers": dict(opened.headers)}
        sealed = self._box.seal(json.dumps({"name": target.name, **values}))
        return replace(target, sealed=sealed, header_names=tuple(opened.headers))

    def _replace(self, target: Target, change_id: int) -> bool:
        """Write a target over the one with this change_id. False if there is none any more."""
        values = self._values(target)
        change = update(self._table).where(self._at(target.name, change_id)).values(values)
        changed = self._server.run([self._compiled(change)])[0].matched == 1
        # Sent again after its reply was lost, it changes nothing more.
        return changed or self.get(target.name).change_id == values["change_id"]

    def _values(self, target: Target) -> dict[str, Any]:
        """Return the columns of a target that change, with a new change_id."""
        values = {name: getattr(target, name) for name in _SAME - {"name"}}
        settings = {name: getattr(target, name) for name in _SETTINGS}
        values["settings"] = json.dumps(settings | {"dead_on": sorted(target.dead_on)})
        change_id = 1 + secrets.randbelow(_CHANGE_IDS - 1)
        return values | {"change_id": change_id, "gmt_modified": self._clock.now_ms()}

    def _parse(self, row: Mapping[str, Any]) -> Target:
        settings = parse_object(row["settings"])
        values = {name: settings[name] for name in _SETTINGS} | {name: row[name] for name in _SAME}
        values |= {"dead_on": frozenset(settings["dead_on"]), "paused": bool(row["paused"])}
        values |= {name: tuple(settings[name]) for name in ("topics", "header_names")}
        return Target(**values, created=row["gmt_create"], modified=row["gmt_modified"])


def no_target(name: str, topic: str) -> str:
    """Return what a topic is told that names a target which is not there, or not for it."""
    return f"there is no target {shown(name)} that topic {topic!r} may use; `toc target list` shows all"


class TargetBook:
    """Targets by name. Thread-safe.

    Call ``run_once`` on a thread of its own, again after the seconds that it returns. While the first
    database is away, what was read last holds.
    """

    def __init__(self, table: TargetTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._targets: Mapping[str, Target] = {}
        """Replaced, never changed in place."""
        self._state: State | None = None
        self._opened: dict[int, TargetSecrets] = {}
        """Decrypted secrets by change_id, of targets that were sent to."""
        self.error: TocError | None = None
        """Why the last read failed."""
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether the table has been read. Before, not even a missing target is known to be missing."""
        return self._state is not None

    def run_once(self) -> float:
        """Read the targets if any has changed. Returns the seconds until the next call; never raises."""
        with self._lock:
            began = self._clock.monotonic()
            try:
                state = self._table.state()  # first: a change in between is then read once more
                if state != self._state:
                    self._targets = {target.name: target for target in self._table.list()}
                    self._state = state
                    current = {target.change_id for target in self._targets.values()}
                    opened = list(self._opened.items())  # a copy: ``secrets`` adds to it at any time
                    self._opened = {key: each for key, each in opened if key in current}
            except TocError as exc:
                if self.error is None:
                    log.warning("targets_not_read", error=str(exc))
                self.error = exc
            else:
                self.error = None
        return max(0.0, REFRESH_SECONDS - (self._clock.monotonic() - began))

    def serves(self, name: str, topic: str) -> bool:
        """Whether, as last read, there is a target of this name that a topic may use. Asks no server."""
        target = self._targets.get(name)
        return target is not None and target.serves(topic)

    def known(self, name: str) -> Target | None:
        """Return a target as last read, or None. Asks no server."""
        return self._targets.get(name)

    def secrets(self, target: Target) -> TargetSecrets:
        """Return the secrets and headers of a target. Asks no server. Raises SecretsLocked."""
        opened = self._opened.get(target.change_id)
        if opened is None:
            opened = self._opened[target.change_id] = self._table.open(target)
        return opened
