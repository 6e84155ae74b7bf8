"""A whole cluster as processes of this one: Redis Cluster, MariaDB, three ZooKeepers, and daemons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.local import MariaDB, Nodes, RedisCluster, ZooKeeper
from benchmarks.private import PrivateServer, free_port
from toc.dev.local import spawn, stop, write_config

_TOC = [sys.executable, "-c", "from toc.cli.main import run; run()"]
STOP_SECONDS = 40.0


class _ZooKeeperMember(ZooKeeper):
    _main = "quorum.QuorumPeerMain"

    def __init__(self, directory: Path, number: int) -> None:
        super().__init__(directory)
        self.number = number
        self.others: list[_ZooKeeperMember] = []

    def _ensemble(self) -> list[str]:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        (data / "myid").write_text(f"{self.number}\n")
        return [
            "initLimit=20",
            "syncLimit=4",
            *(f"server.{each.number}=127.0.0.1:{each.peer_ports()}" for each in self.others),
        ]

    def peer_ports(self) -> str:
        """Return the ports on which it follows and elects."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return f"{self.kept_port('peer')}:{self.kept_port('election')}"

    def _ready(self, log_start: int) -> bool:  # noqa: ARG002 - its present state counts
        return bool(self._say())  # to serve it needs the others


class ZooKeeperEnsemble(Nodes[_ZooKeeperMember]):
    """A ZooKeeper ensemble. ``nodes`` are its members; it serves while more than half of them run."""

    def __init__(self, directory: Path, *, size: int = 3) -> None:
        self.nodes = [_ZooKeeperMember(directory / str(number), number) for number in range(1, size + 1)]
        for node in self.nodes:
            node.others = self.nodes

    @property
    def url(self) -> str:
        """The value for TOC_ZOOKEEPER."""
        return ",".join(node.url for node in self.nodes)

    def _serves(self, node: _ZooKeeperMember) -> bool:
        return node.serves()


class LocalCluster:
    """``daemons`` run ``app`` as host1, host2, ... with two processes each. All ends with this process."""

    def __init__(self, directory: Path, *, daemons: int = 2, app: str = "toc.dev.demo:center") -> None:
        self.directory = directory
        self._redis = RedisCluster(directory / "redis")
        self._mariadb = MariaDB(directory / "mariadb")
        self._zookeeper = ZooKeeperEnsemble(directory / "zookeeper")
        self.servers: dict[str, PrivateServer] = {
            **{f"redis{number}": node for number, node in enumerate(self._redis.nodes, 1)},
            "mariadb": self._mariadb,
            **{f"zookeeper{number}": node for number, node in enumerate(self._zookeeper.nodes, 1)},
        }
        self.daemons: list[subprocess.Popen[bytes]] = []
        self._hosts = [f"host{number}" for number in range(1, daemons + 1)]
        self._app = app

    def start(self, prepare: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Start everything and return the settings. ``prepare`` gets them before any daemon starts: it makes
        the schema and the topics."""
        for group in (self._redis, self._mariadb, self._zookeeper):
            group.start()
        settings = {
            "database_urls": [self._mariadb.url],
            "databases": 8,
            "tables": 1024,
            "redis_url": self._redis.url,
            "zookeeper": self._zookeeper.url,
            "session_timeout": 2,  # so that the death of a host is noticed soon
            "cluster": "local",
        }
        config = write_config(self.directory / "toc.toml", settings)
        prepare(settings)
        # A variable of the caller's shell must not lead a daemon to other servers.
        outside = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        for host in self._hosts:
            own = {
                "TOC_CONFIG": str(config),
                "TOC_HOST": host,
                "TOC_METRICS_ADDRESS": f"127.0.0.1:{free_port()}",
            }
            command = [*_TOC, "worker", "--app", self._app, "--processes", "2"]
            log = self.directory / f"{host}.log"
            self.daemons.append(spawn(command, log, env=outside | own))
        return settings

    def stop(self) -> None:
        """Stop the daemons in good order, then the servers."""
        for daemon in self.daemons:
            stop(daemon, STOP_SECONDS)
        for server in self.servers.values():
            server.stop()
