"""A process's view of the webhook targets, from which it sends."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from toc.model.clock import Clock
from toc.model.errors import TocError
from toc.model.target import REFRESH_SECONDS, Target, TargetSecrets
from toc.observe.log import get_logger
from toc.store.records.table import State
from toc.store.records.targets import TargetTable

log = get_logger(__name__)


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
        self._read_at = float("-inf")
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether the table has been read. Before, not even a missing target is known to be missing."""
        return self._state is not None

    def run_once(self) -> float:
        """Read the targets if any has changed. Returns the seconds until the next call; never raises."""
        began = self._clock.monotonic()
        self._read()
        return max(0.0, REFRESH_SECONDS - (self._clock.monotonic() - began))

    @property
    def fresh(self) -> bool:
        """Whether it was read within REFRESH_SECONDS."""
        return self._clock.monotonic() - self._read_at < REFRESH_SECONDS

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

    def _read(self) -> None:
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
                self.error, self._read_at = None, began
