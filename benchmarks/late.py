"""What it costs to tell why tasks were late: ``python -m benchmarks.late [--rounds N] [--rate N]``.

One daemon of two processes, which looks for causes or does not: in an order drawn anew, each is started
alone, and starts its topic's waiting tasks at a rate after a pause, so that every one is late. Prints the
processor time of its processes and of the servers for a task, and what telling takes of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks import processes
from benchmarks.local import MariaDB, RedisServer
from toc import NewTask, Settings, Task, TimeoutCenter, Topic
from toc.dev.local import until
from toc.model.catalog import NOTICED_SECONDS
from toc.store.migrate import Migrator
from toc.worker.late_starts import LateStarts

TOPICS = TOLD, UNTOLD = "told", "untold"
PROCESSES = 2
SECONDS = 4
"""How long the tasks of a round last."""
AT_ONCE = 10_000
TOPIC = "BENCH_TOPIC"

center = TimeoutCenter()
if (_topic := os.environ.get(TOPIC)) is not None:

    @center.handler(_topic)
    def handle(task: Task) -> None:
        """Do nothing."""

    if _topic == UNTOLD:
        LateStarts.of = lambda *_: {}  # type: ignore[method-assign]


def waiting(of: TimeoutCenter, topic: str) -> int:
    """How many tasks of a topic have not ended."""
    peeks = of.queues.peek(of.catalog.get(topic).slots()).values()
    return sum(one.store + one.prepared for one in peeks if not isinstance(one, Exception))


def spent(of: TimeoutCenter, topic: str, rate: int, pids: Mapping[str, list[int]]) -> dict[str, float]:
    """Microseconds for a late task, by who used them."""
    topics, count = of.store.topics, rate * SECONDS
    topics.alter(topic, paused=True)
    time.sleep(NOTICED_SECONDS)
    for first in range(0, count, AT_ONCE):
        of.submit_many([NewTask(topic, n, delay=0.1) for n in range(first, min(first + AT_ONCE, count))])
    assert until(lambda: waiting(of, topic) >= count, 120), waiting(of, topic)
    time.sleep(1.5)  # all are late
    before = {name: processes.cpu_seconds(some) for name, some in pids.items()}
    topics.alter(topic, paused=False, resume_rate=rate, resumed_at=of.clock.now_ms())
    assert until(lambda: waiting(of, topic) == 0, 300), waiting(of, topic)
    time.sleep(1)  # what ended is written
    used = {name: 1e6 * (processes.cpu_seconds(some) - before[name]) / count for name, some in pids.items()}
    return {**used, "all": sum(used.values())}


def measure(rounds: int, rate: int) -> dict[str, object]:
    """Run the rounds."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toc-late-")))
        mariadb, redis = MariaDB(directory / "mariadb"), RedisServer(directory / "redis")
        for server in (mariadb, redis):
            server.start()
            stack.callback(server.stop)
        Migrator([mariadb.url], databases=8, tables=64, prefix="toc_").upgrade()
        of = TimeoutCenter(Settings(database_urls=[mariadb.url], databases=8, tables=64, redis_url=redis.url))
        stack.callback(of.close)
        named = ("mariadb", mariadb.process), ("redis", redis.process)
        servers = {name: [one.pid] for name, one in named if one}
        for number, topic in enumerate(TOPICS, 1):
            of.store.topics.create(Topic(topic, number, 16))
        of.catalog.refresh()
        env = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        env |= {"TOC_DATABASE_URLS": mariadb.url, "TOC_TABLES": "64", "TOC_DATABASES": "8"}
        env |= {"TOC_REDIS_URL": redis.url}
        log = stack.enter_context((directory / "daemon.log").open("wb"))
        app = ["worker", "--app", "benchmarks.late:center", "--processes", str(PROCESSES)]

        def one(topic: str) -> dict[str, float]:
            daemon = subprocess.Popen(
                [sys.executable, "-m", "toc", *app], env={**env, TOPIC: topic}, stdout=log, stderr=log
            )
            try:
                of.submit_many([NewTask(topic, n, delay=0.1) for n in range(rate)])
                time.sleep(1)
                assert until(lambda: waiting(of, topic) == 0, 120), waiting(of, topic)  # caches are filled
                return spent(of, topic, rate, {"workers": processes.tree(daemon.pid), **servers})
            finally:
                daemon.terminate()
                daemon.wait(60)

        pairs = []
        for _ in range(rounds):
            found = {topic: one(topic) for topic in random.sample(TOPICS, 2)}
            pairs.append(found)
            print({topic: f"{us['all']:.0f} us" for topic, us in found.items()}, file=sys.stderr, flush=True)
        counts = of.store.episodes.list(0, 10_000)
        told: dict[str, object] = {
            topic: {
                name: round(statistics.median(one[topic][name] for one in pairs), 1)
                for name in pairs[0][topic]
            }
            for topic in TOPICS
        }
        more = statistics.median(one[TOLD]["all"] - one[UNTOLD]["all"] for one in pairs)
        return {
            "microseconds of processor for a task": told,
            "telling, % of a core": round(more * rate / 1e4, 1),
            "late starts told": sum(one.tasks for one in counts),
        }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rate", type=int, default=3000)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rounds, arguments.rate), indent=2))


if __name__ == "__main__":
    main()
