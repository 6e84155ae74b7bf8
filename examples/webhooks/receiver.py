"""A receiver of toc's webhooks with nothing but Python's standard library.

WEBHOOK_SECRET=whsec_... python receiver.py 8080
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOLERANCE_SECONDS = 300
"""How old a request may be: a recorded one cannot be sent again later."""
MAX_BYTES = 4 << 20

SECRET = base64.b64decode(os.environ.get("WEBHOOK_SECRET", "").removeprefix("whsec_"))
seen: set[str] = set()
"""Ids of what was dealt with. A real receiver keeps them in its database, in the transaction of its work."""
lock = threading.Lock()


def verified(headers: dict[str, str], body: bytes) -> bool:
    """Whether a request is from toc, and fresh. During a rotation there are two signatures; one suffices."""
    try:
        age = abs(time.time() - int(headers["webhook-timestamp"]))
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        given = headers["webhook-signature"].split(" ")
    except (KeyError, ValueError):
        return False
    expected = "v1," + base64.b64encode(hmac.digest(SECRET, signed, hashlib.sha256)).decode()
    fits = [hmac.compare_digest(expected.encode(), one.encode()) for one in given]
    return age <= TOLERANCE_SECONDS and any(fits)


class Hooks(BaseHTTPRequestHandler):
    """Answers 204 to what is dealt with, 401 to what is not from toc."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Deal with a task once, however often it is sent."""
        length = min(int(self.headers.get("Content-Length", "0")), MAX_BYTES)
        body = self.rfile.read(length)
        headers = {name.lower(): value for name, value in self.headers.items()}
        if not verified(headers, body):
            self._answer(401)
            return
        with lock:
            first = headers["webhook-id"] not in seen
            seen.add(headers["webhook-id"])
        if first:
            what = {"topic": headers["toc-topic"], "biz_id": headers["toc-biz-id"], "task": json.loads(body)}
            print(json.dumps(what), flush=True)
        self._answer(204)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


if __name__ == "__main__":
    if not SECRET:
        sys.exit("set WEBHOOK_SECRET to what `toc target create` has printed")
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8080), Hooks)
    print(f"listening on {server.server_port}", file=sys.stderr, flush=True)
    server.serve_forever()
