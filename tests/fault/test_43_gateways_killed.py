"""Rows 43 and 45: gateways killed between any two writes, acks late or from elsewhere: nothing ends twice."""

from __future__ import annotations

import random
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fault.conftest import Verdict
from harness import forks
from harness.system import System, small_system

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask, TaskStatus, Topic
from toc.model.topic import Backoff, Delivery

TOPIC = "test.pulled"
CONSUMERS, MOST = 4, 5
"""Consumers of a gateway, and how many tasks each pulls at once."""


@pytest.fixture
def pulled(
    tmp_path: Path, clean_redis: RedisServer, mariadb: MariaDB, database_prefix: str
) -> Iterator[System]:
    """A topic that is pulled, and a daemon that sweeps."""
    one = small_system(tmp_path, clean_redis, mariadb, database_prefix)
    one.create_topics(slots=2)
    topic = Topic(
        TOPIC, 9, 4, retries=3, backoff=Backoff.IMMEDIATE, delivery=Delivery.PULL, prepare_timeout=3
    )
    one.center.store.topics.create(topic)
    one.center.catalog.refresh()
    one.start(processes=1)
    yield one
    one.stop()


@contextmanager
def gateway(system: System, *, ttr: float = 1.0, **env: str) -> Iterator[forks.Forked]:
    """A gateway process with four consumers, which is ended if it lives."""
    said = system.directory / f"gateway-{secrets.token_hex(3)}.out"
    said.touch()
    process = forks.start(
        [TOPIC, str(CONSUMERS), str(MOST), str(ttr)],
        module="harness.pulling",
        env={**system.env, **env},
        streams={"stdout": str(said), "stderr": str(system.directory / "gateway.log")},
    )
    try:
        system.wait(lambda: said.read_text() or process.poll() is not None, "it is ready", 60)
        assert said.read_text() == "ready\n"
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pull.taken", marks=pytest.mark.slow),
        "pull.handed-out",
        "pull.answered",
        pytest.param("pull.acked", marks=pytest.mark.slow),
    ],
)
def test_a_gateway_that_dies_between_two_writes_loses_no_task(
    pulled: System, name: str, verdict: Verdict
) -> None:
    line = verdict(43, "gateway killed between two writes", name)
    with gateway(pulled, TOC_FAILPOINT=f"{name}:4") as doomed:
        fault = pulled.recorder.fault("kill", pids=[doomed.pid])
        tasks = [NewTask(TOPIC, n, 1.0 + n / 100, attribute={"lose": n % 7 == 0}) for n in range(120)]
        job_ids = pulled.client.submit_many(tasks)
        pulled.wait(lambda: doomed.poll() is not None, "it has died", 30)
        assert doomed.returncode == -9
        fault.end()
        with gateway(pulled):
            pulled.wait(lambda: not pulled.pending(job_ids), "all have ended", 30)
            pulled.wait(lambda: not pulled._prepared(), "what the dead one had prepared is given back", 10)
    rows = pulled.center.store.read(job_ids).values()
    assert {row.status for row in rows} == {TaskStatus.PROCESSED}
    line.prove(doomed.returncode == -9, "the process died there")
    # A try that was handed out and of which no consumer has heard is charged, though nobody has started it.
    judged = line.judge(pulled, within=10, but="R", at_most=CONSUMERS * MOST)
    assert judged.breaches["R"] <= CONSUMERS * MOST, str(judged)


@pytest.mark.slow
def test_gateways_killed_in_a_loop_under_load(pulled: System, verdict: Verdict) -> None:
    """Consumers fail, lose tasks and answer late; gateways are killed at any time; the checker judges."""
    line = verdict(43, "gateways killed in a loop", "consumers fail, lose tasks, answer late")
    chance = random.Random(7)
    job_ids: list[int] = []
    kills = 0

    def few_left() -> bool:
        return len(pulled.pending(job_ids)) < 100

    for _ in range(6):
        with gateway(pulled) as doomed, gateway(pulled, ttr=2.0):
            fault = pulled.recorder.fault("kill", pids=[doomed.pid])
            kinds: list[dict[str, object]] = [{}, {}, {}, {"fail": 1}, {"lose": 1}, {"fail": 9}]
            tasks = [
                NewTask(TOPIC, n, chance.uniform(1.0, 2.5), attribute=chance.choice(kinds))
                for n in range(150)
            ]
            job_ids += pulled.client.submit_many(tasks)
            some = chance.sample(job_ids, 5)
            pulled.wait(few_left, "some have ended", 30)
            for job_id in some:
                pulled.client.cancel(job_id)
            doomed.kill()
            kills += doomed.wait() == -9
            fault.end()
    with gateway(pulled):
        pulled.wait(lambda: not pulled.pending(job_ids), "all have ended", 30)
        pulled.wait(lambda: not pulled._prepared(), "what the dead had prepared is given back", 10)
    line.prove(kills == 6, f"{kills} gateways killed")
    # As above: what a gateway that dies had handed out is charged, whether anybody heard of it or not.
    judged = line.judge(pulled, within=10, but="R", at_most=kills * CONSUMERS * MOST)
    assert judged.breaches["R"] <= kills * CONSUMERS * MOST, str(judged)
    assert judged.counts["dead"] > 10
