"""The line between the daemon and a worker process."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from toc.worker import control
from toc.worker.control import ControlPipe


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
