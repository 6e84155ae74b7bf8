"""Failpoints: named lines at which a test can kill the process, as SIGKILL would.

    TOC_FAILPOINT=finish.rows-written          the first process that gets there dies
    TOC_FAILPOINT=finish.rows-written:3        the third time that a process gets there
    TOC_FAILPOINT_ONCE=/path/of/a/file         only one process ever dies: the one that makes this file,
                                               which then holds the name and its process id

For tests only. With TOC_FAILPOINT unset, as always in production, a failpoint calls an empty function. Which
function it calls is decided when this module is imported.
"""

import os
import signal
import threading
from collections.abc import Callable

NAMES: dict[str, str] = {
    "submit.row-stored": "submit: the row is committed; it is neither acknowledged nor in the index",
    "batch.rows-stored": "group commit: the rows of a batch are committed; none is acknowledged",
    "cancel.row-written": "cancel: the row is cancelled, its entry still exists",
    "reschedule.row-written": "reschedule: the row has its new time, the entry the old one",
    "poll.taken": "a worker has taken entries (prepare) and has not read their rows",
    "finish.rows-written": "a worker has written how tries ended; their entries are still prepared",
    "reclaim.rows-written": "the tries of a dead worker are charged; their entries are still prepared",
    "pull.taken": "a gateway has taken entries (prepare) and has not handed them out",
    "pull.handed-out": "tasks are handed out on their rows; no consumer has heard of it",
    "pull.answered": "consumers are told; their entries may still be prepared",
    "pull.sent": "delay/task: a task is given to its client; it is not yet processed",
    "pull.acked": "a consumer's tasks are processed; it is not told, and their entries exist",
    "schedule.rows-read": "a step of schedules is decided and not written",
    "schedule.rows-written": "schedules are moved on, their occurrences are not in the index",
    "import.stored": "an import has stored a batch of jobs; dead letters among them are not marked as dead",
    "webhook.answered": "a webhook was answered; its row is not written",
    "bulk.step-done": "tasks of a bulk job are changed; what came of them is not written",
    "sweep.rows-read": "the sweep has read rows and has not added them to the index",
}
"""Each failpoint and its place in the code."""


def unarmed(name: str) -> None:
    """What a failpoint calls in production."""


def arm(wanted: str, once: str | None) -> Callable[[str], None]:
    """Return the function that kills the process, by the values of the two variables.

    Raises ValueError for an unknown name.
    """
    name, _, count = wanted.partition(":")
    if name not in NAMES:
        raise ValueError(
            f"TOC_FAILPOINT={wanted!r}: there is no failpoint {name!r}; the failpoints are {', '.join(NAMES)}"
        )
    left = int(count or 1)
    lock = threading.Lock()

    def reached(here: str) -> None:
        nonlocal left
        if here != name:
            return
        with lock:
            left -= 1
            if left:
                return
            if once is not None:
                try:
                    file = os.open(once, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                except FileExistsError:  # another process has died here; one is enough
                    return
                os.write(file, f"{name} {os.getpid()}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


failpoint: Callable[[str], None] = (
    arm(os.environ["TOC_FAILPOINT"], os.environ.get("TOC_FAILPOINT_ONCE"))
    if os.environ.get("TOC_FAILPOINT")
    else unarmed
)
"""``failpoint("finish.rows-written")`` kills the process here if that failpoint is armed."""
