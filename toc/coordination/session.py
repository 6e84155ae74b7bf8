"""One ZooKeeper session.

kazoo's threads only set flags. One thread of ours makes every call; calls are pipelined, and return within
the session timeout or raise CoordinationUnavailable. A request may still be executed after that: in the same
session, in the order of sending, and before any later request.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

# kazoo has no type information
from kazoo import exceptions as kazoo_errors  # type: ignore[import-untyped]
from kazoo.client import KazooClient  # type: ignore[import-untyped]
from kazoo.handlers import threading as kazoo_threading  # type: ignore[import-untyped]
from kazoo.hosts import collect_hosts  # type: ignore[import-untyped]
from kazoo.protocol.states import KazooState, KeeperState  # type: ignore[import-untyped]
from kazoo.retry import KazooRetry  # type: ignore[import-untyped]
from kazoo.security import CREATOR_ALL_ACL  # type: ignore[import-untyped]

from toc.coordination.znodes import root_of
from toc.model.errors import ConfigError, CoordinationUnavailable
from toc.observe.log import get_logger

log = get_logger(__name__)

N = TypeVar("N")
"""A name of a node: a text, or a Slot."""

DIRECTORIES = ("workers", "assignment", "slots", "leader", "drain", "pin", "weight", "rebalance", "dead")
"""Those of a cluster (toc.coordination.znodes)."""

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


_FORM = "[user:password@]host:port,host:port[/chroot][?tls=true&ca=...&cert=...&key=...]"
_OPTIONS = re.compile(r"\?(?=(?:tls|ca|cert|key)=)")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of ZooKeeper and our identity there. The password is never shown."""

    hosts: str
    chroot: str = ""
    credential: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``[user:password@]host:port,host:port[/chroot][?tls=true&ca=FILE&cert=FILE&key=FILE]``.

        User and password may be percent-encoded. With them, nobody else can change the nodes that we make
        (scheme digest). Raises ConfigError, which does not show the password.
        """
        options_at = _OPTIONS.search(text)  # searched first: the path of a file may hold an "@"
        head, tail = (text[: options_at.start()], text[options_at.end() :]) if options_at else (text, "")
        login, at, rest = head.strip().rpartition("@")
        place, _, query = rest.partition("?")
        hosts, slash, chroot = place.partition("/")
        credential = None
        if at:
            user, colon, password = login.partition(":")
            if not user or not colon:
                raise ConfigError(f"the ZooKeeper address ...@{rest} names a user without password: {_FORM}")
            credential = f"{unquote(user)}:{unquote(password)}"
        try:
            parsed, _ = collect_hosts(hosts)
        except ValueError as exc:
            raise ConfigError(f"{hosts!r} is not a list of ZooKeeper hosts: {_FORM}") from exc
        if not parsed or "//" in slash + chroot:
            raise ConfigError(f"{place!r} is not a ZooKeeper address: {_FORM}")
        options = dict(parse_qsl(f"{query}&{tail.strip()}", keep_blank_values=True))
        unknown = sorted(options.keys() - {"tls", "ca", "cert", "key"})
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is not an option of a ZooKeeper address: {_FORM}")
        files = {name: options[name] for name in ("ca", "cert", "key") if name in options}
        for name, path in files.items():
            if not Path(path).is_file():  # kazoo would retry forever
                raise ConfigError(f"the ZooKeeper address names {name}={path}, which is not a file")
        tls = options.get("tls", "true" if files else "false")
        if tls not in ("true", "false"):
            raise ConfigError(f"tls={tls} in the ZooKeeper address must be true or false")
        return cls(hosts, (slash + chroot).rstrip("/"), credential, tls == "true", **files)


class Session:
    """A ZooKeeper session; when it ends, another one begins. For one thread.

    ``address`` is TOC_ZOOKEEPER. Requests name the nodes of a cluster by directory and name. What is read
    with ``watch`` is noted when it changes (``take_changes``). ``signal`` is called on a kazoo thread
    whenever something was noted; it must not block. Durations are seconds.
    """

    def __init__(
        self,
        address: str,
        cluster: str,
        signal: Callable[[], None],
        *,
        connect_timeout: float = 10.0,
        session_timeout: float = 6.0,
    ) -> None:
        self.address = Address.parse(address)
        self.root = root_of(self.address.chroot, cluster)
        self.signal = signal
        self._connect_timeout = connect_timeout
        self._session_timeout = session_timeout
        self._problems = _Problems()
        self._client: KazooClient | None = None
        self._away_since: float | None = None
        self._seen = 0
        """The newest state (zxid) that this session has seen, if it has read any yet."""
        self._lock = threading.Lock()
        self._everything = False
        """Whether all must be read again: watches end with a connection."""
        self._changed: defaultdict[str, set[str]] = defaultdict(set)
        """Under the lock: the nodes that have changed, by directory; "" is the directory itself."""

    def start(self) -> None:
        """Connect. Raises CoordinationUnavailable if that does not succeed within the connect timeout."""
        self._client = self._make_client()
        if not self._client.start_async().wait(self._connect_timeout):
            cause = self._problems.last or "no error reported"
            self.stop()
            raise CoordinationUnavailable(
                f"ZooKeeper at {self.address.hosts} did not answer within {self._connect_timeout:g} s "
                f"({cause}): check that it runs, that TOC_ZOOKEEPER is right, that its port is open"
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

    # --- changes ---

    def read_everything(self) -> None:
        """Have everything read again, as after an interruption."""
        self._everything = True

    def take_changes(self) -> tuple[bool, Mapping[str, set[str]]]:
        """Return whether everything must be read again, and what has changed; and forget that."""
        with self._lock:
            taken = self._everything, self._changed
            self._everything, self._changed = False, defaultdict(set)
        return taken

    def _note(self, event: Any) -> None:
        """A node has changed, or nodes in a directory were made or deleted. Runs on kazoo's thread."""
        if event.path:  # else the connection was lost, and everything is read again
            directory, _, name = event.path.removeprefix(f"{self.root}/").partition("/")
            with self._lock:
                self._changed[directory].add(name)
            self.signal()

    # --- requests ---

    def make_directories(self) -> None:
        """Create the directories, with their parents."""
        self._all(methodcaller("ensure_path_async", self._path(name)) for name in DIRECTORIES)

    def create(
        self, directory: str, nodes: Mapping[N, bytes], *, ephemeral: bool = True, sequence: bool = False
    ) -> set[N]:
        """Create nodes. Returns those that did not exist. With ``sequence`` the next number of the directory
        is added to a name."""
        kind = {"ephemeral": ephemeral, "sequence": sequence}
        results = self._all(
            methodcaller("create_async", self._path(directory, name), data, **kind)
            for name, data in nodes.items()
        )
        there = kazoo_errors.NodeExistsError
        return {name for name, result in zip(nodes, results, strict=True) if not isinstance(result, there)}

    def take_over(self, directory: str, nodes: Mapping[N, tuple[bytes, int]]) -> set[N]:
        """Make ephemeral nodes of ours in place of others, given data and the version of the other. Returns
        those done: not those of which the other is gone or has another version."""
        results = self._all(
            _anew(self._path(directory, name), data, version, ephemeral=True)
            for name, (data, version) in nodes.items()
        )
        return {name for name, result in zip(nodes, results, strict=True) if _committed(result)}

    def delete(self, directory: str, names: Iterable[object]) -> None:
        """Delete nodes. Ignores those that are gone."""
        self._all(methodcaller("delete_async", self._path(directory, name)) for name in names)

    def read(self, directory: str, names: Iterable[N], *, watch: bool = False) -> dict[N, Znode]:
        """Read nodes, those that are there."""
        asked, note = list(names), self._note if watch else None
        results = self._all(methodcaller("get_async", self._path(directory, name), note) for name in asked)
        return {
            name: Znode(result[0], result[1].version, result[1].ephemeralOwner, result[1].ctime)
            for name, result in zip(asked, results, strict=True)
            if not isinstance(result, Exception)
        }

    def directories(self) -> dict[str, Directory | None]:
        """Return the state of the directories; None for those that are gone."""
        results = self._all(methodcaller("exists_async", self._path(name)) for name in DIRECTORIES)
        return {
            name: stat and Directory((stat.czxid, stat.ctime), stat.cversion)
            for name, stat in zip(DIRECTORIES, results, strict=True)
        }

    def children(self, directory: str, *, watch: bool = False) -> list[str]:
        """Return the names in a directory, sorted; [] if it does not exist (then nothing is watched)."""
        note = self._note if watch else None
        [result] = self._all([methodcaller("get_children_async", self._path(directory), note)])
        return [] if isinstance(result, Exception) else sorted(result)

    def nodes(self, directory: str, *, watch: bool = False) -> dict[str, Znode]:
        """Return the nodes in a directory, sorted by name. Watches the directory, not the nodes."""
        return self.read(directory, self.children(directory, watch=watch))

    def replace(self, directory: str, name: str, data: bytes, *, ephemeral: bool = False) -> None:
        """Create a node. One that exists is deleted in the same transaction, so that a watch on its directory
        always fires. Raises CoordinationUnavailable also if the directory is gone."""
        path = self._path(directory, name)
        while True:
            there = self.read(directory, [name]).get(name)
            [result] = self._all([_anew(path, data, there.version if there else None, ephemeral=ephemeral)])
            if _committed(result):
                return
            if there is None and isinstance(result[-1], kazoo_errors.NoNodeError):
                raise CoordinationUnavailable(
                    f"ZooKeeper at {self.address.hosts} lost the directory of {path}: "
                    f"the daemons make it again"
                )

    def write_assignment(
        self, candidate: str, changes: Sequence[tuple[str, bytes | None, int]]
    ) -> list[int | None]:
        """Write topics' nodes, each only while the ``candidate`` is there and the node has the version given
        (-1: none yet). Watches new ones, as whoever reads does.

        Data None deletes the node. Returns the new versions, None where nothing was written.
        """

        def change(topic: str, data: bytes | None, version: int) -> Callable[[Any], Any]:
            def commit(client: Any) -> Any:
                path, transaction = self._path("assignment", topic), client.transaction()
                transaction.check(self._path("leader", candidate), -1)
                if data is None:
                    transaction.delete(path, version)
                elif version < 0:
                    transaction.create(path, data)
                else:
                    transaction.set_data(path, data, version)
                return transaction.commit_async()

            return commit

        results = self._all(change(*each) for each in changes)
        new = [self._path("assignment", topic) for topic, _, version in changes if version < 0]
        self._all(methodcaller("exists_async", path, self._note) for path in new)
        return [
            version + 1 if _committed(result) else None
            for result, (_, _, version) in zip(results, changes, strict=True)
        ]

    # --- plumbing ---

    def _path(self, *names: object) -> str:
        return "/".join((self.root, *map(str, names)))

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
        except (kazoo_threading.KazooTimeoutError, kazoo_errors.KazooException) as exc:
            why = f"ZooKeeper at {self.address.hosts} did not do what it was asked to: {type(exc).__name__}"
            raise CoordinationUnavailable(why) from exc
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
        with self._lock:
            self._everything = True
        self.signal()


class _Handler(kazoo_threading.SequentialThreadingHandler):  # type: ignore[misc]
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
