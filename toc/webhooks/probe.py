"""One request to a target that belongs to no task: ``toc target test``."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import NamedTuple

from toc.model.target import Allow, Target, TargetSecrets
from toc.webhooks.request import JSON, signed
from toc.webhooks.sender import Sender

TEST_TOPIC = "toc.test"


class TestAnswer(NamedTuple):
    """What a target has answered. ``status`` is None without an answer, and ``error`` says why.

    ``text`` is the beginning of the answer, ``seconds`` how long it took.
    """

    status: int | None
    seconds: float
    text: str
    error: str


def send_test(target: Target, opened: TargetSecrets, allow: Allow) -> TestAnswer:
    """Send a target a request that is signed as all are. Raises nothing for what the receiver does."""
    return asyncio.run(_send(target, opened, allow))


async def _send(target: Target, opened: TargetSecrets, allow: Allow) -> TestAnswer:
    body = b'{"test":true}'
    now = time.time()
    headers = signed(
        {"toc-topic": TEST_TOPIC, "toc-attempt": "1"},
        f"test_{secrets.token_hex(12)}",
        body,
        JSON,
        keys=opened.signing(target, int(now * 1000)),
        timestamp=int(now),
        own=opened.headers,
    )
    sender = Sender(allow)
    try:
        answer = await sender.send(target.url, headers, body, target.timeout)
    finally:
        await sender.close()
    text, error = (answer.text, "") if answer.status is not None else ("", answer.text)
    return TestAnswer(answer.status, answer.ms / 1000, text, error)
