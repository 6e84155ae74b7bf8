"""A whole toc cluster on this machine: Redis Cluster, MariaDB, ZooKeeper and several worker daemons.

All processes run detached and survive the command that started them; ``state.json`` lists them. ``toc.toml``
beside it holds the settings: with TOC_CONFIG set to its path, any toc program uses this cluster.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toc.dev.local.embedded import lock, make_directory, not_usable, write_config
from toc.dev.local.private import PrivateServer
from toc.dev.local.process import Process, StartFailed, free_port, tail, until
from toc.dev.local.servers import MariaDB, RedisCluster, ZooKeeper, ZooKeeperEnsemble
from toc.model.errors import ConfigError, shown

_DAEMON = [sys.executable, "-c", "from toc.cli.main import run; run()", "worker"]
_DAEMON_STOP_S = 40.0  # a daemon gives running handlers 30 s
_HOST = re.compile(r"host[1-9][0-9]*")


class LocalCluster:
    """The cluster of one directory. ``daemons`` stand for hosts: host1, host2, ...

    ``processes`` is the number of workers of each daemon: by default as many as the existing ones have, or 2.
    ``zookeepers`` is the number of ZooKeeper servers.

    Stopping keeps the data; a later start finds it on the same ports.
    """

    def __init__(
        self,
        directory: Path,
        *,
        daemons: int = 2,
        processes: int | None = None,
        zookeepers: int = 3,
        app: str = "toc.dev.demo.app:center",
    ) -> None:
        self.directory = directory.absolute()
        self.config = self.directory / "toc.toml"
        self.daemons = daemons
        self.processes = processes
        self.zookeepers = zookeepers
        self.app = app
        self._state = self.directory / "state.json"

    def start(
        self,
        prepare: Callable[[dict[str, Any]], None],
        progress: Callable[[str], None] = lambda _name: None,
    ) -> dict[str, Any]:
        """Start everything and return the settings, which ``toc.toml`` holds as well.

        Calls ``prepare`` with them once the servers run and before any daemon does; it upgrades the schema
        and creates the topics. Calls ``progress`` with each name before it is started. On a failure it stops
        what it has started. Raises ConfigError when the cluster runs already, MissingServer or StartFailed.
        """
        make_directory(self.directory)
        with self._locked():
            if any(part["running"] for part in self.status()):
                raise ConfigError(
                    f"the cluster in {self.directory} is already running: `toc cluster start NAME` starts a "
                    "stopped part, `toc cluster stop` stops all"
                )
            self._state.unlink(missing_ok=True)
            try:
                settings = self._start_servers(progress)
                write_config(self.config, settings)
                prepare(settings)
                names = [f"host{number}" for number in range(1, self.daemons + 1)]
                self._start_daemons(names, progress)
            except BaseException:
                self._stop()
                raise
        return settings

    def start_parts(self, names: Sequence[str], progress: Callable[[str], None] = lambda _name: None) -> None:
        """Start stopped parts of an existing cluster, or further hosts.

        A server comes back on its port with its durable data. Raises ConfigError or StartFailed.
        """
        self._existing(())
        with self._locked():
            parts = self._existing(name for name in names if not _HOST.fullmatch(name))
            for name in names:
                if name in parts and Process(parts[name]["pid"], parts[name]["started"]).alive():
                    continue
                progress(name)
                if _HOST.fullmatch(name):
                    self._start_daemons([name])
                else:
                    server = self._server(name)
                    server.port = int(parts[name]["address"].rpartition(":")[2])  # the settings name it
                    try:
                        server.start()
                    finally:
                        self._note_server(name, server)

    def stop_parts(self, names: Sequence[str]) -> None:
        """Stop some parts in good order. Those that do not run are left alone. Raises ConfigError."""
        self._existing(names)
        with self._locked():
            parts = self._existing(names)
            for name in names:
                process = Process(parts[name]["pid"], parts[name]["started"])
                process.stop(_DAEMON_STOP_S if _HOST.fullmatch(name) else PrivateServer.stop_timeout)

    def status(self) -> list[dict[str, Any]]:
        """Return a row per process: name, pid, running, address (of a daemon: of its metrics), log.

        Raises ConfigError when the directory cannot be used.
        """
        return [
            {
                "name": name,
                "pid": part["pid"],
                "running": Process(part["pid"], part["started"]).alive(),
                "address": part["address"],
                "log": part["log"],
            }
            for name, part in self._parts().items()
        ]

    def stop(self) -> None:
        """Stop the daemons in good order, then the servers that run. Raises ConfigError."""
        self._parts()  # raises ConfigError where no cluster can be
        if self.directory.exists():
            with self._locked():
                self._stop()

    def kill(self, *names: str) -> None:
        """SIGKILL parts and the processes they started, like a power failure. Raises ConfigError."""
        parts = self._existing(names)
        for name in names:
            Process(parts[name]["pid"], parts[name]["started"]).kill()

    def _start_servers(self, progress: Callable[[str], None]) -> dict[str, Any]:
        redis, mariadb, zookeeper = self._redis(), self._mariadb(), self._zookeeper(self.zookeepers)
        for name, server in (("redis", redis), ("mariadb", mariadb), ("zookeeper", zookeeper)):
            progress("Redis Cluster" if name == "redis" else name)
            try:
                server.start()
            finally:
                if isinstance(server, PrivateServer):
                    self._note_server(name, server)
                else:
                    for number, node in enumerate(server.nodes, 1):
                        self._note_server(f"{name}{number}", node)
        return {
            "database_urls": [mariadb.url],
            "databases": 8,
            "tables": 1024,
            "redis_url": redis.url,
            "zookeeper": zookeeper.url,
            "session_timeout": 2,  # so that the death of a host is noticed soon
            "cluster": "local",
        }

    def _redis(self) -> RedisCluster:
        return RedisCluster(self.directory / "redis", die_with_parent=False)

    def _mariadb(self) -> MariaDB:
        return MariaDB(self.directory / "mariadb", die_with_parent=False)

    def _zookeeper(self, size: int) -> ZooKeeper | ZooKeeperEnsemble:
        """A single server, or an ensemble of several, each in its own directory."""
        if size == 1:
            return ZooKeeper(self.directory / "zookeeper", die_with_parent=False)
        return ZooKeeperEnsemble(self.directory / f"zookeeper-of-{size}", size=size, die_with_parent=False)

    def _server(self, name: str) -> PrivateServer:
        """Return a server that was started before."""
        if name == "mariadb":
            return self._mariadb()
        size = sum(each.startswith("zookeeper") for each in self._parts())
        server = self._redis() if name.startswith("redis") else self._zookeeper(size)
        if isinstance(server, ZooKeeper):
            return server
        return server.nodes[int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) - 1]

    def _start_daemons(
        self, names: Sequence[str], progress: Callable[[str], None] = lambda _name: None
    ) -> None:
        # A variable of the caller's shell must not lead a daemon to other servers.
        outside = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        size = self.processes or max(part.get("processes", 0) for part in [{}, *self._parts().values()]) or 2
        processes = []
        for name in names:
            progress(name)
            log = self.directory / f"{name}.log"
            own = {
                "TOC_CONFIG": str(self.config),
                "TOC_HOST": name,
                "TOC_METRICS_ADDRESS": f"127.0.0.1:{free_port()}",
            }
            process = Process.spawn(
                [*_DAEMON, "--app", self.app, "--processes", str(size)], log, env=outside | own
            )
            self._note(name, process, log, own["TOC_METRICS_ADDRESS"], processes=size)
            processes.append((process, log))
        # A daemon that cannot run ends at once.
        until(lambda: not all(process.alive() for process, _ in processes), 1.5)
        for process, log in processes:
            if not process.alive():
                raise StartFailed(f"a daemon ended at once; {log} ends with:\n{tail(log)}")

    def _stop(self) -> None:
        parts = {name: Process(part["pid"], part["started"]) for name, part in self._parts().items()}
        daemons = [process for name, process in parts.items() if _HOST.fullmatch(name)]
        for process in daemons:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGTERM)
        for process in daemons:
            process.stop(_DAEMON_STOP_S)
        for name, process in parts.items():
            if not _HOST.fullmatch(name):
                process.stop(PrivateServer.stop_timeout)
        self._state.unlink(missing_ok=True)

    def _parts(self) -> dict[str, dict[str, Any]]:
        try:
            parts: dict[str, dict[str, Any]] = json.loads(self._state.read_text())
        except FileNotFoundError:
            return {}
        except OSError as exc:
            raise not_usable(self.directory, exc) from exc
        except ValueError as exc:
            raise ConfigError(
                f"{shown(str(self._state))} is damaged: stop the processes that run there, then delete it"
            ) from exc
        return parts

    def _existing(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the parts. Raises ConfigError when there are none, or when a name is not among them."""
        parts = self._parts()
        if not parts:
            raise ConfigError(
                f"no cluster runs in {shown(str(self.directory))}; start one with `toc cluster start`"
            )
        for name in names:
            if name not in parts:
                raise ConfigError(f"{shown(name)} is not one of: {', '.join(parts)}")
        return parts

    def _note_server(self, name: str, server: PrivateServer) -> None:
        if server.process is not None:
            self._note(name, server.process, server.log, f"127.0.0.1:{server.port}")

    def _note(
        self, name: str, process: Process, log: Path, address: str | None, *, processes: int | None = None
    ) -> None:
        """Add a process to the state file, which is replaced atomically: no reader finds half of it."""
        part = {"pid": process.pid, "started": process.started, "log": str(log), "address": address}
        if processes is not None:
            part["processes"] = processes
        fresh = self._state.with_suffix(".new")
        fresh.write_text(json.dumps({**self._parts(), name: part}, indent=2))
        fresh.replace(self._state)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = lock(self.directory)
        try:
            yield
        finally:
            os.close(descriptor)
