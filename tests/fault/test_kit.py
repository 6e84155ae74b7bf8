"""The kit itself: what it breaks is broken, and what it counts has happened."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault.kit import servers
from fault.kit.proxy import Proxy
from fault.kit.servers import Reshard, ShiftedRedis
from fault.kit.table import Line

from toc.dev.local.process import until
from toc.dev.local.servers import RedisCluster, RedisServer

Relay = Callable[..., Proxy]


class Client:
    """Sends a line, reads a line."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=5)
        self.stream = self.socket.makefile("rwb")

    def ask(self, line: bytes) -> bytes:
        self.stream.write(line + b"\n")
        self.stream.flush()
        return self.stream.readline().strip()

    def close(self) -> None:
        self.stream.close()
        self.socket.close()


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends lines back; its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            try:
                for line in stream:
                    stream.write(line)
                    stream.flush()
            except OSError:
                pass

    def listen() -> None:
        try:
            while True:
                threads.append(threading.Thread(target=serve, args=(listener.accept()[0],)))
                threads[-1].start()
        except OSError:
            pass

    threads.append(threading.Thread(target=listen))
    threads[0].start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in threads:
        thread.join()


def test_a_proxy_lets_pass_cuts_and_refuses(relay: Relay, echo: int) -> None:
    proxy = relay(echo)
    client = Client(proxy.port)
    assert client.ask(b"one") == b"one"
    assert proxy.refuse() == 1
    assert client.stream.readline() == b""
    client.close()
    refused = Client(proxy.port)
    assert refused.stream.readline() == b""
    refused.close()
    proxy.accept()
    again = Client(proxy.port)
    assert again.ask(b"two") == b"two"
    again.close()
    assert (proxy.stats.connections, proxy.stats.cut, proxy.stats.refused) == (2, 1, 1)


def test_a_proxy_holds_back_and_delays(relay: Relay, echo: int) -> None:
    proxy = relay(echo)
    client = Client(proxy.port)
    client.ask(b"open")
    proxy.stall()
    client.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.ask(b"held back")
    client.close()
    proxy.flow()
    client = Client(proxy.port)
    proxy.delay(0.2)
    began = time.monotonic()
    assert client.ask(b"late") == b"late"
    assert time.monotonic() - began >= 0.2
    assert proxy.stats.delayed == 1
    client.close()


def test_a_proxy_eats_the_replies_that_its_seed_chooses(relay: Relay, echo: int) -> None:
    eaten = []
    for seed in (1, 1, 2):
        proxy = relay(echo, seed=seed)
        proxy.eat(b"take", count=None, probability=0.3, quiet=0.01)
        lost = []
        client = Client(proxy.port)
        for number in range(60):
            word = b"take" if number % 2 else b"other"
            if not client.ask(word):
                lost.append(number)
                client.close()
                client = Client(proxy.port)
        client.close()
        assert len(lost) == proxy.stats.eaten
        assert proxy.stats.matched == 30
        assert all(number % 2 for number in lost)
        eaten.append(lost)
    assert eaten[0] == eaten[1] != eaten[2]


def test_a_replica_that_is_paused_misses_writes_and_can_be_promoted(
    launch: Callable[..., RedisServer],
) -> None:
    master, replica = launch(RedisServer), launch(RedisServer)
    master.call("SET", "seen", "1")
    servers.replicate(replica, master)
    servers.pause_replication(replica)
    master.call("SET", "missed", "1")
    servers.promote(replica)
    assert (replica.call("GET", "seen"), replica.call("GET", "missed")) == ("1", None)
    replica.call("SET", "writable", "1")


def test_data_can_be_wiped_and_set_back(launch: Callable[..., RedisServer]) -> None:
    server = launch(RedisServer, aof=False)
    server.call("SET", "old", "1")
    aside = servers.save_aside(server)
    server.call("SET", "new", "1")
    server.kill()
    servers.restore(server, aside)
    server.start()
    assert (server.call("GET", "old"), server.call("GET", "new")) == ("1", None)
    server.kill()
    servers.wipe(server)
    server.start()
    assert server.call("DBSIZE") == 0


def test_a_hash_slot_moves_with_its_keys(launch: Callable[..., RedisCluster]) -> None:
    cluster = launch(RedisCluster)
    reshard = Reshard(cluster)
    slot = int(str(cluster.nodes[0].call("CLUSTER", "KEYSLOT", "{a}x")))
    source = reshard.owner(slot)
    cluster.nodes[source].call("SET", "{a}x", "1")
    target = (source + 1) % 3
    reshard.move(slot, target)
    assert reshard.owner(slot) == target
    assert cluster.nodes[target].call("GET", "{a}x") == "1"
    assert (reshard.moved_slots, reshard.moved_keys) == (1, 1)


def test_the_clock_of_a_running_server_can_be_shifted(launch: Callable[..., ShiftedRedis]) -> None:
    server = launch(ShiftedRedis)
    for seconds in (0, 30, -30, 0):
        server.clock.shift(seconds)
        assert until(lambda: abs(server.now() - time.time() - seconds) < 0.5, 60), seconds  # noqa: B023


def test_a_small_disk_gets_full(small_disk: Callable[..., Path]) -> None:
    disk = small_disk(4)
    ballast = servers.fill(disk)
    with pytest.raises(OSError, match="No space") as caught:
        (disk / "more").write_bytes(b"x" * 100_000)
    assert caught.value.errno == errno.ENOSPC
    ballast.unlink()
    (disk / "more").write_bytes(b"x" * 100_000)


def test_a_line_wants_a_proof_that_the_fault_bit() -> None:
    line = Line(1, "a fault")
    with pytest.raises(AssertionError, match="did not bite: 0 replies eaten"):
        line.prove(0 > 1, "0 replies eaten")
    assert line.proof == ""
    line.prove(True, "2 replies eaten")
    assert line.proof == "2 replies eaten"
    with pytest.raises(AssertionError, match=r"promised were 1 s"):
        line.settled(2.0, within=1)
