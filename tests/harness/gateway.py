"""A gateway on real servers: one daemon with an HTTP process and a worker without handlers."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.sessions import kill_session
from harness.system import System
from toc.dev.local.process import until
from toc.model.access import Role
from toc.operate.tokens import create_token


class Reply(NamedTuple):
    status: int
    body: Any
    headers: Mapping[str, str]


class Gateway:
    """A ``toc gateway`` on a port of its own, and a way to call it."""

    def __init__(self, system: System, *options: str, env: Mapping[str, str] | None = None) -> None:
        http_processes = int(options[options.index("--processes") + 1]) if "--processes" in options else 1
        self.system = system
        self.log = system.directory / "gateway.log"
        self.tokens: dict[str, str] = {}
        self._connections = threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "toc", "gateway", "--port", "0", *options],
                env={**system.env, "TOC_HOST": "gate", **(env or {})},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        system.wait(
            lambda: self.told().count("worker_ready") > http_processes or self.process.poll() is not None,
            "ready",
            60,
        )
        found = re.search(r"gateway at https?://\S+:(\d+)", self.told())
        assert found, self.told()
        self.port = int(found[1])
        if "--plain-from" not in options:
            self.make_token("all", "admin")

    def told(self) -> str:
        return self.log.read_text()

    def make_token(self, name: str, *roles: str, topics: tuple[str, ...] = ("*",), **limits: Any) -> str:
        """Make a token, and wait until the gateway knows it."""
        center = self.system.center
        made = create_token(
            center.store,
            name,
            roles=[Role(role) for role in roles],
            topics=list(topics),
            clock=center.clock,
            by="test",
            **limits,
        )
        self.tokens[name] = made.secret
        assert until(lambda: self.call("GET", "/v1/nothing").status == 404, 10)
        assert until(lambda: self.call("GET", "/v1/tasks/1", token=name).status != 401, 10)
        return made.secret

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = "all",
        headers: Mapping[str, str] | None = None,
        attempts: int = 2,
    ) -> Reply:
        """Make one request. A body that is no bytes is made JSON."""
        sent = {} if token is None else {"Authorization": f"Bearer {self.tokens.get(token, token)}"}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            sent["Content-Type"] = "application/json"
        connection: http.client.HTTPConnection | None = getattr(self._connections, "one", None)
        for attempt in range(attempts):
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
                self._opened.append(connection)
            try:
                connection.request(method, path, data, {**sent, **(headers or {})})
                answer = connection.getresponse()
                content = answer.read()
                break
            except (http.client.RemoteDisconnected, ConnectionError):
                connection.close()
                connection = self._connections.one = None
                if attempt == attempts - 1:
                    raise
        assert connection is not None
        self._connections.one = connection
        if answer.getheader("Connection") == "close":
            connection.close()
            self._connections.one = None
        kind = answer.getheader("Content-Type", "")
        return Reply(
            answer.status,
            json.loads(content) if "json" in kind and content else content,
            {k.lower(): v for k, v in answer.headers.items()},
        )

    def call_once(self, method: str, path: str, body: Any = None) -> Reply:
        """Make one request, and no second one if its connection breaks."""
        return self.call(method, path, body, attempts=1)

    def submit(self, topic: str = "test.sync", **task: Any) -> Reply:
        """Submit one task, by default an hour ahead."""
        return self.call("POST", f"/v1/topics/{topic}/tasks", {"biz_id": 1, "delay": 3600, **task})

    def children(self, module: str = "toc.gateway.process") -> list[int]:
        """The pids of its HTTP processes (or of its workers) that live."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if module in Path(f"/proc/{pid}/cmdline").read_text()]

    def stop(self) -> int:
        """End it in good order."""
        for connection in self._opened:
            connection.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            kill_session(self.process.pid)
            self.process.wait()
            raise
