"""A whole cluster on this machine, and everything that may break in it (schedule.py says when)."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pymysql
from fault.kit import servers
from fault.kit.consumers import Consumer
from fault.kit.doors import PULLED
from fault.kit.proxy import Proxy, through
from fault.kit.schedule import CONSUMERS, DATABASES, GATEWAYS, HOSTS, Step
from harness import forks
from harness.patience import until
from harness.system import DaemonProcess, System
from harness.tables import task_tables
from kazoo.client import KazooClient  # type: ignore[import-untyped]
from kazoo.exceptions import NoNodeError, NotEmptyError  # type: ignore[import-untyped]
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisCluster, ZooKeeper
from benchmarks.private import free_port
from toc import TocError, Topic
from toc.model.access import Role
from toc.model.topic import Delivery
from toc.operate.tokens import create_token

LOG_MEGABYTES = 1024
"""The disk that the daemons log to."""

End = Callable[[], object]
"""Repairs what a fault has broken."""


class Host:
    """One daemon under a supervisor, which starts it again whenever it has ended. With a port: a gateway."""

    def __init__(self, stage: Stage, name: str, urls: list[str], port: int | None) -> None:
        self.name = name
        self.port = port
        self._logs, self._system = stage.logs, stage.system
        self.held_down = False
        self.surprises: list[str] = []
        """Ends that nobody caused."""
        self._env = {**self._system.env, "TOC_DATABASE_URLS": ",".join(urls)}
        self._start()

    def _start(self) -> None:
        log = self._logs / f"{self.name}.log"
        self._log_start = log.stat().st_size if log.exists() else 0
        app = {"app": "harness.app:center", "processes": 2, "threads": 4}
        self.daemon = DaemonProcess(self._logs, self.name, self._env, gateway=self.port, **app)  # type: ignore[arg-type]
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
        self.databases = {name: stack.enter_context(MariaDB(directory / name)) for name in DATABASES}
        self.zookeeper = stack.enter_context(ZooKeeper(directory / "zookeeper"))
        accounts = list(map(servers.application_url, self.databases.values()))
        self.lines = {
            name: [stack.enter_context(Proxy(one.port, seed=seed)) for one in self.databases.values()]
            for name in (*HOSTS, *GATEWAYS, "application")
        }
        """Between each host, each gateway, or the application, and each database server."""
        urls = {name: list(map(through, lines, accounts)) for name, lines in self.lines.items()}
        self.logs = directory / "logs"
        self.logs.mkdir()
        self._log_disk = os.geteuid() == 0  # who mounts a small disk is root
        if self._log_disk:
            stack.enter_context(servers.small_disk(self.logs, LOG_MEGABYTES))
            stack.callback(shutil.copytree, self.logs, directory / "logs-kept")  # the disk does not stay
        self.system = System(
            directory,
            redis_url="redis+cluster://" + ",".join(f"127.0.0.1:{gate.port}" for gate in self.gates),
            database_urls=urls["application"],
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
        policies: dict[str, Any] = {"prepare_timeout": 5, "backoff_base": 0.2, "backoff_cap": 5.0}
        self.system.create_topics(slots=16, **policies)
        center = self.system.center
        center.store.topics.create(Topic(PULLED, 90, 16, delivery=Delivery.PULL, **policies))
        token = create_token(center, "consumers", roles=[Role.CONSUME], topics=[PULLED], by="soak")
        ports = {name: free_port() for name in GATEWAYS}
        self.consumers: dict[str, Consumer] = {}
        for number, name in enumerate(CONSUMERS):
            order = list(ports.values())[:: -1 if number % 2 else 1]
            words = [f"{seed}/{name}", ",".join(map(str, order))]
            self.consumers[name] = Consumer(self.system, name, words, {"TOC_TOKEN": token.secret})
            stack.callback(self.consumers[name].stop)
        self.hosts = {name: Host(self, name, urls[name], ports.get(name)) for name in (*HOSTS, *GATEWAYS)}
        """And the gateways."""
        self.supervised: list[Host | Consumer] = [*self.hosts.values(), *self.consumers.values()]
        if not until(lambda: all(host.ready() for host in self.hosts.values()), 60):
            raise RuntimeError(f"the hosts did not start\n{self.system.logs()}")

    def do(self, step: Step) -> End | None:
        """Break something; returns what repairs it, or None if there was nothing to break."""
        host = self.hosts.get(step.target)
        if host is not None:
            return self._break_host(step, host)
        if step.target in self.consumers:
            return self._break_consumer(step, self.consumers[step.target])
        if step.kind.endswith("Redis"):
            return self._break_redis(step, int(step.target[-1]) - 1)
        return self._break_others(step)

    def _break_host(self, step: Step, host: Host) -> End | None:
        fault = self.system.recorder.fault
        daemon, workers = host.daemon, host.workers()
        if step.kind == "kill HTTP process":
            workers = [pid for pid in workers if forks.serves_http(pid)]
        if not workers:
            return None
        if step.kind.startswith("cut"):
            cut = fault("cut", pids=family(workers))
            lines = self.lines[host.name][step.choice % 3 == 0 :]  # sometimes from one of the servers only
            for line in lines:
                (line.refuse if step.choice % 2 else line.stall)()
            again = [act for line in lines for act in (line.accept, line.flow)]
            # Processes that were started meanwhile were cut off, too.
            return _each(*again, lambda: cut.end(pids=family(host.workers())))
        if step.kind.startswith("restart"):
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
        if step.kind in ("kill host", "kill gateway"):
            kill = fault("kill", pids=family(workers))
            host.told = host.held_down = True
            daemon.kill()
            return _each(lambda: setattr(host, "held_down", False), kill.end)
        worker = workers[step.choice % len(workers)]
        if step.kind in ("kill worker", "kill HTTP process"):
            with fault("kill", pids=family([worker])):
                os.kill(worker, signal.SIGKILL)
            return _nothing
        pids = family([worker] if step.kind == "pause worker" else workers)
        stopped = pids if step.kind == "pause worker" else [daemon.process.pid, *pids]
        pause = fault("pause", pids=pids)
        send(stopped, signal.SIGSTOP)
        return _each(lambda: send(stopped, signal.SIGCONT), pause.end)

    def _break_consumer(self, step: Step, consumer: Consumer) -> End | None:
        if step.kind != "kill consumer":
            return _nothing if consumer.tell(step.kind.removeprefix("ack ")) else None
        kill = self.system.recorder.fault("kill", pids=[consumer.process.pid])
        consumer.held_down = True
        consumer.kill()
        return _each(lambda: setattr(consumer, "held_down", False), kill.end)

    def _break_redis(self, step: Step, number: int) -> End:
        node, gate = self.redis.nodes[number], self.gates[number]
        lost = step.kind in ("kill Redis", "wipe Redis")  # the last writes may not have reached its file
        fault = self.system.recorder.fault("redis_loss" if lost else "redis_down", note=step.kind)
        eat = partial(gate.eat, count=None, probability=0.05, quiet=0.01)
        acts: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "pause Redis": (node.pause, node.resume),
            "cut Redis": (gate.refuse, gate.accept),
            "eat replies of Redis": (eat, gate.eat_nothing),
        }
        begin, end = acts.get(step.kind, (node.kill, node.start))
        begin()
        if step.kind == "wipe Redis":
            servers.wipe(node)
        return _each(end, fault.end)

    def _break_others(self, step: Step) -> End | None:
        if step.kind == "fill the log's disk":
            if not self._log_disk:
                return None
            full = self.system.recorder.fault("other", note=step.kind)
            return _each(servers.fill(self.logs).unlink, full.end)
        if step.kind == "hold the interpreter":
            return self._hold_interpreter(step)
        kinds = {"zookeeper": "zk_down", "application": "other"}
        fault = self.system.recorder.fault(kinds.get(step.target, "store_down"), note=step.kind)
        if step.kind == "eat commits":
            line = self.lines["application"][step.choice % len(DATABASES)]
            line.eat(b"INSERT INTO", count=None, probability=0.1, quiet=0.02)
            return _each(line.eat_nothing, fault.end)
        server = self.databases.get(step.target, self.zookeeper)
        if isinstance(server, MariaDB):
            if step.kind == "read-only MySQL":
                _sql(server, "SET GLOBAL read_only = 1")
                return _each(lambda: _sql(server, "SET GLOBAL read_only = 0"), fault.end)
            if step.kind == "lock a table":
                held = self._lock_table(server, step)
                return _each(held.close, fault.end)
        elif step.kind == "empty ZooKeeper":
            with fault:
                _empty(server.url)
            return _nothing
        if step.kind.startswith(("kill", "wipe")):
            server.kill()
            if step.kind == "wipe ZooKeeper":
                servers.wipe_zookeeper(self.zookeeper)
            return _each(server.start, fault.end)
        server.pause()
        return _each(server.resume, fault.end)

    def _lock_table(self, server: MariaDB, step: Step) -> Any:
        """Somebody locks a table for writing, or for reading."""
        settings = self.system.settings
        first = list(self.databases.values()).index(server) * settings.databases // len(DATABASES)
        table = range(first, settings.tables, settings.databases)[step.choice % 8]
        held = _connect(server)
        name = task_tables(settings)[table]
        held.cursor().execute(f"LOCK TABLES {name} {'WRITE' if step.choice % 2 else 'READ'}")
        return held

    def _hold_interpreter(self, step: Step) -> End | None:
        """A handler holds the interpreter of its process, which is killed for it in the end."""
        fault = self.system.recorder.fault("kill", note=step.kind)
        try:
            job_id = self.system.client.submit(
                "test.sync", biz_id=2_000_000_000 + step.choice, delay=0.1, attribute={"hold": 60}
            )
        except TocError:  # MySQL is away just now
            fault.end()
            return None
        return lambda: fault.end(pids=sorted({event.pid for event in self.system.starts(job_id)}))

    def supervise(self) -> None:
        """What a service manager does."""
        for one in self.supervised:
            one.supervise()


BACK_SECONDS = 60.0
"""How long a server may take to come back that another fault has killed."""


def _connect(database: MariaDB) -> Any:
    """A connection of our own; a server that another fault has just killed comes back within seconds."""
    url = make_url(database.url)
    connected: list[Any] = []

    def connect() -> bool:
        with suppress(pymysql.err.OperationalError):
            connected.append(
                pymysql.connect(
                    host=url.host,
                    port=database.port,
                    user=url.username,
                    password=str(url.password),
                    autocommit=True,
                )
            )
        return bool(connected)

    assert until(connect, BACK_SECONDS), f"{database} does not come back"
    return connected[0]


def _sql(database: MariaDB, statement: str) -> None:
    with _connect(database) as connection, connection.cursor() as cursor:
        cursor.execute(statement)


def _empty(url: str) -> None:
    """Delete everything that stands in ZooKeeper."""
    client = KazooClient(url, timeout=5)
    client.start(15)
    with closing(client):
        for name in client.get_children("/"):
            if name != "zookeeper":
                with suppress(NoNodeError, NotEmptyError):  # what is made again meanwhile
                    client.delete(f"/{name}", recursive=True)
        client.stop()


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
