"""Tells when callers' transactions have committed.

SQLAlchemy's event comes before the COMMIT is sent, but for the outermost transaction alone: not when a
savepoint is released, nor when a session ends that has joined a transaction. So the hook hands what it was
given to a thread, which waits until the transaction is over. Whether it was committed only the rows can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event

from toc.observe.log import get_logger
from toc.store.servers.threads import Threads

log = get_logger(__name__)

WAIT_SECONDS = 5.0
"""How long the thread waits for a COMMIT that hangs. After that, the sweep finds the rows."""
MAX_PAUSE_SECONDS = 0.02

W = TypeVar("W")


class AfterCommit(Generic[W]):
    """Calls ``tell`` on a thread of its own with what was done in a transaction that is over. Thread-safe."""

    def __init__(self, tell: Callable[[Sequence[W]], None]) -> None:
        self._tell = tell
        self._open: WeakKeyDictionary[Connection, _Open[W]] = WeakKeyDictionary()
        self._threads = Threads(2, "toc-commit")

    def add(self, connection: Connection, whats: Sequence[W]) -> Callable[[], bool]:
        """Note what was done in the transaction of a connection. Returns whether that is still open."""
        transaction = connection.get_transaction()
        one = self._open.get(connection)
        if one is None:
            one = self._open[connection] = _Open()
            event.listen(connection, "commit", partial(self._committing, one))
        if one.transaction is not transaction:  # the former was rolled back
            one.transaction, one.whats = transaction, []
        one.whats += whats
        return lambda: transaction is not None and transaction.is_active

    def close(self) -> None:
        """Wait for what is under way."""
        self._threads.close()

    def _committing(self, one: _Open[W], _connection: Connection) -> None:
        transaction, whats, one.transaction, one.whats = one.transaction, one.whats, None, []
        try:
            if whats:
                self._threads.run_detached(partial(self._wait, transaction, whats))
        except Exception as exc:  # such as: no thread can be started. The sweep finds the rows
            log.warning("commit_not_followed", tasks=len(whats), error=str(exc))

    def _wait(self, transaction: Any, whats: Sequence[W]) -> None:
        until, seconds = time.monotonic() + WAIT_SECONDS, 0.0005
        while transaction is not None and transaction.is_active:
            if time.monotonic() > until:
                return
            time.sleep(seconds)
            seconds = min(2 * seconds, MAX_PAUSE_SECONDS)
        self._tell(whats)


class _Open(Generic[W]):
    """What was done in the transaction of a connection that is open."""

    def __init__(self) -> None:
        self.transaction: Any = None
        self.whats: list[W] = []
