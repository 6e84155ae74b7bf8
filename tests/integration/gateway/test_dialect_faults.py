"""Rows 43 to 45 of the faults, for each dialect: who dies, who leaves, what comes late or at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.dialect import arrived, ask, port_of, receive, send
from harness.gateway import Gateway
from harness.patience import PATIENCE, until
from harness.system import System

from toc.cli.gateway import http_processes, with_dialects
from toc.model.errors import ConfigError, InvalidInput
from toc.model.task import TaskRow, TaskStatus
from toc.model.topic import Delivery, Topic
from toc.store.tasks.select import Selection


class Speaks(NamedTuple):
    """How tests speak a dialect: a job of topic ``t`` that is due soon, with a ttr of 2 s if it has one."""

    name: str
    push: Callable[[int], object]
    pop: Callable[[int], Any]
    """Returns what came, None if nothing did."""
    own_ttr: bool


def _youzan_pop(port: int) -> Any:
    return ask(port, "POST", "/pop", {"topic": "t"}).json["data"]


def _delay_task_pop(port: int) -> Any:
    return ask(port, "POST", "/delay/task/pull", {"topic": "t"}).json["content"] or None


YOUZAN = Speaks(
    "youzan",
    lambda port: ask(port, "POST", "/push", {"id": "j", "topic": "t", "delay": 1, "ttr": 2, "body": "b"}),
    _youzan_pop,
    True,
)
DELAY_TASK = Speaks(
    "delay-task",
    lambda port: ask(
        port,
        "POST",
        "/delay/task/add",
        {"topic": "t", "timing_moment": int(time.time()) + 1, "content": "b"},
    ),
    _delay_task_pop,
    False,
)


def rows(system: System) -> list[TaskRow]:
    """All rows of the task tables."""
    store = system.center.store
    found: list[TaskRow] = []
    for status in TaskStatus:
        found += store.selections.page(Selection(status), None, 1000).rows
    return found


def popped(speaks: Speaks, port: int, patience: float = PATIENCE) -> Any:
    """Pop until something comes."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            if (got := speaks.pop(port)) is not None:
                return got
        except (AssertionError, ConnectionError, ValueError):  # the process has died
            time.sleep(0.05)
        time.sleep(0.02)
    raise AssertionError("nothing came")


def test_what_was_pulled_of_delay_task_is_processed_only_after_its_answer(
    system: System, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    gateway = Gateway(
        system,
        "--delay-task",
        "127.0.0.1:0",
        env={"TOC_FAILPOINT": "pull.sent:1", "TOC_FAILPOINT_ONCE": str(once)},
    )
    try:
        port = port_of(gateway, "delay-task")
        DELAY_TASK.push(port)
        assert popped(DELAY_TASK, port) == "b"
        assert until(once.exists, 5)
        (row,) = rows(system)
        assert (row.status, row.attempts) == (TaskStatus.PENDING, 1)
    finally:
        gateway.stop()


def test_a_client_that_sends_nothing_more_is_handed_nothing_and_told_nothing(system: System) -> None:
    gateway = Gateway(system, "--youzan", "127.0.0.1:0")
    try:
        port = port_of(gateway, "youzan")
        system.center.store.topics.create(Topic("test.pulled", 90, 4, delivery=Delivery.PULL))
        token = f"Authorization: Bearer {gateway.tokens['all']}"
        calls = [
            (port, "/pop", b'{"topic":"t"}', ()),
            (gateway.port, "/v1/topics/test.pulled:pull", b'{"wait":5}', (token,)),
        ]
        for to, path, body, headers in 5 * calls:  # the end is seen before or after the request
            with send(to, "POST", path, body, headers) as link:
                link.shutdown(socket.SHUT_WR)
                assert link.recv(1000) == b""
    finally:
        assert gateway.stop() == 0


def test_a_stopping_gateway_answers_its_holds(system: System) -> None:
    gateway = Gateway(system, "--youzan", "127.0.0.1:0")
    port = port_of(gateway, "youzan")
    ask(port, "POST", "/push", {"id": "j", "topic": "t", "delay": 3600, "ttr": 60, "body": ""})
    holds = [send(port, "POST", "/pop", b'{"topic":"%b"}' % topic) for topic in (b"t", b"unknown")]
    assert until(lambda: arrived(port, len(holds)))
    assert gateway.stop() == 0
    for link in holds:
        assert receive(link).body.decode() == '{"code":0,"message":"操作成功","data":null}'
        link.close()


def test_ports_of_dialects_open_outside_loopback_only_to_named_networks(system: System) -> None:
    plain = http_processes("127.0.0.1", 0, 1, None, None, [])
    with pytest.raises(ConfigError, match="--dialect-from"):
        with_dialects(plain, {"youzan": "0.0.0.0:0"}, [], [])
    with pytest.raises(InvalidInput, match="numeric address"):
        with_dialects(plain, {"youzan": "localhost:0"}, [], [])
    with pytest.raises(InvalidInput, match="network"):
        with_dialects(plain, {"youzan": "0.0.0.0:0"}, ["nonsense"], [])
    gateway = Gateway(
        system,
        env={
            "TOC_GATEWAY_YOUZAN": "0.0.0.0:0",
            "TOC_GATEWAY_DIALECT_FROM": "192.0.2.0/24 198.51.100.0/24",
            "TOC_GATEWAY_DIALECT_HOST": "queue.example",
        },
    )
    try:
        port = port_of(gateway, "youzan")
        answer = ask(port, "POST", "/get", {"id": "x"}, ["Host: queue.example"])
        assert answer.status == 200, "this machine may always"
        assert ask(port, "POST", "/get", {"id": "x"}, ["Host: other.example"]).status == 403
    finally:
        assert gateway.stop() == 0
