"""The line between the daemon and a worker process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from toc import Topic
from toc.model.topic import Backoff, TopicType
from toc.worker import control
from toc.worker.control import ControlPipe

TOPIC = Topic("order.close", 7, 16, TopicType.INSTANT, backoff=Backoff.IMMEDIATE, paused=True, horizon=60)


@pytest.fixture
def ends() -> Iterator[tuple[ControlPipe, ControlPipe]]:
    ours, theirs = map(ControlPipe, socket.socketpair())
    with closing(theirs), closing(ours):
        yield ours, theirs


def test_what_was_sent_first_is_read_alone_and_the_rest_stays(ends: tuple[ControlPipe, ControlPipe]) -> None:
    daemon, process = ends
    daemon.send("known", topics=[TOPIC.values()])
    daemon.send("dead", workers=["a"])
    daemon.send("stop")
    told = process.first()
    assert told is not None
    assert [Topic.of(values) for values in told["topics"]] == [TOPIC]
    assert [message["kind"] for message in process.receive()] == ["dead", "stop"]


def test_a_daemon_that_says_nothing_or_is_gone_is_not_waited_for(
    ends: tuple[ControlPipe, ControlPipe],
) -> None:
    daemon, process = ends
    assert process.first() is None
    daemon.close()
    assert process.first() is None


@pytest.mark.parametrize(
    "line",
    [b"1", b"null", b"[]", b"{}", b'{"kind": 1}', b"[" * 100_000, b"no JSON", b"", b"\xff", b"1" * 5000],
)
def test_a_line_that_is_no_message_is_malformed_and_the_next_one_is_read(line: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(ControlPipe(ours)) as daemon:
        theirs.sendall(line + b"\n")
        with pytest.raises(ValueError, match=r"."):
            daemon.receive()
        theirs.sendall(b'{"kind":"left"}\n')
        assert daemon.receive() == [{"kind": "left"}]


def test_a_line_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_LINE_BYTES", 1_000_000)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs, closing(ControlPipe(ours)) as daemon:
        for _ in range(10):
            assert theirs.send(b"x" * 100_000) == 100_000
            assert daemon.receive() == []
        theirs.send(b"x")
        with pytest.raises(ValueError, match="without an end"):
            daemon.receive()
