"""Load: tasks submitted at a steady pace while something breaks, from this process or another one."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from types import MappingProxyType
from typing import Any, Self

from harness import forks
from harness.history import Client
from harness.patience import until
from harness.system import System

from toc import NewTask
from toc.model.errors import TocError

TOPICS = ("test.sync", "test.async", "test.batch")


def tasks(
    count: int,
    *,
    ahead: tuple[float, float],
    seed: int | str = 0,
    first: int = 0,
    fail: float = 0.0,
    topics: Sequence[str] = TOPICS,
) -> list[NewTask]:
    """Tasks of these topics, due ``ahead`` seconds from when they are submitted, evenly at random.

    A share ``fail`` of them fails once. ``first`` is the first biz_id; each task has its own.
    """
    dice = random.Random(seed)
    return [
        NewTask(
            topics[biz_id % len(topics)],
            biz_id,
            dice.uniform(*ahead),
            attribute={"fail": 1} if dice.random() < fail else None,
        )
        for biz_id in range(first, first + count)
    ]


class Load:
    """Submits tasks from a thread until the block is left; now and then it cancels or reschedules one.

    ``rate`` tasks a second, due ``ahead`` seconds later, of ``biz_ids`` or of all from ``first`` on.
    ``attribute`` of each, or what makes it. Errors of the SDK are counted by name, not raised: whether they
    may occur is for the test to say.
    """

    def __init__(
        self,
        client: Client,
        *,
        rate: float,
        ahead: tuple[float, float] = (0.2, 2.0),
        cancel: float = 0.05,
        reschedule: float = 0.0,
        fail: float = 0.05,
        attribute: Mapping[str, Any] | Callable[[random.Random], Mapping[str, Any]] = MappingProxyType({}),
        seed: int | str = 0,
        first: int = 1_000_000,
        biz_ids: Iterable[int] | None = None,
        topics: Sequence[str] = TOPICS,
    ) -> None:
        self.job_ids: list[int] = []
        self.errors: Counter[str] = Counter()
        self.raised: dict[str, TocError] = {}
        """The last error of each name."""
        self.slowest = 0.0
        """The longest submit, in seconds."""
        self._client = client
        self._rate = rate
        self._ahead = ahead
        self._cancel = cancel
        self._reschedule = reschedule
        self._fail = fail
        self._attribute = attribute if callable(attribute) else lambda _: attribute
        self._topics = topics
        self._dice = random.Random(seed)
        self._biz_ids = iter(count(first) if biz_ids is None else biz_ids)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()

    def more(self, count: int) -> None:
        """Wait until so many more have been submitted."""
        enough = len(self.job_ids) + count
        assert until(lambda: len(self.job_ids) >= enough), f"the load does not go on: {self.raised}"

    def _run(self) -> None:
        began = time.monotonic()
        number = 0
        while not self._over.wait(max(0.0, began + number / self._rate - time.monotonic())):
            self._submit(next(self._biz_ids))
            number += 1
            if self.job_ids and self._dice.random() < self._cancel:
                self._call(self._client.cancel, self._dice.choice(self.job_ids[-40:]))
            if self.job_ids and self._dice.random() < self._reschedule:
                later = datetime.now(UTC) + timedelta(seconds=self._dice.uniform(0.2, 4.0))
                job_id = self._dice.choice(self.job_ids[-40:])
                self._call(self._client.reschedule, job_id, action_time=later)

    def _submit(self, biz_id: int) -> None:
        began = time.monotonic()
        job_id = self._call(
            self._client.submit,
            self._topics[biz_id % len(self._topics)],
            biz_id=biz_id,
            delay=self._dice.uniform(*self._ahead),
            attribute={
                **self._attribute(self._dice),
                **({"fail": 1} if self._dice.random() < self._fail else {}),
            },
        )
        self.slowest = max(self.slowest, time.monotonic() - began)
        if job_id is not None:
            self.job_ids.append(job_id)

    def _call(self, do: Any, *args: Any, **more: Any) -> Any:
        try:
            return do(*args, **more)
        except TocError as exc:
            self.errors[type(exc).__name__] += 1
            self.raised[type(exc).__name__] = exc
            return None


def in_another_process(
    system: System, calls: Sequence[Mapping[str, Any]], *, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Make SDK calls in a process of their own, recorded as others are; it may be made to die (failpoint).

    What the calls are is written in producer.py.
    """
    return forks.run(
        [],
        module="fault.kit.producer",
        given=json.dumps(list(calls)),
        env={**system.env, **(env or {})},
        timeout=120,
    )
