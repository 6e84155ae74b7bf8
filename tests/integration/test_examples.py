"""The example application, the programs of the documentation and the applications of docs/frameworks.md,
as run by readers."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException
from harness import forks
from harness.patience import PATIENCE, until
from opentelemetry import trace
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, update

from benchmarks.local import MariaDB, RedisServer, ZooKeeper
from toc import Settings, TimeoutCenter, Topic
from toc.dev.local import write_config
from toc.model.topic import TopicType
from toc.store.migrate import Migrator
from toc.testing import Toc

# The example application and the programs of the documentation, run as their readers run them.

ROOT = Path(__file__).parents[2]


class Dev:
    """``toc dev --app shop:center`` in a directory, as a reader has it in the first terminal.

    ``env``: what the reader has exported; ``before``: what he has run. ``whole``: every ``toc``, also of the
    second terminal, is the installed program in a new interpreter.
    """

    def __init__(
        self, directory: Path, command: str, *, before: Sequence[str], whole: bool, env: Mapping[str, str]
    ) -> None:
        self.directory = directory
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        self.env |= env
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"
        self.output = directory / "dev.log"
        self.process: subprocess.Popen[bytes] | forks.Forked
        if whole:
            with self.output.open("wb") as output:
                self.process = subprocess.Popen(
                    ["sh", "-c", f"exec {command}"],
                    cwd=directory,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        else:
            programs = directory / "programs"
            programs.mkdir(exist_ok=True)
            forks.put_on_path(programs)
            self.env["PATH"] = f"{programs}:{self.env['PATH']}"
            self.run("\n".join(before))
            self.output.write_text("")
            program, *words = shlex.split(command)
            assert program == "toc"
            streams = dict.fromkeys(("stdout", "stderr"), str(self.output))
            self.process = forks.start(
                words, env=self.env, directory=directory, session=True, streams=streams
            )
        self.await_output("worker_ready", 60)

    def run(self, script: str) -> str:
        """Run a script in the second terminal; returns what it printed."""
        done = subprocess.run(
            ["sh", "-eu", "-c", script],
            cwd=self.directory,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def await_output(self, text: str, seconds: float) -> None:
        """Wait until the first terminal shows the text."""
        until = time.monotonic() + seconds
        while text not in self.output.read_text():
            if time.monotonic() > until or self.process.poll() is not None:
                raise AssertionError(f"not seen: {text}\n{self.output.read_text()[-3000:]}")
            time.sleep(0.02)

    def stop(self) -> None:
        """As Ctrl-C does."""
        self.process.terminate()
        self.process.wait(60)


@pytest.fixture
def dev() -> Iterator[Callable[..., Dev]]:
    started: list[Dev] = []
    directory = Path(tempfile.mkdtemp(prefix="toc-"))  # short, for the path of a Unix socket

    def start(
        program: str | Path,
        command: str,
        *,
        before: Sequence[str] = (),
        whole: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Dev:
        if isinstance(program, Path):
            (directory / program.name).symlink_to(program)
        else:
            (directory / "shop.py").write_text(program)
        started.append(Dev(directory, command, before=before, whole=whole, env=env or {}))
        return started[-1]

    yield start
    for one in started:
        one.stop()
    shutil.rmtree(directory)


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_program_of_the_readme_closes_one_order_and_not_the_paid_one(dev: Callable[..., Dev]) -> None:
    command, script = _blocks("README.md", "sh")
    (program,) = _blocks("README.md", "python")
    terminal = dev(program, command, whole=True)
    assert "CANCELLED" in terminal.run(script)
    terminal.await_output("order 42 is closed: unpaid", 60)
    assert "order 43" not in terminal.output.read_text()


def test_the_quickstart_works_as_written(dev: Callable[..., Dev]) -> None:
    _, command, submit, *others = _blocks("docs/quickstart.md", "sh")[:-3]
    (program,) = _blocks("docs/quickstart.md", "python")
    terminal = dev(program, command)
    job_id = int(terminal.run(submit))
    terminal.await_output("order 42 is closed: unpaid", 60)
    export = submit.splitlines()[0]
    shown = terminal.run("\n".join([export, *others]))
    assert str(job_id) in shown
    assert "cancelled" in shown


def test_the_quickstart_goes_on_to_real_servers(
    dev: Callable[..., Dev],
    mariadb: MariaDB,
    database_prefix: str,
    clean_redis: RedisServer,
    zookeeper: ZooKeeper,
) -> None:
    (program,) = _blocks("docs/quickstart.md", "python")
    ours = {
        "TOC_DATABASE_URLS": mariadb.url,
        "TOC_REDIS_URL": clean_redis.url,
        "TOC_ZOOKEEPER": zookeeper.url,
    }
    env = {"TOC_DATABASE_PREFIX": database_prefix}
    for biz_id, block in enumerate(_blocks("docs/quickstart.md", "sh")[-3:], 42):
        export, *before, worker = block.splitlines()
        env |= {name: ours.get(name, value) for name, value in re.findall(r" (\w+)=(\S+)", export)}
        terminal = dev(program.replace("42", str(biz_id)), worker, before=before, env=env)
        terminal.run("python shop.py")
        terminal.await_output(f"order {biz_id} is closed: unpaid", 60)
        terminal.stop()


def test_the_quickstart_without_python_works_as_written(dev: Callable[..., Dev]) -> None:
    blocks = _blocks("docs/quickstart.md", "bash")
    terminal = dev("", "toc dev")
    terminal.await_output("http0", 60)  # the gateway's process is ready as well
    said = terminal.output.read_text()
    for word, pattern in {
        "PORT": r"gateway at http://127\.0\.0\.1:(\d+)",
        "THE_TOKEN": r"its token, for a week: (\S+)",
        "YOUZAN": r"youzan at http://127\.0\.0\.1:(\d+)",
    }.items():
        (value,) = re.findall(pattern, said)
        blocks = [block.replace(word, value) for block in blocks]
    pulled, webhook, dialect = terminal.run("\necho ====\n".join(blocks)).split("====\n")
    assert '"outcome":"acked"' in pulled
    secret, _, made = webhook.splitlines()
    assert '"secret":"whsec_' in secret
    assert '"id":"1","body":"hello"' in dialect
    job_id = json.loads(made)["job_id"]
    # Nobody listens there, or a stranger: it was sent all the same.
    look = f"export TOC_CONFIG=$PWD/.toc/toc.toml; toc get {job_id} --json"
    tried = time.monotonic() + PATIENCE
    while (task := json.loads(terminal.run(look)))["status"] == "pending" and not task["failed_tries"]:
        assert time.monotonic() < tried, task


def test_the_example_runs_as_its_readme_says(dev: Callable[..., Dev]) -> None:
    first, second = _blocks("examples/orders/README.md", "sh")
    export, command = first.splitlines()
    _, *variables = shlex.split(export)
    env = dict(variable.split("=") for variable in variables)
    terminal = dev(ROOT / "examples/orders", command, env=env)
    shown = terminal.run(second)
    for outcome in ("is closed", "is paid", "is confirmed", "was told: your membership ends soon"):
        assert shown.count(f" {outcome}") >= 1, shown


def test_the_recipes_run_in_the_order_of_the_page(dev: Callable[..., Dev]) -> None:
    terminal = dev(_blocks("docs/quickstart.md", "python")[0], "toc dev --app shop:center")
    patch = pytest.MonkeyPatch()
    patch.setenv("TOC_CONFIG", str(terminal.directory / ".toc/toc.toml"))
    patch.chdir(terminal.directory)
    patch.setattr(trace, "set_tracer_provider", lambda _: None)  # others here set theirs
    recipes = _blocks("docs/howto.md", "python")
    engine = create_engine(Settings().database_urls[0])
    metadata = MetaData()
    orders = Table("orders", metadata, Column("order_id", Integer), Column("state", String(16)))
    metadata.create_all(engine)
    names: dict[str, Any] = {"engine": engine, "orders": orders, "update": update}
    try:
        with TimeoutCenter() as center:
            for number, (topic, kind) in enumerate(
                {
                    "member.remind": "timed",
                    "order.audit": "instant",
                    "invoice.send": "timed",
                    "invoice.remind": "timed",
                    "feed.poll": "timed",
                }.items(),
                start=2,
            ):
                center.store.topics.create(Topic(topic, number, 4, topic_type=TopicType(kind)))
        for recipe in recipes:
            exec(recipe, names)
        names["center"].close()
    finally:
        if "provider" in names:
            names["provider"].shutdown()  # its thread
        engine.dispose()
        patch.undo()
    assert set(names["center"].handlers) == {
        "order.close", "payment.check", "order.confirm", "member.remind", "report.make",
        "invoice.remind", "order.audit-late", "outbox.drain",
    }  # fmt: skip


# The applications of docs/frameworks.md, as their readers run and test them.


def application(name: str) -> str:
    """The program that stands below a heading."""
    section = (ROOT / "docs/frameworks.md").read_text().split(f"\n## {name}\n")[1]
    return section.split("```python\n")[1].split("\n```\n")[0]


def test_fastapi_submits_cancels_and_runs_handlers_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(application("FastAPI"))
    values = {"database_urls": [f"sqlite:///{tmp_path / 'toc.db'}"], "databases": 1, "tables": 1}
    config = write_config(tmp_path / "toc.toml", values)
    settings = Settings(**values, redis_url=None)
    Migrator(settings.database_urls, databases=1, tables=1, prefix="toc_").upgrade()
    log = tmp_path / "log"
    with (
        TimeoutCenter(settings) as center,
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "shop:app", "--port", "0"],
            cwd=tmp_path, env={"TOC_CONFIG": str(config), "PATH": ""}, stdout=output, stderr=output,
        ) as server,
    ):  # fmt: skip
        center.store.topics.create(Topic("order.close", 1, 4))
        try:
            assert until(lambda: " running on " in log.read_text(), PATIENCE), log.read_text()
            (address,) = re.findall(r"http://[\d.:]+", log.read_text())

            def post(path: str) -> Any:
                with urllib.request.urlopen(f"{address}{path}", data=b"") as answer:
                    return json.load(answer)

            placed = post("/orders/42")["job_id"]
            assert post("/orders/42")["job_id"] == placed
            paid = post("/orders/43")["job_id"]
            assert post("/orders/43/payment") == {paid: "cancelled"}
            center.reschedule(int(placed), delay="100ms")
            assert until(lambda: "order 42 is closed: unpaid" in log.read_text(), PATIENCE), log.read_text()
        finally:
            server.terminate()
    assert "Application shutdown complete" in log.read_text()


def test_fastapi_stores_an_order_with_its_deadline(tmp_path: Path) -> None:
    shop: dict[str, Any] = {"__name__": "shop", "DATABASE": f"sqlite:///{tmp_path / 'shop.db'}"}
    exec(compile(application("FastAPI with a session"), "shop", "exec", dont_inherit=True), shop)
    shop["Base"].metadata.create_all(shop["engine"])
    session = contextmanager(shop["new_session"])
    with Toc() as toc:
        toc.use(shop["center"])
        for order in (42, 43):
            with session() as one:
                shop["place"](order, one)
            toc.assert_submitted("order.close", biz_id=order, due_in="30m")
        with session() as one:
            shop["pay"](43, one)
        assert toc.advance("30m") == 1
        with pytest.raises(HTTPException, match="409"), session() as one:
            shop["pay"](42, one)
    with session() as one:
        assert {order.id: order.state for order in one.query(shop["Order"])} == {42: "closed", 43: "paid"}
    shop["engine"].dispose()


def test_flask_submits_and_cancels_and_its_handlers_run_in_the_context_of_the_application() -> None:
    shop: dict[str, Any] = {"__name__": "shop"}
    exec(application("Flask"), shop)
    logged: list[str] = []
    shop["app"].logger.addFilter(lambda line: logged.append(line.getMessage()))
    with Toc() as toc:
        toc.use(shop["center"])
        client = shop["app"].test_client()
        client.post("/orders/42")
        paid = client.post("/orders/43").json["job_id"]
        assert client.post("/orders/43/payment").json == {paid: "cancelled"}
        toc.assert_submitted("order.close", biz_id=42, due_in="30m")
        toc.advance("30m")
    assert logged == ["order 42 is closed"]


DJANGO = """
import sys
from django.conf import settings

settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}})
import django

django.setup()
from django.db import transaction
from toc.testing import Toc

shop = {"__name__": "shop.deadlines"}
exec(sys.stdin.read(), shop)
with Toc() as toc:
    for order, error in ((42, None), (43, ValueError)):
        try:
            with transaction.atomic():
                shop["placed"](order)
                toc.refute_submitted("order.close", biz_id=order)
                if error is not None:
                    raise error
        except ValueError:
            pass
    toc.assert_submitted("order.close", biz_id=42, due_in="30m")
    toc.refute_submitted("order.close", biz_id=43)
    toc.advance("30m")
"""


def test_django_submits_after_the_commit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DJANGO],
        input=application("Django"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "order 42 is closed\n"), done.stderr
