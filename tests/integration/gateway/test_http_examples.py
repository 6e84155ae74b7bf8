"""The programs of examples/gateway, run as their readers run them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness.gateway import Gateway
from harness.patience import until
from harness.programs import need
from harness.system import System

from toc import TaskStatus, Topic
from toc.model.sharding import BizId
from toc.model.topic import Delivery

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    "curl": ["sh", "mailer.sh"],
    "python": [sys.executable, "mailer.py"],
    "node": ["node", "mailer.mjs"],
    "php": ["php", "mailer.php"],
}


@pytest.mark.parametrize("language", PROGRAMS)
def test_a_producer_and_a_consumer_get_every_mail_sent_once(
    system: System, tmp_path: Path, language: str
) -> None:
    """The gateway dies after it has stored the first task and before it answers: that is repeated."""
    need("curl")
    need(PROGRAMS[language][0])
    system.center.store.topics.create(Topic("mail.send", 70, 4, delivery=Delivery.PULL))
    once = tmp_path / "once"
    gateway = Gateway(system, env={"TOC_FAILPOINT": "batch.rows-stored", "TOC_FAILPOINT_ONCE": str(once)})
    log = tmp_path / "consumer.log"
    env = {**os.environ, "TOC": f"http://127.0.0.1:{gateway.port}", "TOKEN": gateway.tokens["all"]}
    directory = ROOT / "examples" / "gateway"
    try:
        for _ in range(2):
            subprocess.run(
                [*PROGRAMS[language], "produce", "ada", "grace"],
                cwd=directory,
                env=env,
                check=True,
                timeout=120,
            )
        assert once.exists()
        with log.open("wb") as output:
            consumer = subprocess.Popen(
                [*PROGRAMS[language], "consume"], cwd=directory, env=env, stdout=output, stderr=output
            )
        try:
            rows = [system.center.store.find(BizId.of(name)) for name in ("ada", "grace")]
            assert [len(found) for found in rows] == [1, 1]
            job_ids = [found[0].job_id for found in rows]
            assert until(lambda: not system.pending(job_ids), 60), log.read_text()
            consumer.send_signal(signal.SIGTERM)
            assert consumer.wait(60) == 0, log.read_text()
        finally:
            consumer.kill()
            consumer.wait()
        sent = sorted(line.split()[1] for line in log.read_text().splitlines() if line.startswith("sent "))
        assert sent == ["ada", "grace"], log.read_text()
        assert {system.row(job_id).status for job_id in job_ids} == {TaskStatus.PROCESSED}
    finally:
        gateway.stop()
