"""One ZooKeeper session.

kazoo's threads only set flags. One thread of ours makes every call; calls are pipelined, and return within
the session timeout or raise CoordinationUnavailable. A request may still be executed after that: in the same
session, in the order of sending, and before any later request.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

# kazoo has no type information
from kazoo import exceptions as kazoo_errors  # type: ignore[import-untyped]
from kazoo.client import KazooClient  # type: ignore[import-untyped]
from kazoo.handlers.threading import (  # type: ignore[import-untyped]
    KazooTimeoutError,
    SequentialThreadingHandler,
)
from kazoo.protocol.states import EventType, KazooState, KeeperState  # type: ignore[import-untyped]
from kazoo.retry import KazooRetry  # type: ignore[import-untyped]
from kazoo.security import CREATOR_ALL_ACL, Permissions  # type: ignore[import-untyped]

from toc.coordination.address import Address
from toc.model.errors import CoordinationUnavailable
from toc.observe.log import get_logger

log = get_logger(__name__)

Watch = Callable[[Any], None]
DELETED: str = EventType.DELETED
"""The ``type`` of a watch's event when the node or the directory itself is gone."""

_IN_FLIGHT = 500  # requests at once; kazoo keeps them and their replies in memory
_REACH_SECONDS = 2.0  # for one host; a silent one must leave time for the others
_ANY_STATE_SECONDS = 1.5
"""For this long only a server is used that has all the state that we have seen, after that any
server. A server refuses a client that has seen newer state than its own. If all servers have lost
their disks, they would refuse us for ever."""
_EXPECTED = (
    kazoo_errors.NoNodeError,
    kazoo_errors.NodeExistsError,
    kazoo_errors.BadVersionError,
    kazoo_errors.RolledBackError,
    kazoo_errors.RuntimeInconsistency,
)


class Znode(NamedTuple):
    """A node as read. ``session`` is the owner's session of an ephemeral node, 0 for others."""

    data: bytes
    version: int
    session: int
    created_ms: int


class Directory(NamedTuple):
    """The state of a directory. ``made`` changes when it is deleted and made anew, ``changes`` when a node is
    made or deleted in it."""

    made: tuple[int, int]
    changes: int


