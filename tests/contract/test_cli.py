"""The command line, its options and codes; each bad input is a named error, and nothing is written."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from contract.conftest import KIT
from contract.system import Contract
from harness import forks
from harness.gateway import lose_body
from harness.refused import LATER, NAIVE, TASKS
from harness.rows import known

from benchmarks.private import free_port
from toc import CancelOutcome, NewTask, TimeoutCenter, TocError
from toc.model import errors

# The command line: options of the contract, --json of what lists, exit codes, the embedded default.


def test_topic_create_takes_every_option_of_the_contract(contract: Contract) -> None:
    done = contract.toc(
        *("topic", "create", "t.all", "--biz-type", "100", "--slots", "1024", "--type", "instant"),
        *("--retries", "31", "--backoff", "immediate", "--backoff-base", "2", "--backoff-cap", "60"),
        *("--prepare-timeout", "3", "--max-runtime", "90", "--horizon", "7200", "--retention", "86400"),
    )
    assert done.returncode == 0, done.stderr
    shown = contract.json("topic", "show", "t.all")
    expected = {
        "name": "t.all", "biz_type": 100, "slot_amount": 1024, "topic_type": "instant", "retries": 31,
        "backoff": "immediate", "backoff_base": 2.0, "backoff_cap": 60.0, "prepare_timeout": 3,
        "max_runtime": 90, "horizon": 7200, "retention": 86400, "paused": False,
    }  # fmt: skip
    assert {name: shown[name] for name in expected} == expected
    (row,) = contract.query(f"SELECT * FROM `{contract.prefix}0`.timeout_topic WHERE name = 't.all'")
    assert (row["biz_type"], row["slot_amount"], row["retries"]) == (100, 1024, 31)


def test_topic_defaults_are_those_of_the_contract(contract: Contract) -> None:
    assert contract.toc("topic", "create", "t.plain", "--biz-type", "101", "--slots", "2").returncode == 0
    shown = contract.json("topic", "show", "t.plain")
    assert (shown["topic_type"], shown["retries"], shown["backoff"]) == ("timed", 16, "exponential")
    assert (shown["backoff_base"], shown["backoff_cap"]) == (1, 600)
    assert (shown["prepare_timeout"], shown["retention"]) == (30, 3 * 86400)
    assert "t.plain" in [topic["name"] for topic in contract.json("topic", "list")]
    assert contract.toc("topic", "alter", "t.plain", "--retries", "5", "--backoff-cap", "2m").returncode == 0
    shown = contract.json("topic", "show", "t.plain")
    assert (shown["retries"], shown["backoff_cap"]) == (5, 120)
    for command, paused in (("pause", True), ("resume", False)):
        assert contract.toc("topic", command, "t.plain").returncode == 0
        assert contract.json("topic", "show", "t.plain")["paused"] is paused


def test_a_task_goes_through_the_command_line(idle: Contract) -> None:
    submitted = idle.toc(
        *("submit", "c.plain", "--biz-id", "42", "--delay", "30m"),
        *("--attribute", '{"reason": "unpaid ☃"}', "--dedup-key", "k", "--slot-basis", "s"),
    )
    assert submitted.returncode == 0, submitted.stderr
    job_id = int(submitted.stdout)
    shown = idle.json("get", str(job_id))
    assert shown["job_id"] == str(job_id)
    assert shown["topic"] == "c.plain"
    assert shown["attribute"] == {"reason": "unpaid ☃"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", shown["action_time"])
    assert [task["job_id"] for task in idle.json("find", "--biz-id", "42")] == [str(job_id)]
    again = idle.json(
        *("submit", "c.plain", "--biz-id", "42", "--delay", "5s"),
        *("--attribute", '{"reason": "unpaid ☃"}', "--dedup-key", "k"),
    )
    assert again["job_id"] == str(job_id)
    at = datetime.now(timezone(timedelta(hours=2))).replace(microsecond=0) + timedelta(days=200)
    assert at.isoformat().endswith("+02:00")
    moved = idle.json("reschedule", str(job_id), "--action-time", at.isoformat())
    assert str(moved["outcome"]).lower() == "rescheduled"
    task = known(idle.center.get(job_id))
    assert task.action_time == at
    moved = idle.json("reschedule", str(job_id), "--delay", "200d")  # of microseconds none is kept
    task = known(idle.center.get(job_id))
    assert datetime.fromisoformat(moved["action_time"]) == task.action_time
    assert idle.json("get", str(job_id))["biz_type"] == task.biz_type
    cancelled = idle.json("cancel", str(job_id))
    assert str(cancelled["outcome"]).lower() == "cancelled"
    assert idle.center.cancel(job_id) is CancelOutcome.CANCELLED
    late = idle.toc("reschedule", str(job_id), "--delay", "1h", "--json")
    assert late.returncode == 1
    assert json.loads(late.stdout) == {"job_id": str(job_id), "outcome": "too_late", "action_time": None}
    assert "ended" in late.stderr
    assert idle.toc("get", str(job_id ^ 1)).returncode == 1
    assert idle.toc("cancel", str(job_id ^ 1)).returncode == 1
    assert idle.toc("cancel", "--topic", "c.plain", "--biz-id", "42").returncode == 0


def test_a_body_goes_in_and_comes_out_byte_by_byte(contract: Contract, tmp_path: Path) -> None:
    body, root, path = bytes(range(256)) * 3000, Path(__file__).parents[2], str(tmp_path / "body")

    def toc(*words: str, given: bytes = b"") -> bytes:
        text = given.decode("latin-1")
        done = forks.run(words, env=contract.env, directory=root, given=text, encoding="latin-1")
        assert done.returncode == 0, done.stderr
        return done.stdout.encode("latin-1")

    words = ("submit", "c.plain", "--biz-id", "8", "--delay", "1h", "--dedup-key", "body")
    job_id = toc(*words, "--body-file", "-", "--content-type", "image/x", given=body).decode().strip()
    assert toc("get", job_id, "--body") == body
    Path(path).write_bytes(body)
    assert toc(*words, "--body-file", path, "--content-type", "image/x").decode().strip() == job_id
    digest = {"body_sha256": hashlib.sha256(body).hexdigest()}
    told = {"content_type": "image/x", "body_length": len(body), **digest}
    shown = contract.json("get", job_id)
    assert shown.items() >= told.items()
    assert "body_base64" not in shown
    assert base64.b64decode(contract.json("get", job_id, "--body")["body_base64"]) == body
    task = known(contract.center.get(int(job_id)))
    assert (task.body, task.content_type) == (body, "image/x")

    text = contract.json("submit", "c.plain", "--biz-id", "8", "--delay", "1h", "--body", "grün")["job_id"]
    assert toc("get", text, "--body") == "grün".encode()
    assert contract.json("get", text)["content_type"] == "text/plain; charset=utf-8"
    plain = contract.json("submit", "c.plain", "--biz-id", "8", "--delay", "1h")["job_id"]
    for refused in (
        ("get", plain, "--body"),
        (*words, "--body-file", path),  # another content type
        (*words, "--body-file", "nowhere"),
        (*words, "--body-file", "."),
        (*words, "--body", "x", "--body-file", path),
        (*words, "--content-type", "a/b"),
    ):
        done = contract.toc(*refused)
        assert (done.returncode, done.stdout) == (2, ""), refused
    lose_body(contract.center.store, int(text))
    shown = contract.json("get", text)
    assert (shown["status"], shown["history"]) == ("pending", [])
    assert "its body is missing" in shown["body"]
    assert contract.toc("get", text, "--body").returncode == 1
    large = contract.toc(*words, "--body", "x" * 11, env={"TOC_MAX_BODY": "10"})
    assert large.returncode == 2
    assert "TOC_MAX_BODY" in large.stderr


@pytest.mark.parametrize("command", ["sweep", "rebuild"])
def test_without_an_index_there_is_nothing_to_fill(alone: Contract, command: str) -> None:
    done = alone.toc(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "not indexed" in done.stderr


@pytest.mark.parametrize("command", ["slots", "workers"])
def test_who_owns_what_can_be_asked_of_a_host_without_zookeeper_too(contract: Contract, command: str) -> None:
    assert isinstance(contract.json(command), list)


# Each bad input is a named error; nothing is written; the command line shows no traceback.


@pytest.fixture
def untouched(idle: Contract) -> Iterator[Contract]:
    """Rows and keys are the same before and after."""
    before = (idle.rows(), idle.keys())
    yield idle
    assert (idle.rows(), idle.keys()) == before


# No rung of the ladder has a part in these refusals: the kit stands for a table without servers.
REFUSING = pytest.mark.parametrize("idle", ["with an index", KIT], indirect=True)


def _refusal(call: Callable[..., object], *given: Any, **named: Any) -> TocError | None:
    """The error that a call raises."""
    try:
        call(*given, **named)
    except TocError as refused:
        return refused
    return None


@REFUSING
def test_tasks_that_cannot_be_are_refused_alone_and_with_their_call(untouched: Contract) -> None:
    good = [NewTask("c.plain", biz_id=n, delay=3600) for n in range(3)]
    for case, (name, given) in TASKS.items():
        bad = {"topic": "c.plain", "biz_id": 1, **given}
        for refused in (
            _refusal(untouched.center.submit_many, [*good, NewTask(**bad), *good]),
            _refusal(untouched.center.submit, **bad),
        ):
            assert isinstance(refused, getattr(errors, name)), case
            assert str(refused), case


@REFUSING
def test_an_instant_task_of_the_year_1_is_refused_in_any_zone(untouched: Contract) -> None:
    for hours in (-9, 0, 9):
        first = datetime.min.replace(tzinfo=timezone(timedelta(hours=hours)))
        with pytest.raises(errors.InvalidInput, match="before 1970"):
            untouched.center.submit("c.now", biz_id=1, action_time=first)


@REFUSING
def test_submit_many_refuses_what_is_no_task(untouched: Contract) -> None:
    for bad in ("text", 5, None, NewTask, ("c.plain", 1)):
        tasks: list[Any] = [NewTask("c.plain", 1, delay=9), bad]
        assert _refusal(untouched.center.submit_many, tasks), bad


@REFUSING
def test_reschedule_refuses_a_bad_time_and_changes_nothing(idle: Contract) -> None:
    job_id = idle.center.submit("c.plain", biz_id=90, delay=3600)
    before = (idle.row(job_id), idle.scores(job_id))
    for error, when in (
        (errors.NaiveDatetime, NAIVE),
        (errors.NotInFuture, datetime(2020, 1, 1, tzinfo=UTC)),
        (errors.InvalidDelay, datetime.max.replace(tzinfo=UTC)),
        (errors.InvalidInput, None),
        (errors.InvalidInput, "tomorrow"),
    ):
        assert isinstance(_refusal(idle.center.reschedule, job_id, action_time=when), error), when
    assert (idle.row(job_id), idle.scores(job_id)) == before


def test_4096_characters_of_attribute_are_stored_whatever_their_bytes(idle: Contract) -> None:
    for char in ("x", "ä", "☃", "😀"):
        attribute = {"a": char * (4096 - len('{"a":""}'))}
        job_id = idle.center.submit("c.plain", biz_id=91, delay=3600, attribute=attribute)
        assert known(idle.center.get(job_id)).attribute == attribute
        with pytest.raises(errors.InvalidAttribute):
            idle.center.submit("c.plain", biz_id=91, delay=9, attribute={"a": attribute["a"] + "x"})


def test_handlers_are_refused_that_are_registered_twice_or_cannot_be_called(contract: Contract) -> None:
    center = TimeoutCenter(contract.settings)

    @center.handler("h.one")
    def one(task: object) -> None: ...

    with pytest.raises(errors.DuplicateHandler):
        center.handler("h.one")(one)
    for bad in ("a b", "a{b}", "", "é", "a\n", "x" * 129, "-a", None, 5):
        with pytest.raises(errors.InvalidTopic):
            center.handler(bad)(one)  # type: ignore[arg-type]
    for size in (0, -1, 1.5, "5", 10**9, True):
        with pytest.raises(TocError):
            center.handler("h.batch", batch=size)(one)  # type: ignore[arg-type]
    with pytest.raises(TocError):
        center.handler("h.two")(5)  # type: ignore[arg-type]
    with pytest.raises(TocError):
        center.handler("h.three")(lambda: None)  # type: ignore[arg-type, misc]


def _refused(done: Any, code: int | None = None) -> None:
    assert done.returncode != 0, done.stdout
    if code is not None:
        assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert done.stderr.strip()
    assert done.stdout == ""


SERVERS: dict[str, Callable[[int], dict[str, str]]] = {
    "MySQL": lambda port: {"TOC_DATABASE_URLS": f"mysql+pymysql://u:canary-5f1e@127.0.0.1:{port}"},
    "Redis": lambda port: {"TOC_REDIS_URL": f"redis://u:canary-5f1e@127.0.0.1:{port}"},
    "ZooKeeper": lambda port: {"TOC_ZOOKEEPER": f"127.0.0.1:{port}"},
}


@pytest.mark.parametrize("server", ["MySQL", "ZooKeeper"])
def test_a_worker_says_which_server_is_away_where_and_what_to_try(contract: Contract, server: str) -> None:
    port = free_port()
    done = contract.toc("worker", "--app", "contract_app:center", env=SERVERS[server](port))
    _refused(done, 4)
    text = done.stdout + done.stderr
    assert server in text or {"MySQL": "database"}.get(server, "\0") in text.lower()
    assert f"127.0.0.1:{port}" in text
    assert "canary-5f1e" not in text


def test_commands_say_that_mysql_is_unreachable(contract: Contract) -> None:
    port = free_port()
    for words in (["get", "5"], ["topic", "list"], ["db", "check"], ["db", "upgrade"], ["dead", "list"]):
        done = contract.toc(*words, env=SERVERS["MySQL"](port))
        _refused(done, 4)
        assert f"127.0.0.1:{port}" in done.stderr
        assert "canary-5f1e" not in done.stderr


def test_shards_that_are_behind_are_named_and_nothing_starts(contract: Contract) -> None:
    behind = {"TOC_DATABASE_PREFIX": contract.prefix + "x"}
    for words in (["worker", "--app", "contract_app:center"], ["topic", "list"]):
        done = contract.toc(*words, env=behind)
        _refused(done, 3)
        assert "db upgrade" in done.stderr
    check = contract.toc("db", "check", env=behind)
    assert check.returncode != 0
    assert "Traceback" not in check.stderr
    other = contract.settings.model_copy(update={"database_prefix": contract.prefix + "x"})
    with TimeoutCenter(other) as center, pytest.raises(errors.SchemaBehind):
        center.submit("c.plain", biz_id=1, delay=9)


@pytest.mark.parametrize(
    "wrong", [{"tables": 4}, {"tables": 16}, {"databases": 4}, {"databases": 1, "tables": 4}]
)
def test_a_program_set_for_other_tables_is_refused_before_it_writes_or_looks_in_the_wrong_one(
    contract: Contract, wrong: dict[str, int]
) -> None:
    # In the right table nobody would find the task: acknowledged, and never run. biz_id 1 is in table 7 of 8.
    job_id = contract.center.submit("c.plain", biz_id=1, delay=3600, dedup_key="layout")
    before = (contract.rows(), contract.keys())
    calls: dict[str, Callable[[TimeoutCenter], object]] = {
        "submit": lambda center: center.submit("c.plain", biz_id=1, delay=9),
        "submit_many": lambda center: center.submit_many([NewTask("c.plain", 1, delay=9)]),
        "index": lambda center: center.index([job_id]),
        "cancel": lambda center: center.cancel(job_id),
        "cancel_by_biz": lambda center: center.cancel_by_biz("c.plain", biz_id=1),
        "reschedule": lambda center: center.reschedule(job_id, action_time=LATER),
        "get": lambda center: center.get(job_id),
        "find": lambda center: center.find(biz_id=1),
    }
    for name, call in calls.items():
        with (
            TimeoutCenter(contract.settings.model_copy(update=wrong)) as center,
            pytest.raises(errors.SchemaBehind, match=r"^TOC_DATABASES and TOC_TABLES"),
        ):
            pytest.fail(f"{name} answered {call(center)}")
    assert (contract.rows(), contract.keys()) == before
    variables = {f"TOC_{name.upper()}": str(value) for name, value in wrong.items()}
    for words in (
        ["get", str(job_id)],
        ["dead", "list"],
        ["dead", "redrive", str(job_id)],
        ["bulk", "cancel", "--topic", "c.plain", "--yes"],
    ):
        done = contract.toc(*words, env=variables)
        _refused(done, 3)
        assert "TOC_TABLES" in done.stderr


def test_a_copy_of_a_task_table_that_somebody_left_beside_it_stops_nothing(contract: Contract) -> None:
    copy = f"`{contract.prefix}0`.`timeout_task_0000_before`"
    contract.query(f"CREATE TABLE {copy} LIKE `{contract.prefix}0`.`timeout_task_0000`")
    try:
        assert contract.toc("db", "check").returncode == 0
        with TimeoutCenter(contract.settings) as center:
            assert center.get(center.submit("c.plain", biz_id=1, delay=3600)) is not None
    finally:
        contract.query(f"DROP TABLE {copy}")
