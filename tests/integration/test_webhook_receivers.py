"""Receivers of webhooks: the reference library of JavaScript, and the examples."""

import base64
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.programs import need

from toc.webhooks.request import signature

EXAMPLES = Path(__file__).parents[2] / "examples" / "webhooks"
KEYS = [bytes(range(24)), bytes(range(100, 132))]
SECRETS = ["whsec_" + base64.b64encode(key).decode() for key in KEYS]


def message(keys: list[bytes], body: bytes, *, age: int = 0) -> dict[str, str]:
    now = int(time.time()) - age
    return {
        "webhook-id": "42_0",
        "webhook-timestamp": str(now),
        "webhook-signature": signature(keys, "42_0", now, body),
        "toc-topic": "order.paid",
        "toc-biz-id": "7",
    }


@contextmanager
def running(program: str, script: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [program, str(EXAMPLES / script), "0"]
    env = {**os.environ, "WEBHOOK_SECRET": SECRETS[1]}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            port = int(process.stderr.readline().rpartition(" ")[2])
            yield process, port
        finally:
            process.terminate()


def post(port: int, headers: dict[str, str], body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/hooks", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(("program", "script"), [(sys.executable, "receiver.py"), ("node", "receiver.js")])
def test_the_examples_take_what_is_signed_and_fresh_once_and_nothing_else(program: str, script: str) -> None:
    need(program)
    body = b'{"amount":12}'
    with running(program, script) as (process, port):
        assert post(port, message(KEYS, body), body) == 204, "the second of two signatures is its own"
        assert post(port, message(KEYS, body), body) == 204
        assert post(port, message(KEYS, body), b'{"amount":13}') == 401
        assert post(port, message(KEYS[:1], body), body) == 401
        assert post(port, message(KEYS, body, age=3600), body) == 401
        assert post(port, {}, body) == 401
        process.terminate()
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    assert list(map(json.loads, lines)) == [{"topic": "order.paid", "biz_id": "7", "task": {"amount": 12}}]
