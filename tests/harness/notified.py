"""A receiver of webhooks about orders: a program of its own without toc, which fails one time in five.

    python -m harness.notified HISTORY

It prints its port, and reads the secret that requests are signed with from stdin. HISTORY gets one JSON line
for each request, on the disk before it is worked on (``got``), and one before it is answered (``answered``);
``port`` is that of the sender's end of the connection. A request that is not signed as it should, or says
anything but what the producer has submitted, is ``refused``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from harness.replay import History

WORK_SECONDS = 0.2
TOLERANCE_SECONDS = 300


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    history: History
    key = b""
    known = threading.Event()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        order, topic = self.headers["toc-biz-id"], self.headers["toc-topic"]
        more = {
            "id": self.headers["webhook-id"],
            "attempt": int(self.headers["toc-attempt"]),
            "port": self.client_address[1],
        }
        if not self.signed(body) or json.loads(body) != {"note": f"deadline of {order}"}:
            self.history.write("refused", order, topic, **more)
            self.answer(400)
            return
        self.history.write("got", order, topic, **more)
        time.sleep(WORK_SECONDS)
        chance = hashlib.sha256(f"{more['id']}/{more['attempt']}".encode()).digest()[0]
        status = 503 if chance % 5 == 0 else 204
        self.history.write("answered", order, topic, status=status, **more)
        self.answer(status)

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
