"""Produces and consumes tasks over HTTP with Python's standard library alone.

python mailer.py produce ada grace     submits a mail to each, due in a second
python mailer.py consume               sends what is due, until SIGTERM or Ctrl-C
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from typing import Any

TOC, TOKEN = os.environ["TOC"], os.environ["TOKEN"]
TOPIC = os.environ.get("TOPIC", "mail.send")


class Stop(Exception):
    """The program was told to end."""


class Consumer:
    """Pulls, works, acks. A signal breaks off a pull that waits, and nothing else."""

    def __init__(self) -> None:
        self.stopping = self.waiting = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)

    def stop(self, *_: object) -> None:
        """Take nothing more."""
        self.stopping = True
        if self.waiting:
            raise Stop

    def run(self) -> None:
        """Work until told to stop. What a broken-off pull was given comes again, here or elsewhere."""
        try:
            while not self.stopping:
                self.waiting = True
                found = call(f"topics/{TOPIC}:pull", {"max": 10, "wait": 20, "ttr": 60})
                self.waiting = False
                done = [task["lease"] for task in found["tasks"] if send(task)]
                if done:
                    call("leases:ack", {"leases": done})
        except Stop:
            pass


def send(task: dict[str, Any]) -> bool:
    """Do the work. A task may come twice: whoever really sends uses its job_id as the message's id."""
    try:
        print("sent", task["attribute"]["to"], task["job_id"], flush=True)
    except KeyError as exc:
        call("leases:nack", {"lease": task["lease"], "dead": True, "error": f"there is no {exc}"})
        return False
    return True


def produce(to: str) -> None:
    """Submit one mail. Repeated after a lost answer, it gives the same task."""
    key = f"welcome-{to}"
    task = {"biz_id": to, "delay": 1, "attribute": {"to": to}, "dedup_key": key}
    print("submitted", call(f"topics/{TOPIC}/tasks", task, {"Idempotency-Key": key})["job_id"], flush=True)


def call(path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    """Make a call, again if it is worth it: the gateway is away, busy, or its answer was lost."""
    request = urllib.request.Request(
        f"{TOC}/v1/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", **(headers or {})},
    )
    for attempt in range(8):
        pause = min(0.2 * 2**attempt, 10.0)
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as exc:
            if exc.code not in (429, 503):
                raise SystemExit(f"{path}: {exc.code} {exc.read().decode()}") from None
            pause = max(pause, float(exc.headers.get("Retry-After", 0)))
        except OSError as exc:
            print("again:", exc, file=sys.stderr)
        time.sleep(pause * random.uniform(0.5, 1.0))
    raise SystemExit(f"{path}: no answer after 8 attempts")


if __name__ == "__main__":
    if sys.argv[1:] == ["consume"]:
        Consumer().run()
    else:
        for name in sys.argv[2:]:
            produce(name)
