"""Time-outs that the kernel keeps."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator

import pytest

from toc.sockets import keep_timeouts


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, other = socket.socketpair()
    with ours, other:
        yield ours, other


def test_a_read_of_a_silent_peer_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    assert keep_timeouts(ours, 0.05, 5)
    assert ours.gettimeout() is None, "Python waits for nothing itself"
    began = time.monotonic()
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    assert time.monotonic() - began > 0.04


def test_a_write_to_a_peer_that_reads_nothing_ends(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    assert keep_timeouts(ours, 5, 0.05)
    with pytest.raises(BlockingIOError):
        ours.sendall(bytes(1 << 24))


def test_a_socket_whose_descriptor_never_blocks_keeps_its_own_time_outs(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair
    ours.settimeout(5)
    monkeypatch.setattr("os.get_blocking", lambda _: False)  # as of gevent's and eventlet's
    assert not keep_timeouts(ours, 1, 1)
    assert ours.gettimeout() == 5


def test_tls_keeps_pythons_own_time_outs(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = pair
    ours.settimeout(0.05)
    secure = ssl.create_default_context().wrap_socket(
        ours, server_hostname="toc.test", do_handshake_on_connect=False
    )
    with secure:
        assert not keep_timeouts(secure, 1, 1)
        assert secure.gettimeout() == 0.05
