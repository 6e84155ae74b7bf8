"""Fault 27: hostile input: either it is stored as it was given, or a named error and nothing is written."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from fault.conftest import Case
from harness.rows import known
from harness.tables import raw, task_tables
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks.local import RedisServer
from toc import InvalidInput, Settings, TimeoutCenter, Topic
from toc.model.clock import to_ms
from toc.store.migrate import Migrator

NASTY = (
    *("", " ", "\0", "a\0b", "\r\n", "x\r\nPING\r\n", "{", "}", "{order}", "a{b}c", "}{", "prepare_{t_0}"),
    *("'; DROP TABLE timeout_task_0000; --", "\\' OR 1=1 --", '"', "`", "%s", "%(x)s", "%", "\\", "/*", "*"),
    *("\ud800", "\u202e", "\ufeff", "\U0001f600", "é", "e\u0301", "İ", "ß", "\x1b[31m", "../../etc/passwd"),
    *("NaN", "Infinity", "null", "-0", "0x10", "1e400", "order.close_3"),
    *("x" * 255, "x" * 256, "é" * 128, "x" * 5000),
)
TEXTS = st.sampled_from(NASTY) | st.text(max_size=40)
NUMBERS = st.floats() | st.sampled_from(
    [
        *(0, -1, 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, True),
        *(1.0, -0.0, 0.5, 1e-320, 1e308),
    ]
)
LEAVES = st.none() | st.booleans() | TEXTS | NUMBERS | st.integers() | st.binary(max_size=4)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def deep(levels: int) -> dict[str, Any]:
    """So many dicts in each other."""
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


TIMES = (
    st.datetimes()
    | st.datetimes(timezones=st.timezones() | st.just(UTC))
    | st.sampled_from(
        [datetime.min, datetime.max, datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)]  # noqa: DTZ901
    )
)
HOSTILE = {
    "topic": TEXTS | LEAVES,
    "biz_id": TEXTS | TEXTS | NUMBERS | VALUES,
    "delay": NUMBERS | st.timedeltas() | TEXTS,
    "action_time": TIMES | TEXTS,
    "attribute": st.dictionaries(TEXTS, VALUES, max_size=3) | VALUES | st.integers(1, 3000).map(deep),
    "dedup_key": TEXTS | LEAVES,
    "slot_basis": TEXTS | LEAVES,
}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """A submit that is right but for one argument or two, and those may be right as well."""
    call = {"topic": "order.close", "biz_id": draw(st.integers(0, 2**63 - 1)), "delay": 60.5}
    for name in draw(st.lists(st.sampled_from(sorted(HOSTILE)), min_size=1, max_size=2)):
        call[name] = draw(HOSTILE[name])
    if "action_time" in call and draw(st.integers(0, 9)):
        del call["delay"]
    return call


@pytest.fixture
def center(tmp_path: Path, clean_redis: RedisServer) -> Iterator[TimeoutCenter]:
    url = f"sqlite:///{tmp_path}/toc.db"
    Migrator([url], databases=1, tables=2, prefix="toc_").upgrade()
    with TimeoutCenter(
        Settings(database_urls=[url], databases=1, tables=2, redis_url=clean_redis.url)
    ) as center:
        center.store.topics.create(Topic("order.close", 1, 2))
        yield center


def test_what_is_submitted_is_stored_as_it_was_given_or_refused_by_name_with_nothing_written(
    center: TimeoutCenter, case: Case
) -> None:
    line = case.verdict(27, "hostile input", "submit")
    seen: Counter[str] = Counter()

    @settings(
        max_examples=100,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(call=calls())
    def submit(call: dict[str, Any]) -> None:
        before = written(center, case.redis)
        refused = None
        try:
            job_id = center.submit(call["topic"], **{k: v for k, v in call.items() if k != "topic"})
        except InvalidInput as exc:  # a TocError that says whose fault it is
            refused = exc
        if refused is not None:
            assert 0 < len(str(refused)) < 5000
            assert written(center, case.redis) == before
            seen[type(refused).__name__] += 1
            return
        rows, keys = written(center, case.redis)
        task = known(center.get(job_id))
        seen["stored"] += 1
        assert task.topic == "order.close"
        assert (task.biz_id, type(task.biz_id)) == (call["biz_id"], type(call["biz_id"]))
        if call.get("dedup_key") is None or rows > before[0]:
            assert rows == before[0] + 1
            assert task.attribute == (call.get("attribute") or {})
            if "action_time" in call:
                assert to_ms(task.action_time) == to_ms(call["action_time"])
        assert {key.rpartition("_")[0] for key in keys} <= {"order.close"}, "a key of another name"
        assert job_id in {found.job_id for found in center.find(biz_id=call["biz_id"])}

    submit()
    for huge in ("x" * 1_000_000, "\0" * 1_000_000, 10**5000):
        for name in ("topic", "biz_id", "delay", "action_time", "attribute", "dedup_key", "slot_basis"):
            value = {"a": huge} if name == "attribute" else huge
            call: dict[str, Any] = {"topic": "order.close", "biz_id": 1, "delay": 60.5, name: value}
            before = written(center, case.redis)
            with pytest.raises(InvalidInput) as refused:
                center.submit(call.pop("topic"), **call)
            assert len(str(refused.value)) < 5000
            assert written(center, case.redis) == before
            seen[type(refused.value).__name__] += 1
    named = {name for name in seen if name != "stored"}
    line.prove(
        seen["stored"] > 3 and len(named) >= 6,
        f"{sum(seen.values())} calls, {seen['stored']} stored as given; refused: {', '.join(sorted(named))}",
    )


def test_a_job_id_that_is_none_is_refused_or_unknown(center: TimeoutCenter, case: Case) -> None:
    line = case.verdict(27, "hostile input", "job_id, action_time of a reschedule")
    job_id = center.submit("order.close", biz_id=1, delay=3600)
    before = written(center, case.redis)
    later = datetime.now(UTC) + timedelta(hours=2)
    seen: Counter[str] = Counter()

    @settings(max_examples=100, derandomize=True, deadline=None, database=None)
    @given(given_id=st.none() | TEXTS | NUMBERS | st.integers() | VALUES, at=TIMES | LEAVES)
    def call(given_id: Any, at: Any) -> None:
        for do in (
            lambda: center.cancel(given_id),
            lambda: center.get(given_id),
            lambda: center.reschedule(given_id, action_time=later),
            lambda: center.reschedule(job_id, action_time=at) if not _valid(at) else None,
        ):
            try:
                answer = cast(Any, do)()
                seen["unknown"] += 1
                assert answer is None or answer.name == "UNKNOWN"
            except InvalidInput as exc:
                seen[type(exc).__name__] += 1

    call()
    assert written(center, case.redis) == before
    line.prove(
        seen["unknown"] and seen["InvalidInput"], ", ".join(f"{k} {n}" for k, n in sorted(seen.items()))
    )


def _valid(at: object) -> bool:
    if not isinstance(at, datetime) or at.utcoffset() is None:
        return False
    return datetime.now(UTC) < at < datetime.now(UTC) + timedelta(days=4000)


def written(center: TimeoutCenter, redis: RedisServer) -> tuple[int, frozenset[str]]:
    """How many rows there are, and which keys."""
    with raw(center.settings) as connection:
        rows = sum(
            int(connection.exec_driver_sql(f"SELECT COUNT(*) FROM {name}").scalar_one())
            for name in task_tables(center.settings)
        )
    keys = redis.call("KEYS", "*")
    assert isinstance(keys, list)
    return rows, frozenset(map(str, keys))
