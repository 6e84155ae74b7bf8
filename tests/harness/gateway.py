"""A gateway on real servers: one daemon with an HTTP process and a worker without handlers."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from harness import forks
from harness.patience import PATIENCE, until
from harness.secured import Tls
from harness.sessions import kill_session
from harness.system import System
from toc.model.access import Role
from toc.operate.tokens import create_token
from toc.store.servers.server import Statement
from toc.store.store import Store


def lose_body(store: Store, job_id: int) -> None:
    """Delete the body of a task, and nothing else."""
    shards = store._shards
    number, server = shards.table_of(job_id), shards.servers[store.server_of(job_id)]
    server.run([Statement(f"DELETE FROM {shards.body_names[number]} WHERE job_id={job_id}")])


class Reply(NamedTuple):
    status: int
    body: Any
    headers: Mapping[str, str]


class Gateway:
    """A ``toc gateway`` on a port of its own, and a way to call it.

    ``beside``: whose tokens it shares. ``whole``: its processes have interpreters of their own, as in
    production, which takes seconds of a processor.
    """

    def __init__(
        self,
        system: System,
        *options: str,
        env: Mapping[str, str] | None = None,
        host: str = "gate",
        beside: Gateway | None = None,
        whole: bool = False,
    ) -> None:
        many = "--processes" in options
        self._http_processes = int(options[options.index("--processes") + 1]) if many else 1
        self.system = system
        self.tls = ssl.create_default_context(cafile=Tls.shared().ca) if "--tls-cert" in options else None
        self.log = system.directory / f"{host}.log"
        self.tokens: dict[str, str] = {}
        self._connections = threading.local()
        self._opened: list[http.client.HTTPConnection] = []
        words = ["gateway", "--port", "0", *options]
        env = {**system.env, "TOC_HOST": host, **(env or {})}
        self.process = forks.start_daemon(words, env=env, log=self.log, whole=whole)
        try:
            self._begin(beside, make_token="--plain-from" not in options)
        except BaseException:  # whoever made it has nothing to stop it by
            self._end()
            raise

    def _begin(self, beside: Gateway | None, *, make_token: bool) -> None:
        self.system.wait(
            lambda: (
                self.told().count("worker_ready") > self._http_processes or self.process.poll() is not None
            ),
            "ready",
            60,
        )
        found = re.search(r"gateway at https?://\S+:(\d+)", self.told())
        assert found, self.told()
        self.port = int(found[1])
        if beside is not None:
            self.tokens = beside.tokens
            assert until(lambda: self.call("GET", "/v1/nothing").status == 404, 10)
        elif make_token:
            self.make_token("all", "admin")

    def _end(self) -> None:
        """kill -9 of the daemon and all its processes."""
        for connection in self._opened:
            connection.close()
        kill_session(self.process.pid)
        self.process.wait()

    def told(self) -> str:
        return self.log.read_text()

    def make_token(self, name: str, *roles: str, topics: tuple[str, ...] = ("*",), **limits: Any) -> str:
        """Make a token, and wait until the gateway knows it."""
        center = self.system.center
        made = create_token(
            center, name, roles=[Role(role) for role in roles], topics=list(topics), by="test", **limits
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
                connection = (
                    http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                    if self.tls is None
                    else http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.tls)
                )
                self._opened.append(connection)
            try:
                with suppress(BrokenPipeError):  # it is answered before it is all there
                    connection.request(method, path, data, {**sent, **(headers or {})})
                answer = connection.getresponse()
                content = answer.read()
                break
            except (http.client.HTTPException, ConnectionError):
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

    def children(self) -> list[int]:
        """The pids of its HTTP processes that live."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in pids if forks.serves_http(int(pid))]

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End it in good order."""
        for connection in self._opened:
            connection.close()
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._end()
            raise
