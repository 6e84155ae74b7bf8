"""The daemon's HTTP server, without its daemon."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from toc.worker.daemon.monitor import Answer, listen


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
