"""The servers of one peer as private processes, as durable as toc's: started for it, stopped after it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pymysql

from benchmarks import processes
from benchmarks.catalog import Entry
from benchmarks.local import MariaDB, RedisCluster, RedisServer, ZooKeeper
from benchmarks.private import PrivateServer
from toc.dev.local import MissingServer, tail


class PostgreSql(PrivateServer):
    """PostgreSQL with durable commits. It refuses to run as root; then it runs as its package's user."""

    name = "postgres"

    @property
    def url(self) -> str:
        """The connection URL."""
        return f"postgresql://bench@127.0.0.1:{self.port}/postgres"

    def stop(self) -> None:
        """Shut down fast, without waiting for clients."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
        super().stop()

    def _prepare(self) -> list[str | Path]:
        data = self.directory / "data"
        self.directory.chmod(0o711)
        if not data.exists():
            data.mkdir(mode=0o700)
            if os.geteuid() == 0:
                shutil.chown(data, "postgres", "postgres")
            command = [*self._user(), self._program("initdb"), "-D", data, "-U", "bench", "--auth=trust"]
            with self.log.open("ab") as log:
                subprocess.run(command, stdout=log, stderr=log, cwd="/", check=True)
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "synchronous_commit": "on",
            "shared_buffers": "512MB",
        }
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return [*self._user(), self._program("postgres"), "-D", data, "-p", str(self.port), *settings]

    def _user(self) -> list[str | Path]:
        if os.geteuid() != 0:
            return []
        user = ["--reuid=postgres", "--regid=postgres", "--init-groups"]
        return [shutil.which("setpriv") or "/usr/bin/setpriv", *user, "--pdeathsig=KILL"]

    @staticmethod
    def _program(name: str) -> Path:
        places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)  # Debian's, newest first
        program = shutil.which(name, path=os.pathsep.join([*map(str, places), os.environ.get("PATH", "")]))
        if program is None:
            raise MissingServer("PostgreSQL is not installed: apt-get install postgresql")
        return Path(program)

    def _ready(self, log_start: int) -> bool:
        return "ready to accept connections" in tail(self.log, log_start, size=1 << 20)


class BeanstalkServer(PrivateServer):
    """beanstalkd with its write-ahead log."""

    name = "beanstalkd"

    @property
    def url(self) -> str:
        """host:port."""
        return f"127.0.0.1:{self.port}"

    def _prepare(self) -> list[str | Path]:
        program = shutil.which("beanstalkd")
        if program is None:
            raise MissingServer("beanstalkd is not installed: apt-get install beanstalkd")
        journal = self.directory / "journal"
        journal.mkdir(exist_ok=True)
        return [program, "-l", "127.0.0.1", "-p", str(self.port), "-b", journal, "-f", "1000"]

    def _ready(self, log_start: int) -> bool:  # noqa: ARG002 - it writes no log
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False


class Servers:
    """All servers of one entry. ``database``: in place of a fresh MariaDB."""

    def __init__(self, entry: Entry, directory: Path, database: MariaDB | None = None) -> None:
        self.environment = dict(entry.environment)
        self._kinds = entry.servers
        self._redis: list[RedisServer] = []
        self._others: list[PrivateServer] = []
        self._data: Path | None = None
        config = list(entry.redis_config)
        self._mariadb = database
        for kind in entry.servers:
            self._start(kind, directory / kind, config)

    def _start(self, kind: str, directory: Path, config: Sequence[str]) -> None:
        if kind == "redis":
            redis = RedisServer(directory, config=config).start()
            self._redis = [redis]
            self.environment |= {"BENCH_REDIS": redis.url, "TOC_REDIS_URL": redis.url}
        elif kind == "redis-cluster":
            cluster = RedisCluster(directory, config=config).start()
            self._redis = list(cluster.nodes)
            self.environment["TOC_REDIS_URL"] = cluster.url
        elif kind == "mariadb":
            mariadb = self._mariadb = self._mariadb or MariaDB(directory, buffer_pool="1G")
            self._others.append(mariadb.start())
            self._data = directory / "data"
            self.environment["TOC_DATABASE_URLS"] = mariadb.url
        elif kind == "postgres":
            postgres = PostgreSql(directory).start()
            self._others.append(postgres)
            self._data = directory / "data" / "base"
            self.environment["BENCH_POSTGRES"] = postgres.url
        elif kind == "zookeeper":
            zookeeper = ZooKeeper(directory).start()
            self._others.append(zookeeper)
            self.environment["TOC_ZOOKEEPER"] = zookeeper.url
        else:
            assert kind == "beanstalkd"
            beanstalk = BeanstalkServer(directory).start()
            self._others.append(beanstalk)
            self._data = directory / "journal"
            self.environment["BENCH_BEANSTALKD"] = beanstalk.url

    def stop(self) -> None:
        """Stop all servers."""
        for server in [*self._redis, *self._others]:
            server.stop()

    def pids(self) -> dict[str, list[int]]:
        """Return process ids by kind of server."""
        found = {server.name: [server.pid] for server in self._others}
        if self._redis:
            found["redis"] = [server.pid for server in self._redis]
        return {kind: [one for pid in pids for one in processes.tree(pid)] for kind, pids in found.items()}

    def flush(self) -> None:
        """Have Redis lose all it holds."""
        for server in self._redis:
            server.call("FLUSHALL", "ASYNC")  # of millions of entries it takes seconds

    def restart_database(self) -> None:
        """Restart MariaDB with nothing in its memory."""
        assert self._mariadb is not None
        self._mariadb.stop()
        (self._mariadb.directory / "data" / "ib_buffer_pool").unlink(missing_ok=True)
        self._mariadb.start()

    def database_port(self) -> int:
        """Return the port of MariaDB."""
        assert self._mariadb is not None
        return self._mariadb.port

    def memory(self) -> int:
        """Return the bytes that Redis uses; for beanstalkd its resident size."""
        if self._redis:
            infos = [str(server.call("INFO", "memory")) for server in self._redis]
            return sum(int(info.split("used_memory:")[1].split()[0].split("\\")[0]) for info in infos)
        return processes.resident(self.pids().get("beanstalkd", []))

    def stored(self) -> int:
        """Return the bytes of tables or journal on disk; 0 for MariaDB, which ``row_bytes`` measures."""
        if self._data is None or self._mariadb is not None:
            return 0
        return sum(path.stat().st_size for path in self._data.rglob("*") if path.is_file())

    def row_bytes(self) -> float | None:
        """Return the average bytes of a row in MariaDB's pages, with indexes; None without MariaDB.

        The growth of files would say nothing: they grow in larger steps, and pages of earlier tasks are
        reused.
        """
        if self._mariadb is None:
            return None
        url = urlsplit(self._mariadb.url)
        with (
            pymysql.connect(
                host=url.hostname or "", port=url.port or 0, user=url.username, password=url.password or ""
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(
                "SELECT SUM(data_length + index_length) / SUM(table_rows) FROM information_schema.tables "
                "WHERE table_name LIKE 'timeout_task_%%'"
            )
            row = cursor.fetchone()
        return float(row[0]) if row and row[0] else None

    def versions(self) -> dict[str, str]:
        """Return the version that each server reports."""
        found = {}
        if self._redis:
            said = str(self._redis[0].call("INFO", "server"))
            found["redis"] = said.split("redis_version:")[1].split()[0].split("\\")[0]
        for server in self._others:
            program = Path(f"/proc/{server.pid}/exe").resolve()
            flag = "-v" if server.name == "beanstalkd" else "--version"
            done = subprocess.run([program, flag], capture_output=True, text=True, check=False)
            found[server.name] = done.stdout.strip() or done.stderr.strip()
        return found
