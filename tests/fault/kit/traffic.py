"""An application for soaks: it submits, cancels and reschedules, whatever happens to the servers."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from fault.kit import load
from fault.kit.doors import PULLED
from harness.system import System

from toc import NewTask
from toc.model.errors import NotInFuture, PartialSubmit, StoreUnavailable, SubmitUnknown

TOPICS = (*load.TOPICS, PULLED)
BATCH = 500
EXPECTED = (StoreUnavailable, SubmitUnknown, PartialSubmit, NotInFuture)
"""What the SDK may raise while MySQL is out of reach; the last if our own thread was held up."""


class Traffic:
    """An application: one thread of many small calls, and with ``tasks`` one that submits batches."""

    def __init__(self, system: System, seed: int, *, rate: float, tasks: int, seconds: float) -> None:
        self.errors: Counter[str] = Counter()
        self.defects: list[str] = []
        self.acknowledged = 0
        """Of the batches."""
        self._client = system.client
        self._rate = rate
        self._wanted = tasks
        self._seconds = seconds
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._single, args=(random.Random(f"{seed}/{n}"), n), name=f"small-{n}")
            for n in range(3)
        ]
        self._bulk = threading.Thread(target=self._batches, args=(random.Random(f"{seed}/b"),), name="bulk")
        for thread in (*self._threads, self._bulk):
            thread.start()

    def stop(self, patience: float = 0.0) -> None:
        """End it; the batches have so many seconds more to reach their number."""
        self._bulk.join(patience)
        self._over.set()
        for thread in (*self._threads, self._bulk):
            thread.join()

    def _single(self, dice: random.Random, number: int) -> None:
        rate = self._rate / 3
        first = (number + 1) * 100_000_000
        recent: list[int] = []
        began = time.monotonic()
        count = 0
        while not self._over.wait(max(0.0, began + count / rate - time.monotonic())):
            count += 1
            ahead = dice.uniform(5.0, 20.0) if dice.random() < 0.1 else dice.uniform(0.1, 3.0)
            job_id = self._call(
                self._client.submit,
                dice.choice(TOPICS),
                biz_id=first + count,
                delay=ahead,
                attribute=_attribute(dice),
            )
            if job_id is not None:
                recent = [*recent[-99:], job_id]
            if recent and dice.random() < 0.1:
                self._call(self._client.cancel, dice.choice(recent))
            if recent and dice.random() < 0.1:
                later = datetime.now(UTC) + timedelta(seconds=dice.uniform(0.2, 4.0))
                self._call(self._client.reschedule, dice.choice(recent), action_time=later)

    def _batches(self, dice: random.Random) -> None:
        began = time.monotonic()
        pause = self._seconds * 0.9 * BATCH / max(self._wanted, 1)
        count = 0
        while self.acknowledged < self._wanted:
            if self._over.wait(max(0.0, began + count * pause - time.monotonic())):
                return
            batch = [
                NewTask(
                    TOPICS[n % len(TOPICS)],
                    1_000_000_000 + count * BATCH + n,
                    dice.uniform(0.5, 6.0),
                    attribute={"fail": 1} if dice.random() < 0.02 else None,
                )
                for n in range(BATCH)
            ]
            count += 1
            done = self._call(self._client.submit_many, batch)
            self.acknowledged += len(done or ())

    def _call(self, do: Any, *args: Any, **more: Any) -> Any:
        try:
            return do(*args, **more)
        except EXPECTED as exc:
            self.errors[type(exc).__name__] += 1
            self._over.wait(0.05)
            return None
        except Exception as exc:  # what the SDK should never raise: the verdict names it
            self.errors[type(exc).__name__] += 1
            self.defects.append(f"the SDK raised {type(exc).__name__}: {str(exc)[:300]}")
            self._over.wait(0.05)
            return None


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
