"""Wake-ups: what is due earlier is heard of, what is not is not, and nothing is missed for good."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
from conftest import Launch
from harness.patience import until

from benchmarks.local import RedisCluster, RedisServer
from toc.index import wake
from toc.index.messages import PrepareRequest
from toc.index.nodes import RedisNode
from toc.index.queues import Queues
from toc.index.wake import WakeListener
from toc.index.wire import Wire
from toc.model.errors import IndexUnavailable
from toc.model.scores import fence
from toc.model.topic import Slot

SLOT, OTHER = Slot("order.close", 3), Slot("order.close", 4)
MISSED = (None, None)


class Ear:
    """A listener in its thread, with what it heard."""

    def __init__(self, queues: Queues, slots: Iterable[Slot]) -> None:
        self.heard: queue.Queue[tuple[Slot | None, int | None]] = queue.Queue()
        self.listener: WakeListener = queues.listener()
        self.listener.set_slots(slots)
        self.thread = threading.Thread(target=self.listener.run, args=(self._hear,))
        self.thread.start()

    def _hear(self, slot: Slot | None, due_ms: int | None) -> None:
        self.heard.put((slot, due_ms))

    def next(self) -> tuple[Slot | None, int | None]:
        return self.heard.get(timeout=60)

    def stop(self) -> None:
        self.listener.stop()
        self.thread.join(60)
        assert not self.thread.is_alive(), "it listens still"


Listen = Callable[[Queues, Iterable[Slot]], Ear]


@pytest.fixture
def listen() -> Iterator[Listen]:
    """Starts listeners, which end with the test."""
    ears: list[Ear] = []

    def start(queues: Queues, slots: Iterable[Slot]) -> Ear:
        ears.append(Ear(queues, slots))
        return ears[-1]

    yield start
    for ear in ears:
        ear.stop()


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When listeners tried to connect."""
    times: list[float] = []
    take = RedisNode.take

    def timed(node: RedisNode) -> Wire:
        times.append(time.monotonic())
        return take(node)

    monkeypatch.setattr(RedisNode, "take", timed)
    return times


def test_an_earlier_task_wakes_and_a_later_one_does_not(queues: Queues, listen: Listen) -> None:
    ear = listen(queues, [SLOT])
    assert ear.next() == MISSED
    queues.add({SLOT: [(1, 100.0)]})
    queues.add({SLOT: [(2, 100.0), (3, 200.0)]})
    queues.add({SLOT: [(1, 150.0)]})
    queues.add({SLOT: [(4, 300.0), (5, 50 + 31 / 32)]})
    queues.add({OTHER: [(6, 1.0)]})
    queues.add({SLOT: [(2, 40.0)]})
    assert [ear.next() for _ in range(3)] == [(SLOT, 100), (SLOT, 50), (SLOT, 40)]
    assert ear.heard.empty()


def test_rollback_reschedule_and_redrive_wake_too(queues: Queues, listen: Listen) -> None:
    queues.add({SLOT: [(1, 1.0), (2, 2.0), (3, 9e12)]})
    queues.prepare([PrepareRequest(SLOT, 9, 16, 7)])
    ear = listen(queues, [SLOT])
    assert ear.next() == MISSED
    own = fence(16, 7)
    assert queues.rollback({SLOT: [(1, own, 8e12)]}) == {SLOT: [True]}
    assert ear.next() == (SLOT, 8_000_000_000_000)
    assert queues.rollback({SLOT: [(1, own, 1.0)]}) == {SLOT: [False]}
    queues.reschedule(SLOT, 3, 8.5e12)
    queues.reschedule(SLOT, 3, 7e12)
    assert ear.next() == (SLOT, 7_000_000_000_000)
    assert queues.bury({SLOT: [(2, own, 5)]}) == {SLOT: [True]}
    assert queues.redrive({SLOT: [(2, 6e12)]}) == {SLOT: 1}
    assert ear.next() == (SLOT, 6_000_000_000_000)
    assert ear.heard.empty()


def test_a_change_of_slots_is_followed(queues: Queues, listen: Listen) -> None:
    ear = listen(queues, [SLOT])
    assert ear.next() == MISSED
    ear.listener.set_slots([OTHER])
    assert ear.next() == MISSED
    queues.add({SLOT: [(1, 100.0)]})
    queues.add({OTHER: [(1, 90.0)]})
    assert ear.next() == (OTHER, 90)
    ear.listener.set_slots([SLOT, OTHER])
    assert ear.next() == MISSED
    queues.add({SLOT: [(1, 50.0)]})
    assert ear.next() == (SLOT, 50)
    assert ear.heard.empty()


def test_after_a_broken_connection_everything_is_to_be_looked_at_and_then_heard(
    queues: Queues, listen: Listen, server: RedisServer
) -> None:
    ear = listen(queues, [SLOT])
    assert ear.next() == MISSED
    assert server.call("CLIENT", "KILL", "TYPE", "pubsub") == 1
    assert ear.next() == MISSED
    queues.add({SLOT: [(1, 100.0)]})
    assert ear.next() == (SLOT, 100)


def test_a_listener_waits_for_a_server_that_comes_later(launch: Launch, listen: Listen) -> None:
    server = launch(RedisServer)
    server.kill()
    queues = Queues(server.url)
    ear = listen(queues, [SLOT])
    assert isinstance(queues.peek([SLOT])[SLOT], IndexUnavailable)
    server.start()
    assert ear.next() == MISSED
    queues.close()


@pytest.mark.parametrize("text", ["", "nan", "inf", "-inf", "1e400", "1e17", "-1", "hello", "\x00", "\u0663"])
def test_a_message_that_is_no_instant_means_look_now(
    queues: Queues, listen: Listen, server: RedisServer, text: str
) -> None:
    ear = listen(queues, [SLOT])
    assert ear.next() == MISSED
    assert server.call("PUBLISH", queues.keys(SLOT).channel, text) == 1
    queues.add({SLOT: [(1, 100.0)]})
    assert ear.next() in ((SLOT, 0), (SLOT, 1))
    assert ear.next() == (SLOT, 100)


def test_each_node_is_heard_on_a_connection_of_its_own(clean_cluster: RedisCluster, listen: Listen) -> None:
    queues = Queues(clean_cluster.url)
    slots = [Slot("order.close", number) for number in range(64)]
    ear = listen(queues, slots)
    assert [ear.next() for _ in range(3)] == [MISSED] * 3
    assert queues.add({slot: [(1, 100.0 + slot.number)] for slot in slots}) == dict.fromkeys(slots, 1)
    assert {ear.next() for _ in slots} == {(slot, 100 + slot.number) for slot in slots}
    clients = [str(node.call("CLIENT", "LIST", "TYPE", "pubsub")) for node in clean_cluster.nodes]
    assert [text.count(" addr=") for text in clients] == [1, 1, 1]
    queues.close()


def test_stop_ends_it_at_once_whatever_it_is_doing(
    queues: Queues, listen: Listen, attempts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    early = queues.listener()
    early.stop()
    early.run(lambda _slot, _due: None)
    listening = listen(queues, [SLOT])
    assert listening.next() == MISSED
    listening.stop()
    monkeypatch.setattr(wake, "random", SimpleNamespace(uniform=lambda *_: 1200.0))
    before = len(attempts)
    with closing(Queues("redis://127.0.0.1:1")) as nowhere:
        pausing = listen(nowhere, [SLOT])
        assert until(lambda: len(attempts) > before, 60)
        pausing.stop()  # else it would try again after ten minutes
        pausing.stop()
