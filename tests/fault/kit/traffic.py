"""An application for soaks: it submits, cancels and reschedules, whatever happens to the servers."""

import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

from fault.kit import load
from fault.kit.doors import PULLED
from harness.system import System

from toc.model.errors import NotInFuture, PartialSubmit, StoreUnavailable, SubmitUnknown, TocError

TOPICS = (*load.TOPICS, PULLED)
BATCH = 500
EXPECTED = (StoreUnavailable, SubmitUnknown, PartialSubmit, NotInFuture)
"""What the SDK may raise while MySQL is out of reach; the last if our own thread was held up."""


class Traffic:
    """An application: threads of many small calls, and with ``tasks`` one that submits batches."""

    def __init__(self, system: System, seed: int, *, rate: float, tasks: int, seconds: float) -> None:
        self.errors: Counter[str] = Counter()
        self.defects: list[str] = []
        """Whatever else the SDK has raised."""
        self.acknowledged = 0
        """Of the batches."""
        self._client = system.client
        self._wanted = tasks
        self._seconds = seconds
        self._over = threading.Event()
        threading.excepthook = lambda what: self.defects.append(f"{what.exc_type}: {what.exc_value}")
        self._loads = [
            load.Load(
                system.client,
                rate=rate / 4,
                ahead=(5.0, 20.0) if n == 0 else (0.1, 3.0),
                cancel=0.1,
                reschedule=0.1,
                fail=0.0,
                attribute=_attribute,
                seed=f"{seed}/{n}",
                first=(n + 1) * 100_000_000,
                topics=TOPICS,
            )
            for n in range(4)
        ]
        self._running = ExitStack()
        for one in self._loads:
            self._running.enter_context(one)
        self._bulk = threading.Thread(target=self._batches, args=(f"{seed}/b",), name="bulk")
        self._bulk.start()

    def stop(self, patience: float = 0.0) -> None:
        """End it; the batches have so many seconds more to reach their number. May be called twice."""
        self._bulk.join(patience)
        self._over.set()
        self._running.close()
        self._bulk.join()
        for one in self._loads:
            self.errors += one.errors
            self.defects += [repr(exc) for exc in one.raised.values() if not isinstance(exc, EXPECTED)]
        self._loads = []

    def _batches(self, seed: str) -> None:
        began = time.monotonic()
        pause = self._seconds * 0.9 * BATCH / max(self._wanted, 1)
        for count in range(1 << 30):
            late = self._over.wait(max(0.0, began + count * pause - time.monotonic()))
            if late or self.acknowledged >= self._wanted:
                return
            first = 1_000_000_000 + count * BATCH
            batch = load.tasks(
                BATCH, ahead=(0.5, 6.0), seed=f"{seed}/{count}", first=first, fail=0.02, topics=TOPICS
            )
            try:
                self.acknowledged += len(self._client.submit_many(batch))
            except TocError as exc:
                self.errors[type(exc).__name__] += 1
                if not isinstance(exc, EXPECTED):
                    self.defects.append(repr(exc))


def _attribute(dice: random.Random) -> dict[str, Any]:
    """What a handler is to do: mostly nothing, sometimes sleep, fail, or give up."""
    luck = dice.random()
    if luck < 0.003:
        return {"sleep": 2.0}
    if luck < 0.006:
        return {"dead": True}
    if luck < 0.1:
        return {"fail": 1 + (luck < 0.02)}
    if luck < 0.3:
        return {"sleep": dice.uniform(0.0, 0.05)}
    return {}
