"""A rolling upgrade as docs/run.md has it: the schema, then host after host, under load.

The next version is a copy of this one with a migration more. To try the way to a real one, in the checkout of
the older:
``TOC_TEST_UPGRADE_TO=../later .venv/bin/pytest tests/integration/system/test_upgrade.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from fault.kit.load import Load, in_another_process
from harness import forks
from harness.metrics import address
from harness.secured import migrating
from harness.system import DaemonProcess, System

from toc import TaskStatus

ROOT = Path(__file__).parents[3]
HOSTS = ("host-a", "host-b", "host-c")
MIGRATION = """
from alembic import context, op
from sqlalchemy import inspect

revision, down_revision = "9999", "{head}"


def upgrade():
    inspector = inspect(op.get_bind())
    for number, table in enumerate(context.config.attributes["tables"], start=1):
        add("timeout_task_%04d" % table, inspector)
        context.config.attributes["migrated"](revision, number)
    if 0 in context.config.attributes["tables"]:
        add("timeout_topic", inspector)


def add(table, inspector):
    if "of_next" not in [column["name"] for column in inspector.get_columns(table)]:
        op.execute("ALTER TABLE " + table + " ADD COLUMN of_next INT NOT NULL DEFAULT 7")
"""


@pytest.fixture
def cluster(hosts: System) -> System:
    """Few tables: each takes its time to change."""
    return hosts


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: {old}"
    path.write_text(text.replace(old, new))


@pytest.fixture
def later(tmp_path: Path) -> Path:
    """The checkout of a later version: a copy of this one whose schema goes a revision further."""
    if given := os.environ.get("TOC_TEST_UPGRADE_TO"):
        return Path(given).resolve()
    copy = tmp_path / "next"
    for package in ("toc", "migrations"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    schema = copy / "toc/store/schema.py"
    (head,) = re.findall(r'^REVISION = "(\w+)"$', schema.read_text(), re.MULTILINE)
    replace(schema, f'REVISION = "{head}"', 'REVISION = "9999"')
    (copy / "migrations/versions/9999_next.py").write_text(MIGRATION.replace("{head}", head))
    return copy


def command(
    system: System, program: dict[str, str], *words: str, **settings: str
) -> subprocess.CompletedProcess[str]:
    return forks.run(words, env={**system.env, **program, **settings}, timeout=120)


def ready(daemon: DaemonProcess, since: int = 0) -> bool:
    """Whether /readyz says yes: of the daemon that has written to this log since then."""
    log = daemon.log.read_text()[since:]
    if "metrics_served" not in log:
        return False
    try:
        with urllib.request.urlopen(f"http://{address(log)}/readyz", timeout=60) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False


@pytest.mark.slow
def test_the_schema_then_host_after_host_and_nothing_is_lost_doubled_or_burned(
    cluster: System, later: Path
) -> None:
    cluster.create_topics(slots=8, backoff_base=0.2)
    metrics = {"TOC_METRICS_ADDRESS": "127.0.0.1:0", "TOC_LOG_FORMAT": "json"}
    new = {"PYTHONPATH": f"{later}:{cluster.env['PYTHONPATH']}"}
    if "TOC_TEST_UPGRADE_TO" in os.environ:
        # What forks knows the modules of this version. A new interpreter runs the program on PYTHONPATH, no
        # working directory in the way.
        new["PYTHONSAFEPATH"] = "1"
    daemons = {host: cluster.start(host, processes=1, env=metrics) for host in HOSTS}

    def await_ready(host: str, since: int = 0) -> None:
        cluster.wait(lambda: ready(daemons[host], since), f"{host} is ready", 30)

    for host in HOSTS:
        await_ready(host)
    with Load(cluster.client, rate=80, ahead=(0.5, 1.5), fail=0.0) as load:
        # In the wrong order: a new version does not start on the old schema, and says what to do.
        assert command(cluster, new, "db", "check").returncode == 3
        refused = command(cluster, new, "worker", "--app", "harness.app:center")
        assert refused.returncode == 3, refused.stderr
        assert "run `toc db upgrade`" in refused.stderr

        urls = ",".join(map(migrating, cluster.settings.database_urls))
        upgraded = command(cluster, new, "db", "upgrade", TOC_DATABASE_URLS=urls)
        assert upgraded.returncode == 0, upgraded.stderr
        assert command(cluster, new, "db", "check").returncode == 0

        for host, daemon in daemons.items():
            daemon.terminate()
            assert daemon.process.wait(60) == 0, cluster.logs()
            since = len(daemon.log.read_text())
            daemons[host] = cluster.start(host, processes=1, env={**metrics, **new})
            await_ready(host, since)
        count = len(load.job_ids)
        cluster.wait(lambda: len(load.job_ids) > count + 80, "the load goes on", 20)

    for daemon in daemons.values():  # it was the later version that ran
        for pid in (daemon.process.pid, *daemon.workers()):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert any(line.startswith(b"PYTHONPATH=" + str(later).encode()) for line in variables)
    # The services that submit come last: one of the new version does.
    call = {"do": "submit", "first": 77, "count": 10, "ahead": [0.1, 0.5]}
    assert in_another_process(cluster, [call], env=new).returncode == 0
    job_ids = load.job_ids + [
        task.job_id for biz_id in range(77, 87) for task in cluster.center.find(biz_id=biz_id)
    ]
    assert len(job_ids) == len(load.job_ids) + 10
    errors = set(load.errors) - {"NotInFuture"}  # that one is of a machine that stood still before the call
    assert not errors, load.said
    cluster.wait(lambda: not pending(cluster, job_ids), "everything has ended", 20)

    verdict = cluster.verdict()
    print(verdict)
    assert verdict.clean, f"{verdict}\n{cluster.logs()}"
    assert not verdict.duplicates, verdict
    rows = cluster.center.store.read(job_ids).values()
    assert not any(row.attempts or row.crashes for row in rows if row.status == TaskStatus.PROCESSED)


def pending(system: System, job_ids: list[int]) -> list[int]:
    rows = system.center.store.read(job_ids)
    return [job_id for job_id, row in rows.items() if row.status == TaskStatus.PENDING]
