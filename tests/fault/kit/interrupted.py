"""An application whose calls into the SDK are broken off: SIGALRM at a random instant, a handler that raises.

``python -m fault.kit.interrupted COUNT STRIDE SEED`` breaks off COUNT calls so, and each kind of call once at
every STRIDE-th line that it runs; there it also makes another call in the midst of the first. It checks what
every other call answered against what it was asked, and at last that all calls work at once, on all threads
that the pools were made for, and that no call waits at the interpreter's end.
Prints what it found as JSON; what is wrong is listed under "wrong".
"""

import asyncio
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from linecache import getline
from types import FrameType, ModuleType
from typing import Any

from harness.tables import raw

from toc import AsyncTimeoutCenter, CancelOutcome, NewTask, RescheduleOutcome, TaskStatus, TimeoutCenter
from toc.model.errors import StoreUnavailable, TocError
from toc.model.task import TaskRow

TOPIC = "test.sync"
KNOWN = 300
"""Tasks of which everything is known, to be looked up and changed."""
THREADS = 8
"""As many as there are connections to a server."""
AT_ONCE_SECONDS = 8.0
"""For a call when nothing is broken off any more: one more lost connection than there are would be waited for
13 s."""


class Interrupted(Exception):
    """What a time-out of an application raises."""


class Ended(BaseException):
    """What nothing may catch, like KeyboardInterrupt."""


class Application:
    """Makes calls, knows what they must answer, and notes what they answered else."""

    def __init__(self, center: TimeoutCenter, seed: int) -> None:
        self.center = center
        self.dice = random.Random(seed)
        self.wrong: list[str] = []
        self.stored: dict[int, tuple[int, int]] = {}
        """Acknowledged tasks: biz_id and number in the attribute."""
        self.number = 1_000_000_000 * seed
        self.many = 0.0
        """How often a call has many tasks."""
        others = [self.find, self.cancel, self.reschedule, self.submit_few, self.submit_keyed]
        self.calls: list[Callable[[], None]] = [self.submit, self.submit, self.get, self.get, *others]
        tasks = [self.task() for _ in range(KNOWN)]
        self.known = dict(zip(center.submit_many(tasks), tasks, strict=True))

    def task(self) -> NewTask:
        """A task whose attribute and due time follow from its biz_id."""
        self.number += 1
        return NewTask(TOPIC, self.number, timedelta(hours=1), attribute={"n": self.number})

    def expect(self, what: str, got: object, *wanted: object) -> None:
        """Note an answer that is none of those that are possible."""
        if got not in wanted:
            self.wrong.append(f"{what}: {got!r}, not {' or '.join(map(repr, wanted))}")

    def submit(self) -> None:
        task = self.task()
        job_id = self.center.submit(TOPIC, biz_id=task.biz_id, delay=task.delay, attribute=task.attribute)
        self.note(job_id, task)

    def note(self, job_id: int, task: NewTask) -> None:
        assert isinstance(task.biz_id, int)
        if job_id in self.stored:
            self.wrong.append(f"the id {job_id} was given twice")
        self.stored[job_id] = (task.biz_id, task.biz_id)

    def submit_keyed(self) -> None:
        task = self.task()
        for _ in range(2):
            job_id = self.center.submit(
                TOPIC, biz_id=task.biz_id, delay=task.delay, attribute=task.attribute, dedup_key="once"
            )
        self.note(job_id, task)

    def submit_few(self) -> None:
        # now and then so many that they go in several chunks, on other threads
        tasks = [self.task() for _ in range(1200 if self.dice.random() < self.many else 5)]
        for job_id, task in zip(self.center.submit_many(tasks), tasks, strict=True):
            self.note(job_id, task)

    def get(self) -> None:
        job_id, wanted = self.dice.choice(list(self.known.items()))
        task = self.center.get(job_id)
        got = task and (task.job_id, task.biz_id, task.attribute)
        self.expect("get", got, (job_id, wanted.biz_id, wanted.attribute))

    def find(self) -> None:
        job_id, wanted = self.dice.choice(list(self.known.items()))
        tasks = [(task.job_id, task.attribute) for task in self.center.find(biz_id=wanted.biz_id)]
        self.expect("find", tasks, [(job_id, wanted.attribute)])

    def cancel(self) -> None:
        task = self.task()
        job_id = self.center.submit(TOPIC, biz_id=task.biz_id, delay=task.delay)
        self.expect("cancel", self.center.cancel(job_id), CancelOutcome.CANCELLED)
        self.expect("cancelled", self.center.get(job_id).status, TaskStatus.CANCELLED)  # type: ignore[union-attr]

    def reschedule(self) -> None:
        job_id = self.dice.choice(list(self.known))
        due = datetime.now(UTC) + timedelta(hours=2)
        outcome = self.center.reschedule(job_id, action_time=due)
        self.expect("reschedule", outcome, RescheduleOutcome.RESCHEDULED)

    def check_stored(self) -> None:
        """What was acknowledged is there, and is what it was."""
        ids = list(self.stored)
        rows: dict[int, TaskRow] = {}
        for first in range(0, len(ids), 1000):
            rows |= self.center.store.read(ids[first : first + 1000])
        for job_id, (biz_id, number) in self.stored.items():
            row = rows.get(job_id)
            got = row and (row.biz_id, json.loads(row.attribute)["n"])
            self.expect("stored", got, (biz_id, number))


