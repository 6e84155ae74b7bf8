"""Retention of records: rows of the audit, and answers to named requests, are deleted when they are old.

The audit belongs to the worker that sweeps table 0; the answers in database N, which holds table N, to the
worker that sweeps that table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from toc.model.clock import Clock
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.observe.log import get_logger
from toc.store.rows import PURGED_TOGETHER
from toc.store.store import Store

log = get_logger(__name__)

KEEP_REQUESTS_MS = 86_400_000
EVERY_SECONDS = 600.0
MORE_SECONDS = 0.2
"""Pause between two deletes."""
LOOK_SECONDS = 5.0


class _Records(NamedTuple):
    """A kind of records. The worker that sweeps ``table`` purges them."""

    table: int
    keep_ms: int
    purge: Callable[[int], int]
    audit: bool = False


class RecordRetention:
    """The loop that deletes old records. ``tables`` returns this worker's tables. ``keep``: seconds
    for which rows of the audit are kept."""

    def __init__(
        self, store: Store, clock: Clock, tables: Callable[[], Collection[int]], *, keep: float
    ) -> None:
        self._clock = clock
        self._tables = tables
        audit = _Records(0, round(keep * 1000), store.audit.purge, audit=True)
        requests = [
            _Records(number, KEEP_REQUESTS_MS, partial(store.requests.purge, number))
            for number in range(store.requests.databases)
        ]
        self._due = dict.fromkeys([audit, *requests], float("-inf"))
        """When to look at each (monotonic)."""

    def run_once(self) -> float:
        """One delete. Returns the seconds until the next."""
        now, mine = self._clock.monotonic(), self._tables()
        records = next((each for each, at in self._due.items() if at <= now and each.table in mine), None)
        if records is None:
            return LOOK_SECONDS
        self._due[records] = now + EVERY_SECONDS
        try:
            deleted = records.purge(records.keep_ms)
        except (StoreUnavailable, SchemaBehind) as exc:
            if records.audit:
                log.warning("audit_not_purged", error=str(exc))
            else:
                log.warning("requests_not_purged", database=records.table, error=str(exc))
            return MORE_SECONDS
        if deleted and records.audit:
            log.info("audit_purged", rows=deleted)
        if deleted >= PURGED_TOGETHER:
            self._due[records] = now + MORE_SECONDS
        return MORE_SECONDS
