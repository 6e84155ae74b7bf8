"""One HTTP process of a gateway. Started by the daemon as ``python -m toc.gateway.process``, never by hand.

It serves the socket on which the daemon listens, together with its siblings: if it dies, they take the
connections that wait in the queue of that socket. It has no slots. On ``stop`` it answers waiting pulls,
takes no more connections, finishes what it has, and leaves within the shutdown deadline.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from ipaddress import ip_network
from typing import Any

import uvloop

from toc.config import Settings
from toc.coordination.assignment import PROTOCOL
from toc.gateway.app import App
from toc.gateway.crowd import MAX_CONNECTIONS, MAX_PER_ADDRESS, Crowd, GatewayServer, client_address, server
from toc.gateway.service import Service
from toc.loop import Loop, watch_threads, watched_task
from toc.model.errors import TocError
from toc.model.topic import Topic
from toc.observe.log import close_log, configure, get_logger
from toc.observe.metrics import GATEWAYS_READY
from toc.operate.bulk_jobs import BulkRunner
from toc.operate.tokens import TokenBook
from toc.sdk.client import TimeoutCenter
from toc.worker.control import BEAT_SECONDS, ControlPipe, begin

log = get_logger(__name__)


FurtherPorts = Callable[[Service, argparse.Namespace], Iterable[tuple[str, Any, socket.socket]]]
"""Makes, on the event loop, the applications of further ports, each with its name and the socket on which it
listens."""

OTHER_FILES = 256
"""Files that a process opens beside its clients' connections, at most."""


@dataclass(eq=False)
class Gateway:
    """The parts of one HTTP process."""

    center: TimeoutCenter
    link: ControlPipe
    arguments: argparse.Namespace
    lease_secret: bytes
    further: FurtherPorts
    servers: list[GatewayServer] = field(default_factory=list)
    left: bool = False

    async def run(self) -> None:
        """Serve until told to stop."""
        loop = asyncio.get_running_loop()
        center, arguments = self.center, self.arguments
        book = TokenBook(center.store.tokens, center.clock)
        await loop.run_in_executor(None, book.run_once)
        runner = BulkRunner(center)
        loops = Loop("tokens", book.run_once), Loop("bulk-jobs", runner.run_once)
        for one in loops:
            one.start()
        self.service = service = Service(center, book, self.lease_secret)
        try:
            from toc.console.console import Console

            app: Any = App(service, Console(service, self.lease_secret))
        except ModuleNotFoundError:  # its packages are not installed
            app = App(service)
        if arguments.allow:
            app = only_from(app, arguments.allow)
        crowd = Crowd(most_connections(), arguments.per_address, map(ip_network, arguments.proxy))
        ports = [("native", app, socket.socket(fileno=arguments.listen)), *self.further(service, arguments)]
        deadline = center.settings.shutdown_deadline
        for name, port, _ in ports:
            tls = (arguments.tls_cert, arguments.tls_key) if port is app else (None, None)
            self.servers.append(server(port, crowd, shutdown_deadline=deadline, port=name, tls=tls))
        loop.add_reader(self.link.fileno(), self._listen)
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # on Ctrl-C the daemon says what to do
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        tasks = {
            "connections": loop.create_task(crowd.look_on()),
            "beat": loop.create_task(self._beat()),
            "topics": service.keeping,
        }
        for name, task in tasks.items():
            watched_task(name, task, lambda: self.left)
        # Loaded objects stay for good. Walking them would hold up every request under way for 50 ms at a
        # time, every two seconds under load.
        gc.collect()
        gc.freeze()
        release = {"version": version("timeout-center"), "protocol": PROTOCOL}
        self.link.send("ready", worker_id=arguments.worker_id, **release)
        serving = [made.serve([port[-1]]) for made, port in zip(self.servers, ports, strict=True)]
        await asyncio.gather(*serving)
        self.link.send("leaving", recycle="")
        self.left = True
        for task in tasks.values():
            task.cancel()
        await service.close()
        for one in loops:
            one.stop(1.0)
        runner.close()
        loop.remove_reader(self.link.fileno())
        self.link.send("left")

    async def _beat(self) -> None:
        while True:
            self.link.send("beat", stuck=[])
            self.center.store.close_unused()
            GATEWAYS_READY.of().set(self.service.readiness()[0])
            await asyncio.sleep(BEAT_SECONDS)

    def _listen(self) -> None:
        for message in self.link.receive():
            if message["kind"] == "stop":
                self._stop()
            elif message["kind"] == "force":
                for one in self.servers:
                    one.force_exit = True
                self._stop()
        if self.link.closed:  # the daemon is gone: its successor wants to listen here
            asyncio.get_running_loop().remove_reader(self.link.fileno())
            self._stop()

    def _stop(self) -> None:
        self.service.stop()
        for one in self.servers:
            one.should_exit = True


def most_connections() -> int:
    """Return how many connections this process may have, after raising its limit of open files."""
    wanted = MAX_CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - OTHER_FILES, OTHER_FILES)


def only_from(app: Any, networks: list[str]) -> Any:
    """Return the application for clients of these networks alone; the connections of others are closed."""
    allowed = [ip_network(text) for text in networks]

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        client = scope.get("client")
        if not client or not any(client_address(client[0]) in network for network in allowed):
            await send({"type": "http.response.start", "status": 403, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await app(scope, receive, send)

    return guarded


def main(further: FurtherPorts = lambda _service, _arguments: ()) -> None:
    """The entry point of the process; of one with ``further`` ports, called by its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--tls-cert")
    parser.add_argument("--tls-key")
    parser.add_argument("--per-address", type=int, default=MAX_PER_ADDRESS)
    for name in ("allow", "proxy", "dialect", "dialect-from", "dialect-host"):
        parser.add_argument(f"--{name}", action="append", default=[])
    arguments, link, told = begin(parser)
    watch_threads()
    logging.getLogger("uvicorn").disabled = True
    logging.getLogger("uvicorn.error").disabled = True
    code = 1
    try:
        settings = Settings()
        configure(settings.log_level, settings.log_format)
        with contextlib.closing(TimeoutCenter(settings)) as center:
            center.catalog.learn(map(Topic.of, told["topics"]))
            lease_secret = bytes.fromhex(told["lease_secret"])
            uvloop.run(Gateway(center, link, arguments, lease_secret, further).run())
        code = 0
    except TocError as exc:
        link.send("unfit", error=str(exc), exit_code=exc.exit_code, wrong=True)
    except Exception as exc:
        log.exception("gateway_failed", exc_info=exc)
    finally:
        close_log()
        os._exit(code)


if __name__ == "__main__":
    main()
