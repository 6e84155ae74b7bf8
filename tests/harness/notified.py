"""A receiver of webhooks about orders: a program of its own without toc, which fails one time in five.

    python -m harness.notified HISTORY

It prints its port, and reads the secret that requests are signed with from stdin. HISTORY is as in
harness.order_clients: ``started`` for each request before it is worked on, ``finished`` before one is
answered well. A request that is not signed as it should is ``refused``.
"""

import base64
import hashlib
import hmac
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from harness.order_clients import History

WORK_SECONDS = 0.2
TOLERANCE_SECONDS = 300


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    history: History
    key = b""
    known = threading.Event()

    def do_POST(self) -> None:
        asked = time.time()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.signed(body):
            self.history.write("refused", self.headers["toc-biz-id"], self.headers["toc-topic"])
            self.answer(400)
            return
        told = json.loads(body)
        order, topic = told["order"], told["topic"]
        self.history.write("started", order, topic, asked=asked, by="shop", dialect=told["dialect"])
        time.sleep(WORK_SECONDS)
        again = f"{self.headers['webhook-id']}/{self.headers['toc-attempt']}"
        if hashlib.sha256(again.encode()).digest()[0] % 5 == 0:
            self.answer(503)
            return
        self.history.write("finished", order, topic, by="shop")
        self.answer(204)

    def signed(self, body: bytes) -> bool:
        """Whether one of its signatures is what the Standard Webhooks specification asks for."""
        self.known.wait()
        began = self.headers["webhook-timestamp"]
        message = f"{self.headers['webhook-id']}.{began}.".encode() + body
        made = "v1," + base64.b64encode(hmac.digest(self.key, message, hashlib.sha256)).decode()
        given = self.headers.get("webhook-signature", "").split(" ")
        recent = abs(time.time() - int(began)) < TOLERANCE_SECONDS
        return recent and any(hmac.compare_digest(made, one) for one in given)

    def answer(self, status: int) -> None:
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing but the history is wanted."""


class Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A sender that was killed has broken its connections off."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def main() -> None:
    """Receive until killed."""
    Handler.history = History(sys.argv[1])
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    threading.Thread(target=server.serve_forever).start()
    Handler.key = base64.b64decode(sys.stdin.readline().strip().removeprefix("whsec_"))
    Handler.known.set()


if __name__ == "__main__":
    main()