def break_off(application: Application, count: int) -> Counter[str]:
    """Break ``count`` calls off; returns how many of each kind."""
    broken: Counter[str] = Counter()
    took: dict[str, float] = {}
    dice = application.dice

    def interrupt(*_args: object) -> None:
        raise (Interrupted if dice.random() < 0.7 else Ended)

    application.many = 0.02
    signal.signal(signal.SIGALRM, interrupt)
    while broken.total() < count:
        call = dice.choice(application.calls)
        name = call.__name__
        began = time.monotonic()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, 1.1 * took.get(name, 0.002)))
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except (Interrupted, Ended):
            broken[name] += 1
        except KeyError as exc:  # of Thread.start, interrupted once its thread runs: CPython raises this
            if not isinstance(exc.__context__, (Interrupted, Ended)):
                raise
            broken[name] += 1
        except TocError as exc:
            application.wrong.append(f"{name}: {type(exc).__name__}: {exc}")
        else:
            took[name] = 0.9 * took.get(name, 0.002) + 0.1 * (time.monotonic() - began)
        if len(application.wrong) > 20:
            break
    return broken


def at_lines(application: Application, stride: int, act: Callable[[], None]) -> Counter[str]:
    """Act at every ``stride``-th line of Python that each kind of call runs, wherever that stands.

    Returns how often, by kind. A signal's handler runs between two steps as well, but where luck has it.
    """
    met: Counter[str] = Counter()
    for call in dict.fromkeys(application.calls):
        last, within = application.dice.randrange(stride), True
        while within:
            within = _met(call, last, act)
            met[call.__name__] += within
            last += stride
    return met


def _met(call: Callable[[], None], last: int, act: Callable[[], None]) -> bool:
    """Act at one line of the call, counted from its begin. Returns whether it has so many."""
    left, met = last, False

    def trace(frame: FrameType, event: str, _about: object) -> Any:
        nonlocal left, met
        if event == "line" and not met:
            left -= 1
            # A with statement has an event before its __exit__ as well, where CPython handles no signal.
            line = getline(frame.f_code.co_filename, frame.f_lineno)
            if left < 0 and not line.lstrip().startswith("with "):
                met = True
                act()
        return trace

    with suppress(Interrupted):
        try:
            sys.settrace(trace)
            call()
        finally:
            sys.settrace(None)
    return met


def interrupted() -> None:
    raise Interrupted


def slowest_at_once(application: Application) -> float:
    """Every call, on all threads at once; returns the seconds of the slowest."""
    center, known = application.center, application.known

    def calls(number: int) -> float:
        slowest = 0.0
        for job_id, task in list(known.items())[number * 20 : number * 20 + 20]:
            for call in (
                partial(center.get, job_id),
                partial(center.find, biz_id=task.biz_id),
                partial(center.submit, TOPIC, biz_id=task.biz_id, delay=3600),
                partial(center.submit_many, [task] * 3),
                partial(center.cancel, job_id),
            ):
                began = time.monotonic()
                call()
                slowest = max(slowest, time.monotonic() - began)
        return slowest

    began = time.monotonic()
    center.submit_many([task for task in known.values() for _ in range(10)])  # in chunks, on threads
    with ThreadPoolExecutor(THREADS) as threads:
        return max(*threads.map(calls, range(THREADS)), time.monotonic() - began)


class Late:
    """Calls when the interpreter takes everything apart."""

    def __init__(self, center: TimeoutCenter) -> None:
        self.center, self.other, self.loop = center, AsyncTimeoutCenter(), asyncio.new_event_loop()

    def __del__(self) -> None:
        for call in (
            lambda: self.center.submit(TOPIC, biz_id=1, delay=3600),
            lambda: self.center.get(1),
            lambda: self.loop.run_until_complete(self.other.submit(TOPIC, biz_id=1, delay=3600)),
        ):
            try:
                call()
            except StoreUnavailable as exc:
                print(exc, file=sys.__stderr__, flush=True)


def main() -> None:
    count, stride, seed = map(int, sys.argv[1:])
    found: dict[str, Any] = {}
    with TimeoutCenter() as center:
        application = Application(center, seed)
        before = connections(center)
        try:
            # As a signal handler does, or a __del__ that the garbage collector calls.
            found["nested"] = dict(at_lines(application, stride, application.submit_keyed))
            broken = at_lines(application, stride, interrupted) + break_off(application, count)
            found["broken"] = dict(broken)
            found["slowest"] = slowest_at_once(application)
        except TocError as exc:
            application.wrong.append(f"afterwards: {type(exc).__name__}: {exc}")
        else:
            application.check_stored()
        found["stored"] = len(application.stored)
        limit = time.monotonic() + 60  # a server takes a moment to see that a connection was closed
        # One for each calling thread, and one for each thread that stores the chunks of large submits.
        while max((more := connections(center) - before).values(), default=0) > 2 * THREADS:
            if time.monotonic() > limit:
                application.wrong.append(f"connections left: {dict(more)}")
                break
            time.sleep(0.05)
        found["wrong"] = application.wrong[:20]
    json.dump(found, sys.stdout)


def connections(center: TimeoutCenter) -> Counter[str]:
    """How many connections the servers count, those of other processes too."""
    with raw(center.settings) as connection:
        counted = connection.exec_driver_sql(
            "SELECT COUNT(*) FROM information_schema.processlist"
        ).scalar_one()
    node = center.queues.nodes.master(0)
    wire = node.take()
    clients = wire.ask("CLIENT", "LIST").decode().splitlines()
    node.give(wire)
    return Counter(mysql=int(counted), redis=len(clients))


if __name__ == "__main__":
    main()
    # In a module of its own: an exception that something keeps would keep this one's names alive for ever.
    sys.modules["late"] = ModuleType("late")
    sys.modules["late"].late = Late(TimeoutCenter())  # type: ignore[attr-defined]
    sys.modules["late"].late.center.submit_many([NewTask(TOPIC, n, 3600) for n in range(3000)])  # on threads
