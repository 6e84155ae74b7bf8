"""A whole cluster on this machine, and everything that may break in it (schedule.py says when)."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pymysql
from fault.kit import servers
from fault.kit.proxy import Proxy
from fault.kit.schedule import HOSTS, Step
from harness.system import DaemonProcess, System
from sqlalchemy.engine import make_url

from toc.local.process import until
from toc.local.servers import MariaDB, RedisCluster, ZooKeeper

PREPARE_TIMEOUT = 5

End = Callable[[], object]
"""Repairs what a fault has broken."""


class Host:
    """One daemon under a supervisor, which starts it again whenever it has ended."""

    def __init__(self, system: System, name: str, env: dict[str, str]) -> None:
        self.name = name
        self.held_down = False
        self.surprises: list[str] = []
        """Ends that nobody caused."""
        self._system = system
        self._env = {**system.env, **env}
        self._start()

    def _start(self) -> None:
        log = self._system.directory / f"{self.name}.log"
        self._log_start = log.stat().st_size if log.exists() else 0
        self.daemon = DaemonProcess(
            self._system.directory, self.name, self._env, app="harness.app:center", processes=2, threads=4
        )
        self._due: float | None = None
        self.told = False
        self._system.daemons = [
            daemon for daemon in self._system.daemons if daemon.process.poll() is None
        ] + [self.daemon]

    def supervise(self) -> None:
        """Start it again a second after it has ended, as systemd would."""
        if self.held_down or self.daemon.process.poll() is None:
            return
        if self._due is None:
            self._due = time.monotonic() + 1.0
            if not self.told and self.ready():
                self.surprises.append(f"{self.name} ended with {self.daemon.process.returncode}")
        elif time.monotonic() >= self._due:
            self._start()

    def ready(self) -> bool:
        """Whether a worker process of this start of the daemon has become ready."""
        with self.daemon.log.open("rb") as log:
            log.seek(self._log_start)
            return b"worker_ready" in log.read()

    def workers(self) -> list[int]:
        """Its worker processes; none while it is not up."""
        try:
            return sorted(self.daemon.workers())
        except OSError:
            return []


class Stage:
    """The cluster, its hosts, and what may be done to them."""

    def __init__(self, directory: Path, stack: ExitStack, seed: int) -> None:
        self.missed = 0
        """Faults that found nothing to break, such as no worker process just then."""
        self.orphans: set[int] = set()
        self.redis = RedisCluster(directory / "redis")
        self.gates: list[Proxy] = []
        for number, node in enumerate(self.redis.nodes):
            node.directory.mkdir(parents=True, mode=0o700)
            gate = stack.enter_context(Proxy(node.kept_port("port"), seed=seed + number))
            node.config.append(f"cluster-announce-port {gate.port}")  # whoever asks is sent to the proxy
            self.gates.append(gate)
        stack.enter_context(self.redis)
        for gate, node in zip(self.gates, self.redis.nodes, strict=True):
            gate.target = node.port
        self.mysql = stack.enter_context(MariaDB(directory / "mariadb"))
        self.zookeeper = stack.enter_context(ZooKeeper(directory / "zookeeper"))
        self._secret = secrets.token_hex(8)
        # Not root, whom read_only does not stop.
        self._sql(f"CREATE USER 'app'@'127.0.0.1' IDENTIFIED BY '{self._secret}'")
        rights = "SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, DROP, INDEX, REFERENCES"
        self._sql(f"GRANT {rights} ON *.* TO 'app'@'127.0.0.1'")
        self.lines = {
            name: stack.enter_context(Proxy(self.mysql.port, seed=seed)) for name in (*HOSTS, "application")
        }
        self.system = System(
            directory,
            redis_url="redis+cluster://" + ",".join(f"127.0.0.1:{gate.port}" for gate in self.gates),
            database_urls=[self._url("application")],
            databases=8,
            tables=64,
            zookeeper=self.zookeeper.url,
            cluster="chaos",
            session_timeout=2,
            connect_timeout=2,
            read_timeout=3,
            write_timeout=3,
        )
        stack.callback(self.system.stop)
        self.system.create_topics(
            slots=16, prepare_timeout=PREPARE_TIMEOUT, backoff_base=0.2, backoff_cap=5.0
        )
        self.hosts = {name: Host(self.system, name, {"TOC_DATABASE_URLS": self._url(name)}) for name in HOSTS}
        if not until(lambda: all(host.ready() for host in self.hosts.values()), 60):
            raise RuntimeError(f"the hosts did not start\n{self.system.logs()}")

    def _url(self, line: str) -> str:
        # Without TLS, so that the proxies can read along.
        url = make_url(self.mysql.url).set(username="app", password=self._secret, port=self.lines[line].port)
        return url.update_query_dict({"ssl_disabled": "true"}).render_as_string(hide_password=False)

    def _sql(self, statement: str) -> None:
        url = make_url(self.mysql.url)
        with (
            pymysql.connect(
                host=url.host, port=self.mysql.port, user=url.username, password=str(url.password)
            ) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)

    def do(self, step: Step) -> End | None:
        """Break something; returns what repairs it, or None if there was nothing to break."""
        host = self.hosts.get(step.target)
        if host is not None:
            return self._break_host(step, host)
        if step.kind.endswith("Redis"):
            return self._break_redis(step, int(step.target[-1]) - 1)
        return self._break_others(step)

    def _break_host(self, step: Step, host: Host) -> End | None:
        fault = self.system.recorder.fault
        daemon, workers = host.daemon, host.workers()
        if not workers:
            return None
        if step.kind == "cut host from MySQL":
            line, cut = self.lines[host.name], fault("cut", pids=family(workers))
            if step.choice % 2:
                line.refuse()
            else:
                line.stall()
            # Processes that were started meanwhile were cut off, too.
            return _each(line.accept, line.flow, lambda: cut.end(pids=family(host.workers())))
        if step.kind == "restart host":
            stop = fault("stop")
            host.told = True
            daemon.terminate()
            return stop.end
        if step.kind == "kill daemon":
            # Its workers go on, then leave by themselves.
            with fault("other", note="a daemon was killed"):
                host.told = True
                self.orphans.update(workers)
                os.kill(daemon.process.pid, signal.SIGKILL)
            return _nothing
        if step.kind == "kill host":
            kill = fault("kill", pids=family(workers))
            host.told = host.held_down = True
            daemon.kill()

            def power() -> None:
                host.held_down = False
                kill.end()

            return power
        worker = workers[step.choice % len(workers)]
        if step.kind == "kill worker":
            with fault("kill", pids=family([worker])):
                os.kill(worker, signal.SIGKILL)
            return _nothing
        pids = family([worker] if step.kind == "pause worker" else workers)
        stopped = pids if step.kind == "pause worker" else [daemon.process.pid, *pids]
        pause = fault("pause", pids=pids)
        send(stopped, signal.SIGSTOP)
        return _each(lambda: send(stopped, signal.SIGCONT), pause.end)

    def _break_redis(self, step: Step, number: int) -> End | None:
        node, gate = self.redis.nodes[number], self.gates[number]
        lost = step.kind in ("kill Redis", "wipe Redis")  # the last writes may not have reached its file
        fault = self.system.recorder.fault("redis_loss" if lost else "redis_down", note=step.kind)
        if lost:
            node.kill()
            if step.kind == "wipe Redis":
                servers.wipe(node)
            return _each(node.start, fault.end)
        if step.kind == "pause Redis":
            node.pause()
            return _each(node.resume, fault.end)
        if step.kind == "cut Redis":
            gate.refuse()
            return _each(gate.accept, fault.end)
        gate.eat(count=None, probability=0.05, quiet=0.01)
        return _each(gate.eat_nothing, fault.end)

    def _break_others(self, step: Step) -> End | None:
        kind = {"zookeeper": "zk_down", "mysql": "store_down", "application": "other"}[step.target]
        fault = self.system.recorder.fault(kind, note=step.kind)
        if step.kind == "eat commits":
            line = self.lines["application"]
            line.eat(b"INSERT INTO", count=None, probability=0.1, quiet=0.02)
            return _each(line.eat_nothing, fault.end)
        if step.kind == "read-only MySQL":
            self._sql("SET GLOBAL read_only = 1")
            return _each(lambda: self._sql("SET GLOBAL read_only = 0"), fault.end)
        server = self.mysql if step.target == "mysql" else self.zookeeper
        if step.kind.startswith("kill"):
            server.kill()
            return _each(server.start, fault.end)
        server.pause()
        return _each(server.resume, fault.end)

    def supervise(self) -> None:
        """What a service manager does."""
        for host in self.hosts.values():
            host.supervise()


def family(pids: list[int]) -> list[int]:
    """These processes and those that they have started."""
    found: list[int] = []
    for pid in pids:
        with suppress(OSError):
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                found += family([int(child) for child in path.read_text().split()])
        found.append(pid)
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _each(*acts: Callable[[], object]) -> End:
    def run() -> None:
        for act in acts:
            act()

    return run


def _nothing() -> None:
    """Over at once."""
