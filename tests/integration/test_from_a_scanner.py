"""The page that replaces a scanner, step by step."""

import re
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from harness import forks
from harness.patience import PATIENCE, until
from harness.secured import root_url
from harness.system import System, small_system
from sqlalchemy import Engine, create_engine, text

from benchmarks.local import MariaDB

PAGE = Path(__file__).parents[2] / "docs/from-a-scanner.md"


ORDERS = """
import datetime, sys
import shop
what, first, *rest = sys.argv[1:]
if what == "pay":
    shop.pay(int(first))
else:
    for number in range(int(first), int(rest[0])):
        shop.place(number, datetime.timedelta(seconds=float(rest[1])))
"""
"""What calls the functions of the page's service."""


class Service:
    """The service of the page, in a directory, with a database of its own beside toc's."""

    def __init__(self, directory: Path, system: System, engine: Engine) -> None:
        self.directory = directory
        self.engine = engine
        url = engine.url.render_as_string(hide_password=False)
        self.env = {**system.env, "SHOP_DATABASE": url, "PYTHONPATH": str(directory)}
        self.running: list[forks.Forked] = []
        (directory / "orders.py").write_text(ORDERS)
        for block in re.findall(r"^ *```python\n(.*?)^ *```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
            block = textwrap.dedent(block)
            (directory / block.split(maxsplit=2)[1]).write_text(block)
        with engine.begin() as connection:
            connection.execute(
                text("CREATE TABLE orders (id INT PRIMARY KEY, status TEXT, close_at DATETIME(3))")
            )

    def start(self, *words: str, module: str | None = None) -> forks.Forked:
        """A ``toc`` command, or a program of the page."""
        streams = dict.fromkeys(("stdout", "stderr"), str(self.directory / "log"))
        given: dict[str, Any] = {"env": self.env, "directory": self.directory, "streams": streams}
        self.running.append(forks.start(words, module=module, **given))
        return self.running[-1]

    def run(self, *words: str, module: str | None = None) -> None:
        done = forks.run(list(words), module=module, env=self.env, directory=self.directory)
        assert done.returncode == 0, done.stderr

    def place_before(self, ids: range, seconds: float) -> None:
        """Orders of the time before toc."""
        at = datetime.now(UTC).replace(tzinfo=None) + timedelta(seconds=seconds)
        with self.engine.begin() as connection:
            rows = [{"id": number, "at": at} for number in ids]
            connection.execute(text("INSERT INTO orders VALUES (:id, 'unpaid', :at)"), rows)

    def place(self, ids: range, seconds: float) -> None:
        self.run("place", *map(str, (ids.start, ids.stop, seconds)), module="orders")

    def statuses(self) -> dict[int, str]:
        with self.engine.begin() as connection:
            rows: Any = connection.execute(text("SELECT id, status FROM orders")).all()
        return dict(rows)

    def closed(self, ids: range) -> None:
        wanted = dict.fromkeys(ids, "closed")
        assert until(lambda: wanted.items() <= self.statuses().items(), PATIENCE), self.statuses()

    def stop(self, process: forks.Forked) -> None:
        process.terminate()
        process.wait(PATIENCE)
        self.running.remove(process)


@pytest.fixture
def service(tmp_path: Path, mariadb: MariaDB, database_prefix: str) -> Iterator[Service]:
    (tmp_path / "toc").mkdir()
    with small_system(tmp_path / "toc", None, mariadb, database_prefix) as system:
        name = f"{database_prefix}shop"
        root = create_engine(root_url(mariadb))
        with root.begin() as connection:
            connection.execute(text(f"CREATE DATABASE `{name}`"))
        engine = create_engine(root.url.set(database=name))
        one = Service(tmp_path, system, engine)
        yield one
        for process in list(one.running):
            one.stop(process)
        engine.dispose()
        with root.begin() as connection:
            connection.execute(text(f"DROP DATABASE `{name}`"))
        root.dispose()


def test_the_scanner_is_replaced_and_comes_back(service: Service) -> None:
    late, waiting, new = range(1000, 1300), range(100, 110), range(110, 115)
    service.place_before(late, -3600)
    service.place_before(waiting, 8)
    service.run("topic", "sync", "--app", "shop:center")
    worker = service.start("worker", "--app", "shop:center")
    service.run("topic", "pause", "order.close.late")
    for _ in range(2):
        service.run(module="backlog")
    assert {service.statuses()[number] for number in late} == {"unpaid"}
    service.run("topic", "resume", "order.close.late", "--rate", "1")
    service.place(new, 8)
    service.closed(new)
    service.closed(waiting)
    assert "unpaid" in {service.statuses()[number] for number in late}, "new ones do not wait behind these"
    service.run("topic", "resume", "order.close.late", "--rate", "50")
    service.closed(late)
    scanner = service.start(module="scanner")
    both = range(200, 220)
    service.place(both, 8)
    service.run("pay", "200", module="orders")
    service.closed(both[1:])
    service.run("pay", "201", module="orders")
    assert (service.statuses()[200], service.statuses()[201]) == ("paid", "closed")
    service.stop(scanner)
    alone = range(300, 310)
    service.place(alone, 3)
    service.closed(alone)
    service.stop(worker)
    back = range(400, 410)
    service.place(back, 3)
    scanner = service.start(module="scanner")
    service.closed(back)
    service.start("worker", "--app", "shop:center")
    done = range(500, 501)
    service.place(done, 3)
    service.closed(done)
