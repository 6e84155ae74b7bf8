"""The applications of docs/frameworks.md, as their readers run and test them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.patience import PATIENCE, until

from toc import Settings, TimeoutCenter, Topic
from toc.dev.local.embedded import write_config
from toc.store.migrate import Migrator
from toc.testing import Toc

ROOT = Path(__file__).parents[2]


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
