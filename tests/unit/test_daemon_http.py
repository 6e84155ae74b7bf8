"""The daemon's HTTP server, without its daemon."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from harness.patience import PATIENCE

from toc.worker.daemon.monitor import MAX_AT_ONCE, Answer, listen


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """That of a server."""
    server = listen("127.0.0.1:0", {"/page": lambda accept: Answer(accept.encode())})
    serving = threading.Thread(target=server.serve_forever, args=[0.01])
    serving.start()
    yield "127.0.0.1", server.server_address[1]
    server.shutdown()
    serving.join()
    server.server_close()


def test_a_request_in_pieces_is_answered(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as client, client.makefile("rb") as answer:
        for piece in (b"GET /page?x HT", b"TP/1.0\r\nAcc", b"ept: what is wanted\r\n\r", b"\n"):
            client.sendall(piece)
            time.sleep(0.02)
        assert answer.read().endswith(b"\r\n\r\nwhat is wanted")


def test_of_too_many_connections_the_oldest_goes_and_the_newest_is_answered(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr("toc.worker.daemon.monitor.WAIT_SECONDS", 600.0)
    address = request.getfixturevalue("address")
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(address, PATIENCE)) for _ in range(2 * MAX_AT_ONCE)
        ]
        for client in slow:
            client.sendall(b"G")
        assert [client.recv(1) for client in slow[:MAX_AT_ONCE]] == [b""] * MAX_AT_ONCE
        with socket.create_connection(address, PATIENCE) as client:
            client.sendall(b"GET /page HTTP/1.0\r\nAccept: all\r\n\r\n")
            assert client.makefile("rb").read().endswith(b"all")
