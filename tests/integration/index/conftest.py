"""The index on a real server, and the whole state of a slot to seed and to compare."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol, TypeVar, cast

import pytest
from harness.secured import SECURED
from structlog.testing import capture_logs
from structlog.typing import EventDict

from benchmarks.local import RedisServer
from toc.index.queues import Queues
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot

State = dict[str, Any]
T = TypeVar("T")


def answered(reply: T | IndexUnavailable) -> T:
    """What the index answered, as it did."""
    assert not isinstance(reply, IndexUnavailable)
    return reply


SCRIPTS = ("test_transitions", "test_permits")
"""What is asked of Valkey, too: each script does the same there."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames and metafunc.definition.path.stem in SCRIPTS and not SECURED:
        # the wheel's Valkey is built without TLS
        metafunc.parametrize("server", ["clean_redis", "clean_valkey"], indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> RedisServer:
    """Redis, or Valkey, empty."""
    return cast(RedisServer, request.getfixturevalue(getattr(request, "param", "clean_redis")))


@pytest.fixture
def queues(server: RedisServer) -> Iterator[Queues]:
    with closing(Queues(server.url)) as queues:
        yield queues


@pytest.fixture
def logged() -> Iterator[list[EventDict]]:
    """What is logged during the test, at every level."""
    with capture_logs() as events:
        yield events


class Seed(Protocol):
    """Writes one whole slot."""

    def __call__(self, slot: Slot, **queues: dict[int, float]) -> None: ...


@pytest.fixture
def seed(server: RedisServer, queues: Queues) -> Seed:
    """``seed(slot, store={1: 10.0}, prepare={...}, dead={...})``."""

    def write(slot: Slot, **content: dict[int, float]) -> None:
        for queue, entries in content.items():
            for job_id, score in entries.items():
                server.call("ZADD", getattr(queues.keys(slot), queue), f"{score:.17g}", job_id)

    return write


@pytest.fixture
def state_of() -> Callable[[RedisServer], State]:
    """Everything that a server holds: key -> {job_id: score}, hash or text."""
    return _state


@pytest.fixture
def state(server: RedisServer) -> Callable[[], State]:
    """Everything that the server holds: key -> {job_id: score}, hash or text."""
    return lambda: _state(server)


@pytest.fixture
def now_ms(server: RedisServer) -> Callable[[], int]:
    """The server's clock."""

    def read() -> int:
        seconds, micros = cast(list[str], server.call("TIME"))
        return int(seconds) * 1000 + int(micros) // 1000

    return read


def _state(server: RedisServer) -> State:
    found: State = {}
    for key in cast(list[str], server.call("KEYS", "*")):
        kind = server.call("TYPE", key)
        if kind == "zset":
            flat = cast(list[str], server.call("ZRANGE", key, 0, -1, "WITHSCORES"))
            entries = zip(flat[::2], flat[1::2], strict=True)
            found[key] = {int(job_id): float(score) for job_id, score in entries}
        elif kind == "hash":
            flat = cast(list[str], server.call("HGETALL", key))
            found[key] = dict(zip(flat[::2], flat[1::2], strict=True))
        else:
            found[key] = server.call("GET", key)
    return found
