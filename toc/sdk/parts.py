"""What a center works with: its settings, and connections that are opened at their first use.

In tests of applications all centers of the process have a stand-in's instead.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cached_property, partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import TypedDict

from toc.index.nodes import Timeouts
from toc.index.queues import NoIndex, Queues
from toc.model.catalog import TopicCatalog
from toc.model.clock import Clock
from toc.model.errors import ConfigError, StoreUnavailable
from toc.model.fork import in_each_process
from toc.model.topic import Topic
from toc.observe.tracing import Tracing
from toc.sdk.submission import RowMaker
from toc.sdk.targets import Targets
from toc.store.records.topics import TopicTable
from toc.store.store import Store

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from toc.config import Settings
    from toc.sdk.changes import InTransaction

    AnySession = Session | AsyncSession
    AnyConnection = Connection | AsyncConnection


class Within(TypedDict, total=False):
    """The caller's transaction in which a call works, given by one of these."""

    session: AnySession | None
    connection: AnyConnection | None


class StandIn(NamedTuple):
    """Parts that all centers of this process use in place of their own."""

    settings: Settings
    clock: Clock
    store: Store
    queues: Queues
    catalog: TopicCatalog
    intake: RowMaker
    in_transaction: Callable[[AnySession | None, AnyConnection | None], InTransaction]


class Parts:
    """The settings, servers and topics of one center. Thread-safe and fork-safe."""

    def __init__(self, settings: Settings | None, clock: Clock | None) -> None:
        if settings is not None:
            self.settings = settings
        self._given = settings, clock or Clock()
        self.clock = self._given[1]
        self.stands_in: StandIn | None = None
        self.targets = Targets(self)
        """Receivers of webhooks."""
        self._store: Store | None = None
        self._queues: Queues | None = None
        self._catalog: TopicCatalog | None = None
        self._layout_checked = False
        in_each_process(self._new_lock)

    def _new_lock(self) -> None:
        self._lock = threading.RLock()
        self.targets.forget()

    def use(self, parts: StandIn | None) -> None:
        """Use these parts from now on. None: its own."""
        Parts.close(self)
        self.stands_in = parts
        self._store, self._queues, self._catalog = (
            (None, None, None) if parts is None else (parts.store, parts.queues, parts.catalog)
        )
        settings, self.clock = self._given if parts is None else (parts.settings, parts.clock)
        for name in ("settings", "tracing", "_intake"):
            vars(self).pop(name, None)  # these are made at the first use
        if settings is not None:
            self.settings = settings

    @cached_property
    def settings(self) -> Settings:
        """The settings. Raises ConfigError, which names each that is wrong."""
        from toc.config import Settings  # what is given its settings, or reads none, need not load it

        return Settings()

    @cached_property
    def tracing(self) -> Tracing | None:
        """What writes spans. None if TOC_TRACES is 0: then OpenTelemetry need not be installed."""
        share = self.settings.traces
        return Tracing(share) if share > 0 else None

    @cached_property
    def _intake(self) -> RowMaker:
        if self.stands_in is not None:
            return self.stands_in.intake
        settings = self.settings
        return RowMaker(self.clock, settings.max_delay, settings.max_body, settings.allow)

    @property
    def store(self) -> Store:
        """The task table. Raises ConfigError when no database is configured."""
        check_running()
        if (store := self._store) is None:
            with self._lock:
                if (store := self._store) is None:
                    settings = self.settings
                    store = self._store = Store(
                        settings.need_database_urls(),
                        databases=settings.databases,
                        tables=settings.tables,
                        prefix=settings.database_prefix,
                        clock=self.clock,
                        connect_timeout=settings.connect_timeout,
                        read_timeout=settings.read_timeout,
                        write_timeout=settings.write_timeout,
                        secret_keys=[key.get_secret_value() for key in settings.secret_key],
                        indexed=settings.redis_url is not None,
                    )
        return store

    @property
    def queues(self) -> Queues:
        """The index. Raises ConfigError when no Redis is configured although the task table is indexed."""
        if (queues := self._queues) is None:
            with self._lock:
                if (queues := self._queues) is None:
                    if self.settings.redis_url is None and self.store.identity.indexed():
                        raise ConfigError(
                            f"the tasks on {self.store.identity.place} are indexed in Redis, and "
                            "TOC_REDIS_URL is not set: set it, or stop workers and gateways and run "
                            "`toc index off`"
                        )
                    queues = self._queues = open_queues(self.settings)
        return queues

    @property
    def catalog(self) -> TopicCatalog:
        """This process's view of the topics, with the horizons in force. The targets that tasks name are
        read with them. Raises ConfigError when no database is configured."""
        check_running()
        if (catalog := self._catalog) is None:
            with self._lock:
                if (catalog := self._catalog) is None:
                    read = partial(self._read_topics, self.store.topics)
                    catalog = self._catalog = TopicCatalog(read, self.clock)
        return catalog

    def _read_topics(self, table: TopicTable) -> list[Topic]:
        topics = table.in_force()
        self.targets.refresh()
        return topics

    def close(self) -> None:
        """Close every connection. May be called twice; the next use connects again."""
        with self._lock:
            if self.stands_in is None:
                if self._store is not None:
                    self._store.close()
                if self._queues is not None:
                    self._queues.close()
                self._store = self._queues = self._catalog = None
            self.targets.forget()

    def _check_places(self) -> None:
        """Raise on a bad URL of either server, or on a wrong layout, before anything is written."""
        _ = self.store, self.queues
        self._check_layout()

    def _check_layout(self) -> None:
        """Raise SchemaBehind before a row is written or read in a table that no worker reads."""
        if not self._layout_checked:
            self.store.check_layout()
            self._layout_checked = True


def check_running() -> None:
    """Raise StoreUnavailable at the interpreter's end, as in a ``__del__``: a call would wait for threads
    that have ended."""
    if sys.is_finalizing():
        raise StoreUnavailable("the interpreter is ending: call before the main program ends")


def open_queues(settings: Settings, most: float = inf) -> Queues:
    """Return the index with connections of its own; without a URL there is none. No time-out exceeds ``most``
    seconds."""
    if settings.redis_url is None:
        return NoIndex()
    connect, read = min(most, settings.connect_timeout), min(most, settings.read_timeout)
    timeouts = Timeouts(connect, read)
    return Queues(settings.redis_url, namespace=settings.namespace, timeouts=timeouts)
