"""Random faults over a whole cluster under load, and the checker's verdict as the last line.

    make chaos SEED=7 MINUTES=5

Three hosts with two worker processes each, two gateways with three consumers that pull, a Redis Cluster of
three masters, two MariaDB servers and ZooKeeper; proxies before each Redis, and between each host or gateway,
or the application, and each MariaDB. The application submits, cancels and reschedules all the while. The seed
decides which faults happen and when. With TASKS so many tasks are submitted besides, in batches and evenly
over the run.

What happened is kept (its directory is printed) when the verdict is not clean.
"""

import argparse
import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

from fault.kit.schedule import Step, schedule
from fault.kit.stage import End, Stage
from fault.kit.table import left, overdue, prepared
from fault.kit.traffic import Traffic
from harness.final import read_final

from toc import TaskStatus
from toc.dev.local import until
from toc.observe.log import configure

SETTLED = 30.0
"""Seconds in which everything due is handled once the faults before it have ended."""


def soak(seed: int, seconds: float, *, rate: float, tasks: int, directory: Path, record: Path | None) -> bool:
    """One run; prints what happens and at last the verdict. Returns whether it is clean."""
    steps = schedule(seed, seconds)
    print(f"seed {seed}, {seconds:.0f} s: {len(steps)} faults; this seed repeats them", flush=True)
    with ExitStack() as stack:
        stage = Stage(directory, stack, seed)
        traffic = Traffic(stage.system, seed, rate=rate, tasks=tasks, seconds=seconds)
        try:
            _play(stage, steps, time.monotonic(), seconds)
            traffic.stop(patience=seconds / 2)
        finally:
            traffic.stop()
        settled = _settle(stage)
        verdict = stage.system.verdict(settle=SETTLED, write=10.0, hold=10.0)
        defects = [*settled, *_defects(stage, traffic, tasks)]
    print("what the application met:", dict(traffic.errors) or "no error")
    print(verdict)
    for defect in defects:
        print("DEFECT", defect)
    line = {
        "seed": seed, "seconds": round(seconds), "faults": len(steps) - stage.missed,
        "tasks": verdict.counts["acknowledged"], "lost": verdict.breaches["L"],
        "early": verdict.breaches["E"], "after_cancel": verdict.breaches["C"],
        "unexplained": verdict.breaches["D"], "duplicates": dict(verdict.duplicates),
        "dead": verdict.counts["dead"], "settled": round(verdict.settled_s, 1),
        "clean": verdict.clean and not defects,
    }  # fmt: skip
    if record is not None:
        record.parent.mkdir(exist_ok=True)
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print("CLEAN:" if line["clean"] else "BROKEN:", json.dumps(line), flush=True)
    return bool(line["clean"])


def _play(stage: Stage, steps: list[Step], began: float, seconds: float) -> None:
    """All of it in this thread: a server dies with the thread that has started it."""
    waiting = list(steps)
    open_: list[tuple[float, Step, End]] = []

    def end_until(at: float) -> None:
        for over in [over for over in open_ if over[0] <= at]:
            open_.remove(over)
            over[2]()

    try:
        while waiting or open_ or time.monotonic() < began + seconds:
            now = time.monotonic() - began
            while waiting and waiting[0].at <= now:
                step = waiting.pop(0)
                end_until(step.at)  # on a busy machine both may be overdue, and a server must be back by then
                end = stage.do(step)
                if end is None:
                    stage.missed += 1
                    print(f"{step}  (nothing there)", flush=True)
                else:
                    print(step, flush=True)
                    open_.append((step.at + step.lasts, step, end))
            end_until(now)
            stage.supervise()
            time.sleep(0.03)
    finally:
        for _, _, end in open_:
            end()


def _settle(stage: Stage) -> list[str]:
    """Wait until everything that is due has ended and the index is right; returns what did not come true."""
    system = stage.system

    def calmly(condition: Callable[[], bool]) -> Callable[[], bool]:
        def look() -> bool:
            stage.supervise()
            time.sleep(0.2)
            try:
                return condition()
            except Exception:  # a connection that a fault broke, found out now; if it goes on, we give up
                return False

        return look

    def dead_listed() -> bool:
        final = read_final(system.center)
        dead = {row.job_id for row in final.rows if row.status == TaskStatus.DEAD}
        return all(any(place.queue == "dead" for place in final.index.get(job_id, ())) for job_id in dead)

    wanted = {
        "every task has ended": (lambda: not overdue(system, 60.0), 240.0),
        "nothing is left prepared": (lambda: not prepared(system), 60.0),
        "dead tasks stand in their queues": (dead_listed, 90.0),
        "workers without a daemon have left": (lambda: not any(map(_is_ours, stage.orphans)), 60.0),
    }
    missing = [what for what, (condition, wait) in wanted.items() if not until(calmly(condition), wait)]
    return [f"not in time: {what}: {left(system)}" for what in missing]


def _is_ours(pid: int) -> bool:
    """Whether a process runs that could be the worker that had this id."""
    with suppress(OSError):
        return b"toc" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _defects(stage: Stage, traffic: Traffic, tasks: int) -> list[str]:
    found = [surprise for one in stage.supervised for surprise in one.surprises]
    found += traffic.defects[:20]
    if traffic.acknowledged < tasks:
        found.append(f"only {traffic.acknowledged:,} tasks of the batches were acknowledged")
    for log in stage.logs.glob("*.log"):
        said = [line for line in log.read_text().splitlines() if '"thread_died"' in line]
        found += [f"{log.stem}: {line[:1500]}" for line in said]
    return found


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit("interrupted")


def main() -> int:
    """The command; 1 when the verdict is not clean."""
    parser = argparse.ArgumentParser(prog="make chaos", description="Random faults over a local cluster.")
    parser.add_argument("--seed", type=int, help="decides which faults happen when; default: any")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=150.0, help="tasks a second, one by one")
    parser.add_argument("--tasks", type=int, default=0, help="so many besides, in batches")
    parser.add_argument("--record", type=Path, help="file to which a line with the numbers is added")
    parser.add_argument("--plan", action="store_true", help="only print the schedule of faults")
    given = parser.parse_args()
    seed = secrets.randbelow(100_000) if given.seed is None else given.seed
    if given.plan:
        print(*schedule(seed, given.minutes * 60), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, _interrupted)
    configure("error")  # what the SDK warns of here is what the faults are for
    directory = Path(tempfile.mkdtemp(prefix="toc-chaos-"))
    clean = False
    try:
        clean = soak(
            seed,
            given.minutes * 60,
            rate=given.rate,
            tasks=given.tasks,
            directory=directory,
            record=given.record,
        )
    finally:
        if clean:
            shutil.rmtree(directory)
        else:
            print(f"what happened is in {directory}", file=sys.stderr)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
