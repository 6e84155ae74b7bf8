"""Load: tasks submitted at a steady pace while something breaks, from this process or another one."""

import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

from harness import forks
from harness.history import Client
from harness.patience import until
from harness.system import System
from harness.threads import Beside

from toc import NewTask, TocError

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


@dataclass(eq=False)
class Load(Beside):
    """Submits tasks from a thread until the block is left; now and then it cancels or reschedules one.

    ``rate`` tasks a second, due ``ahead`` seconds later, of ``biz_ids`` or of all from ``first`` on.
    ``attribute`` of each, or what makes it. Errors of the SDK are counted by name, not raised: whether they
    may occur is for the test to say.
    """

    client: Client
    _: KW_ONLY
    rate: float
    ahead: tuple[float, float] = (0.2, 2.0)
    cancel: float = 0.05
    reschedule: float = 0.0
    fail: float = 0.05
    attribute: Mapping[str, Any] | Callable[[random.Random], Mapping[str, Any]] = field(default_factory=dict)
    seed: int | str = 0
    first: int = 1_000_000
    biz_ids: Iterable[int] | None = None
    topics: Sequence[str] = TOPICS

    def __post_init__(self) -> None:
        super().__init__()
        self.job_ids: list[int] = []
        self.errors: Counter[str] = Counter()
        self.raised: dict[str, TocError] = {}
        """The last error of each name."""
        self.slowest = 0.0
        """The longest submit, in seconds."""
        self._dice = random.Random(self.seed)
        self._numbers = iter(count(self.first) if self.biz_ids is None else self.biz_ids)

    def more(self, count: int) -> None:
        """Wait until so many more have been submitted."""
        enough = len(self.job_ids) + count
        assert until(lambda: len(self.job_ids) >= enough), f"the load does not go on: {self.raised}"

    def _run(self) -> None:
        began = time.monotonic()
        number = 0
        while not self._over.wait(max(0.0, began + number / self.rate - time.monotonic())):
            self._submit(next(self._numbers))
            number += 1
            if self.job_ids and self._dice.random() < self.cancel:
                self._call(self.client.cancel, self._dice.choice(self.job_ids[-40:]))
            if self.job_ids and self._dice.random() < self.reschedule:
                later = datetime.now(UTC) + timedelta(seconds=self._dice.uniform(0.2, 4.0))
                job_id = self._dice.choice(self.job_ids[-40:])
                self._call(self.client.reschedule, job_id, action_time=later)

    def _submit(self, biz_id: int) -> None:
        began = time.monotonic()
        topic, delay = self.topics[biz_id % len(self.topics)], self._dice.uniform(*self.ahead)
        asked = dict(self.attribute(self._dice) if callable(self.attribute) else self.attribute)
        if self._dice.random() < self.fail:
            asked["fail"] = 1
        job_id = self._call(self.client.submit, topic, biz_id=biz_id, delay=delay, attribute=asked)
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
