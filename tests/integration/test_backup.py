"""docs/run.md, "Backup and restore": its commands as they are written, on servers of their own.

A server is lost after its backup. With its binary log nothing is lost and nothing runs twice; without it
those tasks run again that ended after the backup, and no others.
"""

import hashlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pymysql
import pytest
from conftest import Launch
from harness.system import System
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisServer
from toc import NewTask, TaskStatus
from toc.store.schema import body_table_name, task_table_name

RUN = Path(__file__).parents[2] / "docs/run.md"
STEPS = {
    name: textwrap.dedent(text)
    for name, text in re.findall(
        r"^ *<!-- a test runs this: ([\w ]+) -->\n *```sh\n(.*?)^ *```$",
        RUN.read_text(),
        re.MULTILINE | re.DOTALL,
    )
}
TABLES = 8
SOON = 40
LATER = 20
"""How many tasks end between backup and loss, and how many are submitted then."""


def run(step: str, place: Path, *, env: dict[str, str] | None = None, code: int = 0) -> str:
    """A step of the page as it is written, in a directory that stands for /etc/toc as well."""
    command = step.replace("/etc/toc/", f"{place}/")
    done = subprocess.run(
        ["sh", "-c", command], cwd=place, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def options(place: Path, name: str, server: MariaDB) -> None:
    url = make_url(server.url)
    lines = [
        "[client]",
        f"host={url.host}",
        f"port={url.port}",
        f"user={url.username}",
        f"password={url.password}",
    ]
    (place / name).write_text("\n".join(lines) + "\n")


def rows(server: MariaDB) -> dict[str, list[tuple[object, ...]]]:
    """All that the task tables and the topic table hold."""
    url = make_url(server.url)
    names = [
        f"toc_{number % 2}.{name(number)}"
        for number in range(TABLES)
        for name in (task_table_name, body_table_name)
    ]
    connection = pymysql.connect(
        host="127.0.0.1", port=server.port, user=str(url.username), password=str(url.password)
    )
    with connection, connection.cursor() as cursor:
        found = {}
        for name in [*names, "toc_0.timeout_topic", "toc_0.alembic_version", "toc_1.alembic_version"]:
            cursor.execute(f"SELECT * FROM {name} ORDER BY 1")
            found[name] = list(cursor.fetchall())
        return found


def system_on(directory: Path, server: MariaDB, index: RedisServer) -> System:
    directory.mkdir(exist_ok=True)
    return System(directory, database_urls=[server.url], databases=2, tables=TABLES, redis_url=index.url)


def due_in(biz_id: int, seconds: float) -> NewTask:
    """A task whose handler checks its body."""
    body = b"%d" % biz_id * 1000
    attribute = {"sha": hashlib.sha256(b"a/b:" + body).hexdigest()}
    return NewTask("test.sync", biz_id, seconds, None, attribute, body=body, content_type="a/b")


def ended(system: System, job_ids: list[int]) -> bool:
    return all(row.status != TaskStatus.PENDING for row in system.center.store.read(job_ids).values())


@pytest.mark.slow
def test_a_lost_database_server_comes_back_as_the_page_says(launch: Launch, tmp_path: Path) -> None:
    lost = launch(MariaDB, config=["log-bin=binlog", "server-id=1"])
    index = launch(RedisServer)
    options(tmp_path, "backup.cnf", lost)
    before = system_on(tmp_path / "before", lost, index)
    try:
        before.create_topics(slots=4)
        worker = before.start(processes=1)
        first = before.center.submit_many([due_in(n, 0.1) for n in range(10)])
        far = before.center.submit_many([due_in(n, 3600) for n in range(10)])
        before.wait(lambda: ended(before, first), "the first have ended", 60)
        soon = before.center.submit_many([due_in(n, 8) for n in range(SOON)])
        run(STEPS["back up"], tmp_path)
        assert not any(event.job_id in soon for event in before.history()), "the backup came too late"
        later = before.center.submit_many([due_in(n, 0.1) for n in range(LATER)])
        before.wait(lambda: ended(before, [*soon, *later]), "what is due later has ended", 60)
        worker.terminate()
        assert worker.process.wait(60) == 0
        truth = rows(lost)
    finally:
        before.stop()
    lost.kill()

    whole = launch(MariaDB)
    options(tmp_path, "admin.cnf", whole)
    run(STEPS["restore"], tmp_path)
    where, replay = STEPS["replay"].rstrip("\n").split("\n", 1)
    found = re.search(r"MASTER_LOG_FILE='(binlog\.\d+)', MASTER_LOG_POS=(\d+)", run(where, tmp_path))
    assert found
    kept = [path for path in sorted((lost.directory / "data").glob("binlog.[0-9]*")) if path.name >= found[1]]
    replay = replay.replace("POSITION", found[2]).replace(
        "binlog.FIRST binlog.NEXT", " ".join(map(str, kept))
    )
    assert rows(whole) != truth
    run(replay, tmp_path)
    assert rows(whole) == truth

    partial = launch(MariaDB)
    options(tmp_path, "admin.cnf", partial)
    run(STEPS["restore"], tmp_path)
    index.call("FLUSHALL")
    after = system_on(tmp_path / "after", partial, index)
    try:
        programs = f"{Path(sys.executable).parent}:{after.env['PATH']}"
        run(STEPS["fill"], tmp_path, env=after.env | {"PATH": programs})
        after.start(processes=1)
        after.wait(lambda: ended(after, soon), "what the backup had as pending has ended", 15)
        assert {row.status for row in after.center.store.read(soon).values()} == {TaskStatus.PROCESSED}
        again = {event.job_id for event in after.history() if event.event == "start"}
        assert again == set(soon)
        assert all(after.center.get(job_id) is None for job_id in later)
        assert {row.status for row in after.center.store.read(far).values()} == {TaskStatus.PENDING}
        assert len(after.center.store.read(far)) == len(far)
    finally:
        after.stop()


def test_a_backup_that_fails_says_so_and_leaves_no_file(launch: Launch, tmp_path: Path) -> None:
    practice = launch(MariaDB)  # no binary log
    options(tmp_path, "backup.cnf", practice)
    options(tmp_path, "admin.cnf", practice)
    url = make_url(practice.url)
    connection = pymysql.connect(
        host="127.0.0.1", port=practice.port, user=str(url.username), password=str(url.password)
    )
    with connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE toc_0")
        run(STEPS["back up"], tmp_path, code=2)
        assert not (tmp_path / "toc.sql.gz").exists()
        run(STEPS["back up"].replace("--master-data=2 ", ""), tmp_path)
        whole = (tmp_path / "toc.sql.gz").read_bytes()
        cursor.execute("DROP DATABASE toc_0")
        run(STEPS["back up"], tmp_path, code=1)
        (tmp_path / "toc.sql.gz").write_bytes(whole[:-10])
        run(STEPS["restore"], tmp_path, code=1)
        (tmp_path / "toc.sql.gz").write_bytes(whole)
        run(STEPS["restore"], tmp_path)
        cursor.execute("USE toc_0")
