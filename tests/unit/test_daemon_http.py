"""The daemon's HTTP server, without its daemon."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from toc.worker.daemon import http
from toc.worker.daemon.http import Answer, listen


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


def test_a_client_that_sends_on_and_on_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, address: tuple[str, int]
) -> None:
    monkeypatch.setattr(http, "REQUEST_SECONDS", 0.5)
    with socket.create_connection(address) as client:
        client.settimeout(0.05)
        client.sendall(b"GET /page HTTP/1.0\r\nX: ")
        assert any(_has_hung_up(client) for _ in range(100))


def _has_hung_up(client: socket.socket) -> bool:
    """Whether the server has, after a moment. Sends one more byte before."""
    try:
        client.sendall(b"x")
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True
