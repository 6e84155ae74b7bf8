"""The suspects of a host: which the process that runs them alone gets next, and which its death convicts.

suspects    a worker names them     -> they wait in a line, each once
run         to the process          one at a time
begun       from it                 the run is counted on the row
ran         from it                 the row is written; the next may run
"""

from __future__ import annotations

from collections.abc import Iterable

from toc.model.clock import Clock
from toc.observe.log import get_logger
from toc.worker.control import Suspect

log = get_logger(__name__)

LINGER_SECONDS = 2.0
"""How long the process waits for the next suspect."""
AGAIN_SECONDS = 10.0
"""Pause before the process is started again if it has run nothing: no memory, or the app does not load."""


class Alone:
    """What the daemon's thread knows of the runs alone. It starts the process and sends the messages."""

    def __init__(self, clock: Clock) -> None:
        self._monotonic = clock.monotonic
        self._line: dict[int, tuple[Suspect, str]] = {}
        """job_id -> the suspect, and how it has ended the process in which it ran alone ("": it has not)."""
        self._passed: Suspect | None = None
        """What the process runs."""
        self._begun = False
        """Whether the run of it is counted."""
        self._runs = 0
        """How many runs have begun in the present process."""
        self._free_since = 0.0
        self._start_at = 0.0

    def add(self, suspects: Iterable[Suspect]) -> None:
        """Note suspects that a worker has named."""
        for one in suspects:
            known = one.job_id in self._line or (self._passed and self._passed.job_id == one.job_id)
            if not known:
                self._line[one.job_id] = one, ""

    def starts(self) -> bool:
        """Whether to start the process now. Call it while there is none."""
        now = self._monotonic()
        if not self._line or now < self._start_at:
            return False
        self._start_at = now + AGAIN_SECONDS
        return True

    def next(self) -> tuple[Suspect, str] | None:
        """What the process is to run next. None while it is not to: it runs one, or none waits."""
        if self._passed is not None or not self._line:
            return None
        job_id = next(iter(self._line))
        suspect, how = self._line.pop(job_id)
        self._passed, self._begun = suspect, False
        return suspect, how

    def idle(self) -> bool:
        """Whether the process has had nothing to run for LINGER_SECONDS."""
        return self._passed is None and self._monotonic() - self._free_since > LINGER_SECONDS

    def begun(self, crashes: int) -> None:
        """Note that the run is counted on the row, which now has so many ``crashes``.

        It is logged here: the process may not live to write its own line.
        """
        if self._passed is not None:
            job_id, slot, *_ = self._passed
            log.warning("task_quarantined", job_id=job_id, topic=slot.topic, crashes=self._passed.crashes)
            self._passed, self._begun = self._passed._replace(crashes=crashes), True
            self._runs += 1

    def ran(self) -> None:
        """Note that the process has nothing to run any more."""
        self._passed = None
        self._start_at = 0.0
        self._free_since = self._monotonic()

    def ended(self, how: str, *, by_task: bool) -> None:
        """Note that the process has ended. ``by_task``: it died, and nothing but its task can be the cause.

        If nothing else had run there, the task is guilty, which the next process writes; otherwise it runs
        first there.
        """
        if self._passed is not None and self._begun and by_task:
            guilty = how if self._runs == 1 else ""
            self._line = {self._passed.job_id: (self._passed, guilty), **self._line}
            self._start_at = 0.0
        self._passed, self._runs = None, 0
