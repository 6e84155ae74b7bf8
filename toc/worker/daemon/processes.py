"""The processes of a daemon: how one is started, and what the daemon knows of it.

Each has a process group of its own, so ``kill 0`` in a handler reaches only its process and what
that has started. Ctrl-C reaches the daemon alone, which tells the processes. When a process dies,
its daemon kills the rest of its group. So when its tasks run again, no program that an earlier try
started still runs, and no copy holds a connection with row locks open. After an orderly end,
programs that handlers have started continue.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toc.model.topic import Slot
from toc.worker.app import started_in
from toc.worker.control import ControlPipe
from toc.worker.guards.silence import Silence


class Child:
    """One worker as what keeps it sees it."""

    def __init__(self, link: ControlPipe, worker_id: str, index: int, pid: int) -> None:
        self.link = link
        self.worker_id = worker_id
        self.index = index
        self.pid = pid
        self.born = time.monotonic()
        """When it was started, and from its first message on, when that came (monotonic)."""
        self.silence = Silence()
        self.member = False
        """Whether it has joined the membership."""
        self.joined = 0
        """When it did (ms)."""
        self.heard = False
        """Whether it has ever sent a message. Until then it counts as starting, however long that takes."""
        self.out_of_reach: frozenset[str] = frozenset()
        """The servers that do not answer it."""
        self.stuck: list[str] = []
        """Its internal loops that hang."""
        self.unfit: Mapping[str, Any] | None = None
        """Its message ``unfit``: why it cannot work at all."""
        self.leaving = False
        self.recycled = False
        """Whether it leaves because it wants a successor."""
        self.left = False
        """Whether it reported an orderly end. The exit code proves nothing: a handler can set any."""
        self.killed = False
        self.version, self.protocol = "", 0
        """What it runs. It may be another version than its daemon's."""
        self.keys: frozenset[str] = frozenset()
        """Marks of the keys by which it reads the secrets of webhook targets."""
        self.held: set[Slot] = set()
        """Slots that it was told to take."""
        self.dropping: set[Slot] = set()
        """Slots that it was told to drop and has not confirmed."""
        self.lost_threads = 0
        """How many threads of embedded workers before it are in handlers that have not ended."""


class WorkerProcess(Child):
    """A worker that is a process."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: ControlPipe, worker_id: str, index: int
    ) -> None:
        super().__init__(link, worker_id, index, process.pid)
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)


@dataclass(frozen=True)
class SideProcesses:
    """Further processes that a daemon keeps running. They have no slots and are not members of the cluster.

    ``command`` starts one; it also gets ``--worker-id``, ``--link``, ``--known`` and ``--board``, inherits
    the ``descriptors``, and uses the link as a worker process does. These processes start the tasks of
    topics with one of the ``deliveries``; the daemon's workers only own the slots of these topics.
    """

    name: str
    processes: int
    command: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    deliveries: frozenset[str] = frozenset()


def start(
    command: Sequence[str],
    descriptors: Sequence[int],
    known: Mapping[str, Any],
    worker_id: str,
    index: int,
) -> WorkerProcess:
    """Start a worker process that inherits these descriptors, and tell it what is ``known``.

    Raises OSError, after cleaning up.
    """
    ours, theirs = socket.socketpair()
    link = ControlPipe(ours)
    with theirs, os.fdopen(os.memfd_create("toc-known"), "w+b") as told:
        told.write(json.dumps(known).encode())
        told.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, "--link", str(theirs.fileno()), "--known", str(told.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), told.fileno(), *descriptors],
                cwd=started_in(),
                process_group=0,
            )
            try:
                return WorkerProcess(process, link, worker_id, index)
            except OSError:
                process.kill()
                process.wait()
                raise
        except OSError:
            link.close()
            raise


def doing(child: WorkerProcess) -> str:
    """Return the state of a worker process, as a label of the metric toc_workers."""
    if not child.heard:
        return "starting"
    return "leaving" if child.leaving else "ready"
