"""The servers of the tests as containers, for machines without their programs but with a Docker engine."""

from __future__ import annotations

import os
import secrets
import socket
import warnings
from typing import Self

import docker  # type: ignore[import-untyped]  # it comes without types
from docker.errors import DockerException  # type: ignore[import-untyped]

from toc.dev.local.process import StartFailed, free_port, until
from toc.dev.local.resp import call

os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # one image less; the fixtures clean up
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from testcontainers.core.container import DockerContainer

PASSWORD = secrets.token_hex(16)
REDIS = ("redis:7", 6379, "redis://127.0.0.1:{port}/0")
MYSQL = ("mysql:8", 3306, f"mysql+pymysql://root:{PASSWORD}@127.0.0.1:{{port}}")
ZOOKEEPER = ("zookeeper", 2181, "127.0.0.1:{port}")
_ENVIRONMENT = {
    "MYSQL_ROOT_PASSWORD": PASSWORD,
    "ZOO_TICK_TIME": "500",
    "ZOO_MAX_CLIENT_CNXNS": "0",
    "ZOO_CFG_EXTRA": "maxSessionTimeout=60000",
}


class Container:
    """What ``toc.dev.local.servers.Server`` offers, on a container that keeps its port."""

    def __init__(self, image: str, inner_port: int, url: str) -> None:
        self.port = free_port()
        self.url = url.format(port=self.port)
        self._container = DockerContainer(image, env=dict(_ENVIRONMENT))
        # The address matters: else the whole network could reach it. Docker takes it, the type does not.
        self._container.ports[f"{inner_port}/tcp"] = ("127.0.0.1", self.port)  # type: ignore[assignment]
        self._made = False

    def start(self) -> Self:
        if self._made:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._made = True
        if not until(self._answers, 120):
            raise StartFailed(f"{self.url} does not answer: {self._container.get_logs()[1][-2000:]!r}")
        return self

    def _answers(self) -> bool:
        # Docker's own proxy accepts before the server does: only bytes from the server count.
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
                if not self.url.startswith("mysql"):
                    connection.sendall(b"PING\r\n" if self.url.startswith("redis") else b"srvr")
                return connection.recv(1) != b""
        except OSError:
            return False

    def call(self, *words: str | int) -> object:
        return call(("127.0.0.1", self.port), *words)

    def stop(self) -> None:
        self._container.get_wrapped_container().stop()

    def kill(self) -> None:
        self._container.get_wrapped_container().kill()

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        self._container.get_wrapped_container().pause()

    def resume(self) -> None:
        self._container.get_wrapped_container().unpause()

    def remove(self) -> None:
        if self._made:
            self._container.stop()


def available(image: str) -> bool:
    """Whether a Docker engine answers and has the image already."""
    client = docker.from_env(version="1.41", timeout=5)  # with a version it does not connect yet
    try:
        client.images.get(image)
    except (DockerException, OSError):  # the latter where there is no engine at all
        return False
    finally:
        client.close()
    return True