class Session:
    """A ZooKeeper session; when it ends, another one begins. For one thread.

    ``on_event`` is called on a kazoo thread whenever the connection is lost or made; it must not block.
    Durations are seconds.
    """

    def __init__(
        self,
        address: Address,
        on_event: Callable[[], None],
        *,
        connect_timeout: float = 10.0,
        session_timeout: float = 6.0,
    ) -> None:
        self.address = address
        self._on_event = on_event
        self._connect_timeout = connect_timeout
        self._session_timeout = session_timeout
        self._problems = _Problems()
        self._client: KazooClient | None = None
        self._away_since: float | None = None
        self._seen = 0
        """The newest state (zxid) that this session has seen, if it has read any yet."""

    def start(self) -> None:
        """Connect. Raises CoordinationUnavailable if that does not succeed within the connect timeout."""
        self._client = self._make_client()
        if not self._client.start_async().wait(self._connect_timeout):
            cause = self._problems.last or "no error reported"
            self.stop()
            raise CoordinationUnavailable(
                f"ZooKeeper at {self.address.hosts} did not answer within {self._connect_timeout:g} s "
                f"({cause}): check that it runs, that TOC_ZOOKEEPER is right, "
                f"and that the port is open from here"
            )

    def stop(self) -> None:
        """End the session, so that its ephemeral nodes vanish at once. May be called twice, or without
        start."""
        client, self._client = self._client, None
        if client is not None:
            client.remove_listener(self._state_changed)  # an intended end is not reported
            client.stop()
            client.close()

    def revive(self) -> None:
        """Let the client connect again in cases in which kazoo alone never would.

        kazoo gives up when authentication fails or its thread has died. It also never connects to
        an ensemble that has lost its state, or to a new ensemble in its place.
        """
        client, away = self._client, self._away_since
        if client is None:
            return
        if client.client_state == KeeperState.CLOSED:
            log.warning("zookeeper_client_renewed", reason=self._problems.last)
            self.renew()
        elif away is not None and time.monotonic() - away > _ANY_STATE_SECONDS:
            # A server that knows our session continues it; another one tells us that it has ended.
            self._seen = max(self._seen, client.last_zxid)
            client.last_zxid = 0

    @property
    def behind(self) -> bool:
        """Whether the last answer had an older state than this session has seen, as from a restored disk or
        a server that lags behind."""
        return self._client is not None and self._client.last_zxid < self._seen

    def renew(self) -> None:
        """End the session, with all its nodes, and begin another one."""
        # The client is not reused: one that ended by itself has queued a close request for its next session.
        self.stop()
        self._seen = 0
        self._client = self._make_client()
        self._client.start_async()

    @property
    def id(self) -> int | None:
        """The session's id; None without a connection."""
        client = self._client
        identity = client.client_id if client is not None else None
        return identity[0] if identity is not None else None

    # --- requests ---

    def make_directories(self, paths: Iterable[str]) -> None:
        """Create persistent nodes without data, with their parents."""
        self._all(methodcaller("ensure_path_async", path) for path in paths)

    def create(self, nodes: Iterable[tuple[str, bytes]], *, ephemeral: bool) -> list[bool]:
        """Create nodes. Returns False for each that exists already."""
        results = self._all(
            methodcaller("create_async", path, data, ephemeral=ephemeral) for path, data in nodes
        )
        return [not isinstance(result, kazoo_errors.NodeExistsError) for result in results]

    def create_sequential(self, prefix: str, data: bytes) -> None:
        """Create an ephemeral node named ``prefix`` and the next number of its directory."""
        self._all([methodcaller("create_async", prefix, data, ephemeral=True, sequence=True)])

    def take_over(self, nodes: Iterable[tuple[str, bytes, int]]) -> list[bool]:
        """Make ephemeral nodes of ours in place of others: (path, data, version of the other). False for each
        that is gone or has another version."""
        results = self._all(_anew(path, data, version, ephemeral=True) for path, data, version in nodes)
        return list(map(_committed, results))

    def delete(self, paths: Iterable[str]) -> None:
        """Delete nodes. Ignores those that are gone."""
        self._all(methodcaller("delete_async", path) for path in paths)

    def read(self, paths: Iterable[str], watch: Watch | None = None) -> list[Znode | None]:
        """Read nodes; None for those that are gone. ``watch`` is called once for each node that changes."""
        results = self._all(methodcaller("get_async", path, watch) for path in paths)
        return [None if isinstance(result, Exception) else _node(*result) for result in results]

    def directories(self, paths: Iterable[str]) -> list[Directory | None]:
        """Return the state of directories; None for those that are gone."""
        results = self._all(methodcaller("exists_async", path) for path in paths)
        return [stat and Directory((stat.czxid, stat.ctime), stat.cversion) for stat in results]

    def children(self, path: str, watch: Watch | None = None) -> list[str]:
        """Return the names in a directory, sorted; [] if it does not exist (then nothing is watched)."""
        [result] = self._all([methodcaller("get_children_async", path, watch)])
        return [] if isinstance(result, Exception) else sorted(result)

    def nodes(self, directory: str, watch: Watch | None = None) -> dict[str, Znode]:
        """Return the nodes in a directory, by name, sorted; ``watch`` is called at the next change."""
        names = self.children(directory, watch)
        found = self.read(f"{directory}/{name}" for name in names)
        return {name: node for name, node in zip(names, found, strict=True) if node}

    def open_to_all(self, paths: Iterable[str]) -> list[str]:
        """Return those nodes that any client may change."""
        asked = list(paths)
        results = self._all(methodcaller("get_acls_async", path) for path in asked)
        return [
            path
            for path, result in zip(asked, results, strict=True)
            if not isinstance(result, Exception)
            and any(acl.id.scheme == "world" and acl.perms & ~Permissions.READ for acl in result[0])
        ]

    def replace(self, path: str, data: bytes, *, ephemeral: bool = False) -> None:
        """Create a node. One that exists is deleted in the same transaction, so that a watch on its directory
        always fires. Raises CoordinationUnavailable also if the directory is gone."""
        while True:
            [there] = self.read([path])
            [result] = self._all([_anew(path, data, there.version if there else None, ephemeral=ephemeral)])
            if _committed(result):
                return
            if there is None and isinstance(result[-1], kazoo_errors.NoNodeError):
                raise CoordinationUnavailable(
                    f"ZooKeeper at {self.address.hosts} lost the directory of {path}: "
                    f"the daemons make it again"
                )

    def write_guarded(self, guard: str, changes: Sequence[tuple[str, bytes | None, int]]) -> list[int | None]:
        """Write nodes, each only while ``guard`` exists and the node has the version given (-1: none yet).

        Data None deletes the node. Returns the new versions, None where nothing was written.
        """

        def change(path: str, data: bytes | None, version: int) -> Callable[[Any], Any]:
            def commit(client: Any) -> Any:
                transaction = client.transaction()
                transaction.check(guard, -1)
                if data is None:
                    transaction.delete(path, version)
                elif version < 0:
                    transaction.create(path, data)
                else:
                    transaction.set_data(path, data, version)
                return transaction.commit_async()

            return commit

        results = self._all(change(*each) for each in changes)
        return [
            version + 1 if _committed(result) else None
            for result, (_, _, version) in zip(results, changes, strict=True)
        ]

    # --- plumbing ---

    def _all(self, requests: Iterable[Callable[[Any], Any]]) -> list[Any]:
        """Send requests without waiting in between. Returns their results or expected errors in order."""
        client = self._client
        if client is None or not client.connected:  # kazoo would queue them until it reconnects
            raise CoordinationUnavailable(f"there is no connection to ZooKeeper at {self.address.hosts}")
        results: list[Any] = []
        waiting: deque[Any] = deque()
        for request in requests:
            if len(waiting) == _IN_FLIGHT:
                results.append(self._outcome(waiting.popleft()))
            waiting.append(request(client))
        results.extend(self._outcome(result) for result in waiting)
        return results

    def _outcome(self, result: Any) -> Any:
        try:
            answer = result.get(timeout=self._session_timeout)
            for part in answer if isinstance(answer, list) else []:  # a transaction never raises
                if isinstance(part, kazoo_errors.KazooException) and not isinstance(part, _EXPECTED):
                    raise part
        except _EXPECTED as exc:
            return exc
        except KazooTimeoutError as exc:
            raise CoordinationUnavailable(
                f"ZooKeeper at {self.address.hosts} did not answer within {self._session_timeout:g} s"
            ) from exc
        except kazoo_errors.KazooException as exc:
            raise CoordinationUnavailable(
                f"ZooKeeper at {self.address.hosts} refused the request or lost the connection: "
                f"{type(exc).__name__}"
            ) from exc
        return answer

    def _make_client(self) -> KazooClient:
        address = self.address
        client = KazooClient(
            address.hosts,
            timeout=self._session_timeout,
            handler=_Handler(),
            # kazoo's own policy waits up to an hour between two attempts
            connection_retry=KazooRetry(max_tries=-1, delay=0.1, max_delay=0.5),
            auth_data=[("digest", address.credential)] if address.credential else None,
            default_acl=CREATOR_ALL_ACL if address.credential else None,
            logger=self._problems.logger,
            use_ssl=address.tls,
            ca=address.ca,
            certfile=address.cert,
            keyfile=address.key or address.cert,
            check_hostname=True,
        )
        client.add_listener(self._state_changed)
        return client

    def _state_changed(self, state: Any) -> None:
        self._away_since = None if state == KazooState.CONNECTED else time.monotonic()
        if state == KazooState.SUSPENDED:
            log.warning("zookeeper_suspended", hosts=self.address.hosts, reason=self._problems.last)
        elif state == KazooState.LOST:
            self._seen = 0
            log.warning("zookeeper_session_ended", hosts=self.address.hosts)
        else:
            log.info("zookeeper_connected", hosts=self.address.hosts)
        self._on_event()


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """Tries the next host soon when one is silent, such as a machine without power.

    kazoo would wait for a silent host up to the session timeout. Meanwhile our session would end,
    or an operator's command would give up.
    """

    def create_connection(self, *args: Any, **options: Any) -> Any:
        """Return a connected socket. Raises kazoo's timeout exception."""
        options["timeout"] = min(options["timeout"], _REACH_SECONDS)
        return super().create_connection(*args, **options)


class _Problems(logging.Handler):
    """Handles kazoo's log lines: keeps the last problem for our messages and logs its errors.

    kazoo prints credentials at DEBUG and a line a second while it cannot connect; both are dropped.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        self.logger = logging.Logger("kazoo", logging.WARNING)  # noqa: LOG001 - one per session, known to nobody
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Handle a record; called by logging."""
        self.last = record.getMessage()
        if record.levelno >= logging.ERROR:
            log.error("zookeeper_client_error", message=self.last, exc_info=record.exc_info)


def _anew(path: str, data: bytes, version: int | None, *, ephemeral: bool) -> Callable[[Any], Any]:
    """Return the request that creates a node, in place of that of this version if one is given."""

    def commit(client: Any) -> Any:
        transaction = client.transaction()
        if version is not None:
            transaction.delete(path, version)
        transaction.create(path, data, ephemeral=ephemeral)
        return transaction.commit_async()

    return commit


def _committed(result: Any) -> bool:
    return not isinstance(result, Exception) and not any(isinstance(part, Exception) for part in result)


def _node(data: bytes, stat: Any) -> Znode:
    return Znode(data, stat.version, stat.ephemeralOwner, stat.ctime)
