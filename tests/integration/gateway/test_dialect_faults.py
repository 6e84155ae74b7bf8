"""Rows 43 and 44 of the faults at the dialects: who dies, who leaves, who may come at all."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from harness.dialect import arrived, ask, popped, port_of, receive, send
from harness.gateway import Gateway
from harness.patience import until
from harness.system import System

from toc.cli.gateway import http_processes, with_dialects
from toc.model.errors import ConfigError, InvalidInput
from toc.model.task import TaskStatus
from toc.model.topic import Delivery, Topic


def test_what_was_pulled_of_delay_task_is_processed_only_after_its_answer(
    system: System, tmp_path: Path
) -> None:
    once = tmp_path / "once"
    with Gateway(
        system,
        "--delay-task",
        "127.0.0.1:0",
        env={"TOC_FAILPOINT": "pull.sent:1", "TOC_FAILPOINT_ONCE": str(once)},
    ) as gateway:
        port = port_of(gateway, "delay-task")
        task = {"topic": "t", "timing_moment": int(time.time()) + 1, "content": "b"}
        biz_id = ask(port, "POST", "/delay/task/add", task).json["task_id"]

        def content() -> str | None:
            return ask(port, "POST", "/delay/task/pull", {"topic": "t"}).json["content"] or None

        assert popped(content) == "b"
        assert until(once.exists, 5)
        (found,) = system.center.find(biz_id=biz_id)
        assert (found.status, system.row(found.job_id).attempts) == (TaskStatus.PENDING, 1)


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
