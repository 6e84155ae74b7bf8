"""Redis, MariaDB and ZooKeeper as private servers of one directory each, for tests and measurements.

Every server listens on 127.0.0.1 only, and keeps data, configuration and log in its directory. After a kill
it can be started there again: on the same port, with its durable data. No service or configuration file of
the system is touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, Self, TypeVar

from benchmarks.private import PrivateServer, Started
from benchmarks.resp import Refused, call
from toc.dev.local import MissingServer, StartFailed, find_redis, quoted, tail, until

Node = TypeVar("Node", bound=PrivateServer)


class Nodes(Started, Generic[Node]):
    """Several servers of one kind that belong together."""

    nodes: list[Node]

    def start(self) -> Self:
        """Start all nodes and wait until each serves. Raises MissingServer or StartFailed."""
        for node in self.nodes:
            node.start()
        self._join()
        if not until(lambda: all(map(self._serves, self.nodes)), 30):
            raise StartFailed(f"the nodes did not join:\n{tail(self.nodes[0].log)}")
        return self

    def _join(self) -> None:
        """Make one of the nodes, if they do not do so by themselves."""

    def _serves(self, node: Node) -> bool:
        raise NotImplementedError

    def stop(self) -> None:
        """Stop all nodes."""
        for node in self.nodes:
            node.stop()


class RedisServer(PrivateServer):
    """A Redis or Valkey server, version 7 or newer.

    ``aof``: append-only file, synced each second; without it no data is kept. ``config`` lines come last, so
    they override those written here.
    """

    name = "redis"
    ready_text = "eady to accept connections"

    def __init__(
        self,
        directory: Path,
        *,
        binary: Path | None = None,
        port: int = 0,
        aof: bool = True,
        password: str | None = None,
        config: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, port=port)
        self.binary = binary
        self.password = password
        self.config = list(config)
        self._aof = aof

    @property
    def address(self) -> tuple[str, int]:
        """Its host and port."""
        return "127.0.0.1", self.port

    @property
    def url(self) -> str:
        """The URL for TOC_REDIS_URL, password included."""
        secret = f":{self.password}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    def call(self, *words: str | int) -> object:
        """Send one command, for example ``call("CONFIG", "SET", "maxmemory", 1000000)``; return the reply.

        Raises Refused or OSError.
        """
        return call(self.address, *words, password=self.password)

    def _prepare(self) -> list[str | Path]:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"dir {quoted(self.directory)}",
            "daemonize no",
            "databases 16",
            "maxmemory-policy noeviction",
            'save ""',
            f"appendonly {'yes' if self._aof else 'no'}",
            "appendfsync everysec",
        ]
        if self.password:
            lines += [f"requirepass {quoted(self.password)}", f"masterauth {quoted(self.password)}"]
        conf = self._write("redis.conf", [*lines, *self.config])
        return [self.binary or shutil.which("redis-server") or find_redis(), conf]


class _ClusterNode(RedisServer):
    def _prepare(self) -> list[str | Path]:
        command = super()._prepare()
        with (self.directory / "redis.conf").open("a") as conf:
            conf.write(f"cluster-port {self.kept_port('bus')}\n")  # the default, port + 10000, may be in use
        return command


class RedisCluster(Nodes[_ClusterNode]):
    """A Redis Cluster of masters that share the 16384 hash slots evenly. ``nodes`` are its servers."""

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 3,
        binary: Path | None = None,
        config: Sequence[str] = (),
    ) -> None:
        # Without the last setting, one node that is away makes all hash slots unavailable.
        config = [
            *("cluster-enabled yes", "cluster-node-timeout 2000", "cluster-require-full-coverage no"),
            *config,
        ]
        self.nodes = [_ClusterNode(directory / str(n), binary=binary, config=config) for n in range(size)]

    @property
    def url(self) -> str:
        """The URL for TOC_REDIS_URL."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def _join(self) -> None:
        if "cluster_known_nodes:1\r" not in str(self.nodes[0].call("CLUSTER", "INFO")):
            return  # they were joined at the first start
        bounds = [16384 * number // len(self.nodes) for number in range(len(self.nodes) + 1)]
        for number, node in enumerate(self.nodes):
            node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)  # else they must resolve a collision
            node.call("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
        first = self.nodes[0]
        for node in self.nodes[1:]:
            node.call("CLUSTER", "MEET", "127.0.0.1", first.port, first.kept_port("bus"))

    def _serves(self, node: _ClusterNode) -> bool:
        try:
            info = str(node.call("CLUSTER", "INFO"))
        except (OSError, Refused):
            return False
        return (
            "cluster_state:ok" in info
            and "cluster_slots_assigned:16384\r" in info
            and f"cluster_known_nodes:{len(self.nodes)}\r" in info
        )


class MariaDB(PrivateServer):
    """A MariaDB or MySQL server with durable commits. ``config``: more lines for its [mysqld] section.

    The account is root with a random password, which the directory keeps.
    """

    name = "mariadb"
    ready_text = "ready for connections"

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        buffer_pool: str = "256M",
        config: Sequence[str] = (),
    ) -> None:
        super().__init__(directory, port=port)
        self.config = list(config)
        self._buffer_pool = buffer_pool
        self._password = ""

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the server, with password and without a database."""
        return f"mysql+pymysql://root:{self._password}@127.0.0.1:{self.port}"

    def _prepare(self) -> list[str | Path]:
        program = _find("mariadbd", "mysqld", package="mariadb-server (or mysql-server)")
        data = self.directory / "data"
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        secret = self.directory / "password"
        if not secret.exists():
            self._write("password", [secrets.token_hex(16)])
        self._password = secret.read_text().strip()
        # With skip-name-resolve, 127.0.0.1 is another host than localhost.
        accounts = self._write(
            "accounts.sql",
            [
                f"CREATE USER IF NOT EXISTS 'root'@'127.0.0.1' IDENTIFIED BY '{self._password}';",
                f"ALTER USER 'root'@'127.0.0.1' IDENTIFIED BY '{self._password}';",
                f"ALTER USER 'root'@'localhost' IDENTIFIED BY '{self._password}';",
                "GRANT ALL PRIVILEGES ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;",
            ],
        )
        conf = self._write(
            "my.cnf",
            [
                "[mysqld]",
                f"datadir={quoted(data)}",
                f"tmpdir={quoted(temporary)}",  # a starting server deletes temporary tables there
                f"port={self.port}",
                "bind-address=127.0.0.1",
                "skip-name-resolve",
                "socket=",
                f"pid-file={quoted(self.directory / 'mariadb.pid')}",
                f"init-file={quoted(accounts)}",
                "character-set-server=utf8mb4",
                "innodb_flush_log_at_trx_commit=1",
                f"innodb_buffer_pool_size={self._buffer_pool}",
                "max_connections=500",
                "max_allowed_packet=64M",
                *self.config,
                *(["user=root"] if os.geteuid() == 0 else []),
            ],
        )
        if not (data / "mysql").exists():
            self._install(program, conf, data)
        return [program, f"--defaults-file={conf}"]

    def _install(self, program: Path, conf: Path, data: Path) -> None:
        """Make the system tables beside the data directory, then rename: a half-made one is never used."""
        fresh = self.directory / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        command: list[str | Path]
        if "MariaDB" in version:
            installer = _find("mariadb-install-db", "mysql_install_db", package="mariadb-server")
            command = [
                installer,
                f"--defaults-file={conf}",
                f"--datadir={fresh}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--skip-name-resolve",
            ]
        else:
            command = [program, f"--defaults-file={conf}", f"--datadir={fresh}", "--initialize-insecure"]
        with self.log.open("ab") as log:
            start = log.tell()
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
        if done.returncode:
            raise StartFailed(f"{command[0]} failed; {self.log} ends with:\n{tail(self.log, start)}")
        fresh.rename(data)


class ZooKeeper(PrivateServer):
    """A ZooKeeper server of one node. Sessions may be as short as 1 s (two ticks)."""

    name = "zookeeper"
    _main = "ZooKeeperServerMain"

    @property
    def url(self) -> str:
        """The value for TOC_ZOOKEEPER."""
        return f"127.0.0.1:{self.port}"

    def serves(self) -> bool:
        """Whether it answers requests. A member of an ensemble does while it sees more than half of it."""
        return self._say() == b"Zookeeper"

    def _prepare(self) -> list[str | Path]:
        home = os.environ.get("JAVA_HOME")
        java = Path(home, "bin", "java") if home else _find("java", package="default-jre-headless")
        jar = Path("/usr/share/java/zookeeper.jar")  # Debian's; its manifest names the jars it needs
        if not jar.exists():
            raise MissingServer("ZooKeeper is not installed: apt-get install zookeeper")
        conf = self._write(
            "zoo.cfg",
            [
                f"dataDir={self.directory / 'data'}",
                f"clientPort={self.port}",
                "clientPortAddress=127.0.0.1",
                "tickTime=500",
                "maxSessionTimeout=60000",
                "maxClientCnxns=0",
                "admin.enableServer=false",
                "4lw.commands.whitelist=ruok,srvr",
                *self._ensemble(),
            ],
        )
        return [
            java,
            "-Xmx256m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Dzookeeper.jmx.log4j.disable=true",
            "-cp",
            f"{jar}:{jar.with_name('slf4j-simple.jar')}",
            f"org.apache.zookeeper.server.{self._main}",
            conf,
        ]

    def _ensemble(self) -> list[str]:
        """Return the lines about the other members."""
        return []

    def _ready(self, log_start: int) -> bool:  # noqa: ARG002 - its present state counts, not its log
        return self.serves()

    def _say(self) -> bytes:
        """Return the start of its answer to ``srvr``; b"" when it does not answer."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                connection.sendall(b"srvr")  # ruok is answered too early, before the data is read
                return connection.recv(9)
        except OSError:
            return b""


def _find(*names: str, package: str) -> Path:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    for name in names:
        if program := shutil.which(name, path=path):
            return Path(program)
    raise MissingServer(f"{names[0]} is not installed: apt-get install {package}")
