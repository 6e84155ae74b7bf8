"""Fault 30: handlers that end their process, and an application whose files are replaced under a daemon."""

from __future__ import annotations

import os
import signal

import pytest
from fault.conftest import Build, Verdict
from fault.kit.load import Load
from harness import forks
from harness.system import System

from toc import TaskStatus

APP = "fault.apps.hostile:center"
EXIT_CODES = (0, 1, 2, 70, 75, 130, 255)
BY_HAND = ("raise SystemExit", "SIGTERM")
"""Deeds that end no process at once, but were taken for an end in good order."""


def test_whatever_exit_code_a_handler_ends_its_process_with_the_daemon_lives_and_replaces_it(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(30, "a handler ends its process", "each exit code, SystemExit, SIGTERM")
    system = build()
    daemon = system.start(processes=2, app=APP)
    first = set(daemon.workers())
    deeds = [*(f"exit {code}" for code in EXIT_CODES), *BY_HAND]
    job_ids = []
    with Load(system.client, rate=30):
        for n, deed in enumerate(deeds):
            topic = ("test.sync", "test.async")[n % 2]
            job_ids.append(system.client.submit(topic, biz_id=n, delay=0.1, attribute={"deed": deed}))
            died = min(n + 1, len(EXIT_CODES))
            system.wait(lambda: len(daemon.events("worker_died")) == died, "its process died", 20)  # noqa: B023
        system.wait(lambda: not system.pending(job_ids), "all have ended", 40)
        system.wait(lambda: len(set(daemon.workers()) - first) == 2, "all processes are others", 30)
    told = daemon.events("worker_died")
    codes = sorted(event["exit_code"] for event in told)
    recycled = [event["reason"] for event in daemon.events("worker_recycled")]
    line.prove(
        codes == sorted(EXIT_CODES) and recycled == ["SIGTERM was sent to it"],
        f"processes ended with {', '.join(map(str, codes))}; one was sent SIGTERM by its handler",
    )
    rows = system.center.store.read(job_ids)
    assert all(row.status == TaskStatus.PROCESSED for row in rows.values())
    line.judge(system, within=15, at_most=200)
    assert daemon.process.poll() is None
    daemon.terminate()
    assert daemon.process.wait(60) == 0


def test_a_copy_of_the_process_in_which_a_task_runs_alone_answers_for_nobody(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(30, "a handler forks and returns in the copy", "where it runs alone")
    system = build()
    daemon = system.start(processes=1, app=APP)
    attribute = {"die": 3, "deed": "fork", "deeds": 99}
    suspects = [system.client.submit("test.sync", biz_id=n, delay=0.2, attribute=attribute) for n in range(2)]
    system.wait(lambda: not system.pending(suspects), "all have ended", 60)
    copies = len(daemon.events("copy_ended"))
    line.prove(copies >= 1, f"{copies} copies came to the end of their handlers")
    quarantined = {event["job_id"] for event in daemon.events("task_quarantined")}
    alone = [system.starts(job_id)[-1] for job_id in quarantined & set(suspects)]
    assert alone
    line.judge(system, within=60, at_most=120 * len(daemon.events("worker_died")), crash_limit=3)
    ends = [event for event in system.history() if event.event == "end"]
    for start in alone:
        assert [end.outcome for end in ends if (end.job_id, end.pid) == (start.job_id, start.pid)] == ["ok"]


@pytest.mark.slow
def test_a_task_that_ends_every_process_with_the_code_of_an_orderly_end_is_dead_in_the_end(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(30, "a handler ends its process", "each time, with 0 and 2")
    system = build()
    daemon = system.start(processes=2, app=APP)
    with Load(system.client, rate=30):
        job_ids = [
            system.client.submit("test.sync", biz_id=n, delay=0.2, attribute={"deed": deed, "deeds": 99})
            for n, deed in enumerate(("exit 0", "exit 2"))
        ]
        system.wait(lambda: not system.pending(job_ids), "both are dead", 60)
    rows = system.center.store.read(job_ids)
    errors = [rows[job_id].last_error or "" for job_id in job_ids]
    died = len(daemon.events("worker_died"))
    line.prove(died >= 3, f"{died} processes died; the last errors: {'; '.join(errors)}")
    assert [error.rpartition("alone ")[2] for error in errors] == ["(exit code 0)", "(exit code 2)"]
    assert daemon.process.poll() is None
    line.judge(system, within=60, at_most=120 * died, crash_limit=3)


@pytest.mark.slow
def test_an_application_that_cannot_be_loaded_for_a_while_is_tried_again_once_it_could(
    build: Build, verdict: Verdict
) -> None:
    line = verdict(30, "files replaced under a daemon", "half-written, then whole")
    system = build()
    shop = system.directory / "shop.py"
    whole = "from harness.app import center\n"
    shop.write_text(whole)
    path = os.pathsep.join((str(system.directory), system.env["PYTHONPATH"]))
    env = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    daemon = system.start(processes=2, app="shop:center", env=env)
    with Load(system.client, rate=30):
        shop.write_text(whole[:12])
        (victim, _) = before = daemon.workers()
        with system.recorder.fault("kill", pids=[victim]):
            os.kill(victim, signal.SIGKILL)
        system.wait(lambda: len(daemon.events("worker_unfit")) >= 3, "it was tried again", 30)
        assert daemon.process.poll() is None
        shop.write_text(whole)
        system.wait(lambda: len(daemon.events("worker_ready")) == 3, "it is loaded again", 30)
    unfit = daemon.events("worker_unfit")
    line.prove(
        all("importing it failed: SyntaxError" in event["error"] for event in unfit),
        f"{len(unfit)} processes could not load the application, then one could",
    )
    assert before[1] in daemon.workers(), "the other process served meanwhile"
    line.judge(system, within=5, at_most=60)
    assert _refused(system, shop.with_name("broken.py"), env) == 2


def _refused(system: System, path: os.PathLike[str], env: dict[str, str]) -> int:
    """What a daemon ends with whose application never could be loaded in a process of its own."""
    with open(path, "w") as module:  # noqa: PTH123
        # It can be loaded where it is looked at first, in the daemon, and not where it is to run.
        module.write("import sys\nif sys.argv[0].endswith('process.py'): import nowhere\n")
        module.write("from harness.app import center\n")
    words = ["worker", "--app", "broken:center", "--processes", "2"]
    done = forks.run(words, env={**system.env, **env})
    assert "error: --app 'broken:center': importing it failed: there is no module 'nowhere'" in done.stderr
    return done.returncode
