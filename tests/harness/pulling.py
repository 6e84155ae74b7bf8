"""A gateway process with pull consumers inside, as tests start and kill it.

    python -m harness.pulling TOPIC CONSUMERS MOST TTR

Each consumer pulls, notes the start and the end of what it gets in the history, and acks it. The attribute of
a task says how it ends: ``{"fail": n}`` nacks the first n tries, ``{"lose": n}`` never answers them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from harness.history import History
from toc import TimeoutCenter
from toc.model.errors import TocError
from toc.pull.handed_out import HandedOut
from toc.pull.pulls import Pulls


async def consume(
    pulls: Pulls, history: History, topic: str, most: int, ttr: float, ended: asyncio.Event
) -> None:
    """Pull and answer until the process leaves."""
    while not ended.is_set():
        try:
            got = await pulls.pull([topic], most=most, wait=5, ttr=ttr)
        except TocError:
            await asyncio.sleep(0.1)
            continue
        for one in got:
            history.started(one.task)
        done: list[str] = []
        failed: list[str] = []
        for one in got:
            outcome = how(one)
            # To let ttr end is a failure of the task's own, as a nack is: so it is written down.
            history.ended(one.task, "ok" if outcome == "ok" else "raise")
            if outcome != "lose":
                (done if outcome == "ok" else failed).append(one.lease)
        for _ in range(20):  # an ack may be repeated until it is answered
            outcomes = await pulls.ack(done)
            done = [lease for lease, what in zip(done, outcomes, strict=True) if isinstance(what, TocError)]
            if not done:
                break
            await asyncio.sleep(0.1)
        await pulls.nack(failed)


def how(one: HandedOut) -> str:
    """How this try is to end: ok, raise or lose."""
    if one.attempt <= one.task.attribute.get("lose", 0):
        return "lose"
    return "raise" if one.attempt <= one.task.attribute.get("fail", 0) else "ok"


async def main() -> None:
    """Serve until SIGTERM."""
    topic, consumers, most, ttr = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    history = History(Path(os.environ["TOC_TEST_HISTORY"]))
    center = TimeoutCenter()
    center.catalog.refresh()
    pulls = Pulls(center)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    tasks = [loop.create_task(consume(pulls, history, topic, most, ttr, ended)) for _ in range(consumers)]
    print("ready", flush=True)
    await ended.wait()
    pulls.close()
    await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(pulls.stop)
    history.close()
    center.close()


if __name__ == "__main__":
    asyncio.run(main())
