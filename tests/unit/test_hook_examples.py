"""examples/hooks with Sentry's client as it is, and what the console loads: what others have published."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
import structlog
from harness.rows import known

from toc.console.console import STATIC
from toc.testing import Toc

# examples/hooks: what it logs and reports, with Sentry's client as it is but for its transport.

PATH = Path(__file__).parents[2] / "examples/hooks/shop.py"


@pytest.fixture
def shop(toc: Toc) -> Any:
    spec = known(importlib.util.spec_from_file_location("hooks_shop", PATH))
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    toc.use(module.center)
    return module


@pytest.fixture
def reported() -> Iterator[list[Any]]:
    events: list[Any] = []

    def keep(event: Any, _hint: Any) -> None:
        events.append(event)

    sentry_sdk.init(
        dsn="http://key@127.0.0.1/1",
        before_send=keep,
        default_integrations=False,
        auto_enabling_integrations=False,
    )
    yield events
    sentry_sdk.get_client().close(timeout=0)
    sentry_sdk.init()


def test_a_try_is_in_the_log_and_what_it_raises_in_sentry(toc: Toc, shop: Any, reported: list[Any]) -> None:
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        job_id = shop.close_order.submit(biz_id=7, delay="1m")
        toc.advance("1m")
        broken = shop.close_order.submit(biz_id=8, delay="1m", attribute={"broken": True})
        for _ in range(2):
            with pytest.raises(ValueError, match="no such order"):
                toc.advance("1h")
    closing = [line for line in lines if line["event"] == "closing"]
    assert [line["job_ids"] for line in closing] == [[job_id], [broken], [broken]]
    assert {line["topic"] for line in closing} == {"order.close"}
    first, second, death = reported
    for event, attempt in ((first, 1), (second, 2)):
        assert event["exception"]["values"][0]["value"] == "no such order"
        assert event["tags"] == {"topic": "order.close"}
        assert event["contexts"]["toc"] == {"job_ids": [broken], "attempt": attempt}
    assert death["message"] == "order.close 8 is dead: ValueError: no such order"
    toc.topic("order.close", paused=True)
    shop.close_order.submit(biz_id=9, delay="1m")
    toc.advance("7m")
    with structlog.testing.capture_logs() as lines:
        toc.topic("order.close", paused=False)
        toc.run_due()
    assert [(line["biz_id"], line["seconds"]) for line in lines if line["event"] == "late"] == [(9, 360.0)]


# What the console loads is what others have published, and little.

SUMS = [line.split() for line in (STATIC / "SHA256SUMS").read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(("sum_", "name"), SUMS)
def test_a_vendored_file_is_as_it_was_published(sum_: str, name: str) -> None:
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == sum_


def test_every_file_of_others_has_its_checksum_and_licence() -> None:
    ours = {"console.css", "console.js", "toc.svg", "SHA256SUMS", "LICENSE.htmx", "LICENSE.uplot"}
    assert {file.name for file in STATIC.iterdir()} - ours == {name for _, name in SUMS}
    assert "Zero-Clause BSD" in (STATIC / "LICENSE.htmx").read_text()
    assert "MIT" in (STATIC / "LICENSE.uplot").read_text()
