"""Replaces that race with workers: the last acknowledged version of each name runs once, with its body."""

from __future__ import annotations

import hashlib
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

from harness.system import System

from toc import NewTask, TaskStatus
from toc.model.task import OnConflict, PutOutcome

REPLACES = int(os.environ.get("TOC_TEST_REPLACES", "600"))
NAMES = 24


def test_the_last_version_of_each_name_runs_once_with_its_body_whoever_replaces_it(system: System) -> None:
    system.create_topics(slots=2)
    system.start(processes=2)
    center = system.center

    def replace(name: int) -> int:
        """Replace one name again and again, at about the time when it is due."""
        rng = random.Random(name)
        job_id = 0
        for n in range(REPLACES // NAMES):
            body = rng.randbytes(rng.choice((0, 10, 500, 5000)))
            attribute = {"sha": hashlib.sha256(b"x/y:" + body).hexdigest(), "n": n}
            if n % 3 == 0:
                attribute["sleep"] = 0.02
            delay = rng.choice((0.001, 0.02, 0.05, 0.2))
            task = NewTask(
                "test.sync", name, delay, None, attribute, "k", body=body, content_type="x/y",
                on_conflict=OnConflict.REPLACE,
            )  # fmt: skip
            put = center.put(task)
            assert (put.job_id != job_id) == (put.outcome is PutOutcome.NEW)
            job_id = put.job_id
        return job_id

    with ThreadPoolExecutor(NAMES) as pool:
        last = list(pool.map(replace, range(NAMES)))
    stored = [row for name in range(NAMES) for row in center.find(biz_id=name)]
    ids = [task.job_id for task in stored]
    system.wait(lambda: not system.pending(ids), "all have ended", 60)
    rows = center.store.read(ids)
    assert {row.status for row in rows.values()} == {TaskStatus.PROCESSED}, "none saw another's body"
    assert {job_id for job_id, row in rows.items() if row.dedup_key} == set(last)
    runs = versions(system)
    for job_id, row in rows.items():
        assert runs.get((job_id, row.version)) == 1, "the last version ran once"
    assert max(runs.values()) == 1


def versions(system: System) -> dict[tuple[int, int], int]:
    """How often each version of each task was started."""
    found: dict[tuple[int, int], int] = {}
    for file in system.history_directory.glob("*"):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            if event["e"] == "start":
                key = (event["job"], event["v"])
                found[key] = found.get(key, 0) + 1
    return found
