"""Fault 47: the server of the token table is away, and tokens are revoked under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from fault.conftest import Build, Verdict
from harness.clocks import PushedClock
from harness.gateway import Gateway
from harness.patience import until
from harness.system import System

from benchmarks.local import MariaDB
from toc.model.access import Role
from toc.model.errors import TokensUnavailable
from toc.model.sharding import BizId
from toc.operate.tokens import KEPT_SECONDS, TokenBook, create_token

ROUNDS = 3
SENDERS = 4
"""Threads of each gateway that send requests with the token that is revoked."""


@pytest.fixture
def tokens_apart(
    build: Build, mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[System, MariaDB]]:
    """The tables of topics and tokens, and half of the tasks, stand on the server that the test may stop."""
    with MariaDB(tmp_path_factory.mktemp("tokens"), buffer_pool="64M") as server:
        yield build(slots=1, database_urls=[server.url, mariadb.url], read_timeout=2), server
        server.resume()


@pytest.mark.slow
def test_known_tokens_hold_for_ten_minutes_while_their_table_is_away_and_no_longer(
    tokens_apart: tuple[System, MariaDB], verdict: Verdict
) -> None:
    line = verdict(47, "the server of the token table hangs", "for ten minutes of a clock put forward")
    system, server = tokens_apart
    clock = PushedClock()
    book = TokenBook(system.center.store.tokens, clock)
    gateway = Gateway(system, env={"TOC_READ_TIMEOUT": "2"})
    there = [n for n in range(100_000) if BizId.of(n).crc % 8 % 2 == 1]
    try:
        known = gateway.make_token("known", "produce")
        brief = create_token(
            system.center.store, "brief", roles=[Role.READ], topics=["*"], clock=clock, by="test", expires=3
        ).secret
        book.run_once()
        assert book.find(known)
        assert book.find(brief)
        server.pause()
        book.run_once()
        served = 0
        began = time.monotonic()
        while time.monotonic() - began < 4:
            reply = gateway.call(
                "POST", "/v1/topics/test.sync/tasks", {"biz_id": there[served], "delay": 60}, token="known"
            )
            assert reply.status == 201, reply
            served += 1
        assert gateway.call("GET", "/v1/topics", token="toc_unknown").status == 503
        clock.pushed = KEPT_SECONDS - 30
        book.run_once()
        assert KEPT_SECONDS == 600
        assert book.find(known)
        assert book.find(brief) is None, "its own end comes all the same"
        clock.pushed = KEPT_SECONDS + 1
        with pytest.raises(TokensUnavailable):
            book.find(known)
        assert not book.known
        server.resume()
        assert until(lambda: book.run_once() >= 0 and book.known, 30)
        assert book.find(known)
        assert until(lambda: gateway.call("GET", "/v1/topics", token="toc_unknown").status == 401, 30)
        line.prove(served > 3, f"{served} submits to the other server were served meanwhile")
        line.tasks = served
    finally:
        server.resume()
        gateway.stop()


def test_a_token_that_is_revoked_under_load_ends_on_every_gateway(build: Build, verdict: Verdict) -> None:
    line = verdict(47, "tokens revoked under load", f"{ROUNDS} tokens, two gateways")
    system = build(hosts=True, slots=1)
    here = Gateway(system)
    there = Gateway(system, host="away", beside=here)
    took: list[float] = []
    served = 0
    try:
        for number in range(ROUNDS):
            name = f"token-{number}"
            here.make_token(name, "produce")
            assert until(lambda: there.call("GET", "/v1/tasks/1", token=name).status != 401, 10)  # noqa: B023
            last = dict.fromkeys(range(2 * SENDERS), 0.0)
            """When each sender's last request that was served began."""
            counts = dict.fromkeys(last, 0)
            over = threading.Event()

            def send(n: int, name: str = name) -> None:
                gateway = (here, there)[n % 2]
                while not over.is_set():  # noqa: B023
                    began = time.monotonic()
                    task = {"biz_id": n, "delay": 3600}
                    reply = gateway.call("POST", "/v1/topics/test.sync/tasks", task, token=name)
                    if reply.status == 401:
                        return
                    assert reply.status == 201, reply
                    last[n] = began  # noqa: B023
                    counts[n] += 1  # noqa: B023

            senders = [threading.Thread(target=send, args=(n,)) for n in last]
            for sender in senders:
                sender.start()
            assert until(lambda: min(counts.values()) > 3, 20)  # noqa: B023
            assert here.call("DELETE", f"/v1/tokens/{name}").status == 200
            revoked = time.monotonic()
            for sender in senders:
                sender.join(60)
            still = [sender for sender in senders if sender.is_alive()]
            over.set()
            assert not still, "it is served without end"
            took.append(max(0.0, max(last.values()) - revoked))
            served += sum(counts.values())
    finally:
        there.stop()
        here.stop()
    took.sort()
    text = f"{served} requests; each gateway refused them within {1000 * took[-1]:.0f} ms"
    line.prove(served > ROUNDS * 2 * SENDERS * 3, text)
    line.tasks = served
    line.within(took[len(took) // 2], 1.0)
    line.within(took[-1], 3.0)  # 1 s where nothing else runs
