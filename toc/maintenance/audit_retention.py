"""Retention of the audit: the worker that sweeps table 0 deletes what is older than TOC_AUDIT_RETENTION."""

from __future__ import annotations

from collections.abc import Iterable

from toc.model.clock import Clock
from toc.model.errors import StoreUnavailable
from toc.observe.log import get_logger
from toc.store.audit import PURGED_TOGETHER
from toc.store.store import Store

log = get_logger(__name__)

EVERY_SECONDS = 600.0
PAUSE_SECONDS = 1.0
LOOK_SECONDS = 60.0
"""Between two deletes while there is more."""


class AuditRetention:
    """The loop that deletes. ``keep`` is in seconds. Idle unless table 0 is this worker's."""

    def __init__(self, store: Store, clock: Clock, keep: float) -> None:
        self._store = store
        self._clock = clock
        self._keep_ms = round(keep * 1000)
        self._mine = False
        self._next_at = float("-inf")

    def add(self, tables: Iterable[int]) -> None:
        """Note that these tables are this worker's from now on."""
        self._mine = self._mine or 0 in tables

    def remove(self, tables: Iterable[int]) -> None:
        """Note that another worker has these tables."""
        self._mine = self._mine and 0 not in tables

    def run_once(self) -> float:
        """One step. Returns the seconds until the next."""
        now = self._clock.monotonic()
        if not self._mine or now < self._next_at:
            return LOOK_SECONDS
        self._next_at = now + EVERY_SECONDS
        try:
            deleted = self._store.audit.purge(self._clock.now_ms() - self._keep_ms)
        except StoreUnavailable as exc:
            log.warning("audit_not_purged", error=str(exc))
            return PAUSE_SECONDS
        if deleted:
            log.info("audit_purged", rows=deleted)
        if deleted >= PURGED_TOGETHER:
            self._next_at = now
        return PAUSE_SECONDS
