"""The test application in processes in which names that begin with ``hang`` are looked up for a minute."""

import socket
import time
from typing import Any

from harness import app

center = app.center

_usual = socket.getaddrinfo


def _look_up(host: Any, *args: Any, **more: Any) -> Any:
    if str(host).startswith("hang"):
        time.sleep(60)
    return _usual(host, *args, **more)


socket.getaddrinfo = _look_up
