"""The processes of a daemon: how one is started, and what the daemon knows of it.

Each has a process group of its own, so ``kill 0`` in a handler reaches only its process and what
that has started. Ctrl-C reaches the daemon alone, which tells the processes. When a process dies,
its daemon kills the rest of its group. So when its tasks run again, no program that an earlier try
started still runs, and no copy holds a connection with row locks open. After an orderly end,
programs that handlers have started continue.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from toc.coordination.assignment import Member
from toc.model.topic import Slot
from toc.worker.control import ControlPipe

SILENT_SECONDS = 15.0
"""A process that is silent for this long is killed.

A process sends its daemon a beat each second. A silent process is stopped, starved, or blocked by a handler
that does not release the interpreter: in a call into C, or in a regular expression that backtracks endlessly.
None of its other threads runs then, so the process cannot help itself.

The bound is not max_runtime, by default an hour. The entries that the process holds would time out after
prepare_timeout and run elsewhere too. The task that holds the interpreter would then block the next process,
and so on through all hosts. Within half the default prepare_timeout, no entry of the process has timed out.
So killing it then makes its death a known one: its slots go to others, the other tasks run at once and only
once, and the culprit blocks one process at a time. After three times it runs alone, within the same bound.
"""
STEP_SECONDS = 2.0
"""The most that one look of the daemon adds to a silence. A daemon that looks less often was stopped itself,
perhaps with its machine: that is no silence of others."""


class Child:
    """One worker as what keeps it sees it."""

    def __init__(self, link: ControlPipe, member: Member, index: int) -> None:
        self.link = link
        self.card = member
        """How it is introduced to the cluster. Replaced as a whole."""
        self.worker_id, self.pid = member.worker_id, member.pid
        self.index = index
        self.born = time.monotonic()
        """When it was started, and from its first message on, when that came (monotonic)."""
        self.silent = float("-inf")
        """Seconds of silence as of the last look; -inf: it was heard since."""
        self.member = False
        """Whether it has joined the membership."""
        self.heard = False
        """Whether it has ever sent a message. Until then it counts as starting, however long that takes."""
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
        self.held: set[Slot] = set()
        """Slots that it was told to take."""
        self.dropping: set[Slot] = set()
        """Slots that it was told to drop and has not confirmed."""

    def look(self, seconds: float) -> None:
        """Record a look at it, so many seconds after the last one."""
        self.silent = max(self.silent + min(seconds, STEP_SECONDS), 0.0)


class WorkerProcess(Child):
    """A worker that is a process."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: ControlPipe, member: Member, index: int
    ) -> None:
        super().__init__(link, replace(member, pid=process.pid), index)
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)

    @property
    def doing(self) -> str:
        """What it does, as a label of the metric toc_workers."""
        return "starting" if not self.heard else "leaving" if self.leaving else "ready"


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
    command: Sequence[str], descriptors: Sequence[int], known: Mapping[str, Any], member: Member, index: int,
    cwd: str,
) -> WorkerProcess:  # fmt: skip
    """Start a worker process that inherits these descriptors, and tell it what is ``known``.

    Raises OSError, after cleaning up.
    """
    ours, theirs = socket.socketpair()
    link = ControlPipe(ours)
    with theirs, os.fdopen(os.memfd_create("toc-known"), "w+b") as told, ExitStack() as undo:
        undo.callback(link.close)
        told.write(json.dumps(known).encode())
        told.seek(0)
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [*command, "--link", str(theirs.fileno()), "--known", str(told.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), told.fileno(), *descriptors],
            cwd=cwd,
            process_group=0,
        )
        undo.callback(process.wait)
        undo.callback(process.kill)
        child = WorkerProcess(process, link, member, index)
        undo.pop_all()
    return child
