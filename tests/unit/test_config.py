"""Settings and the command line without any server: values, help, tables, refusals, operations."""

import json
import os
import pwd
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from toc.cli.main import main
from toc.cli.operations import made
from toc.cli.output import show, show_one
from toc.cli.values import biz_id, headers, number, past, who, whole_seconds
from toc.config import Settings, config_file, misspelt
from toc.coordination.assignment import Member
from toc.gateway.calls import call_of
from toc.model.access import Action as Right
from toc.model.clock import parse_duration, to_ms
from toc.model.documents import parse_instant
from toc.model.errors import ConfigError, InvalidDelay, InvalidInput, InvalidTarget
from toc.observe.log import redact, redact_event
from toc.operate.operation import REQUIRED, Doing, Param, Record, Value, operation
from toc.operate.operations import OPERATIONS
from toc.operate.top import addresses_of as addresses

# Settings: what is accepted, where it comes from, and how refusals read.

CANARY = "hunter2canary"


pytestmark = pytest.mark.usefixtures("nothing_outside")


def test_without_anything_the_defaults_suit_development() -> None:
    settings = Settings()
    assert (settings.databases, settings.tables, settings.database_prefix) == (1, 4, "toc_")
    assert settings.database_urls == []
    assert settings.redis_url is settings.zookeeper is settings.namespace is None


def test_a_comma_in_a_password_does_not_split_the_url() -> None:
    settings = Settings(database_urls="mysql+pymysql://u:a,b@h1,mysql+pymysql://u:c@h2", databases=2)
    assert settings.database_urls == ["mysql+pymysql://u:a,b@h1", "mysql+pymysql://u:c@h2"]


def test_the_environment_wins_over_the_file_and_arguments_over_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "toc.toml").write_text(
        'database_urls = ["mysql+pymysql://h1", "mysql+pymysql://h2"]\ndatabases = 2\ntables = 16\n'
        'cluster = "file"\nnamespace = "file"\n'
    )
    monkeypatch.setenv("TOC_CLUSTER", "environment")
    monkeypatch.setenv("TOC_NAMESPACE", "environment")
    settings = Settings(namespace="argument")
    assert settings.database_urls == ["mysql+pymysql://h1", "mysql+pymysql://h2"]
    assert settings.tables == 16
    assert (settings.cluster, settings.namespace) == ("environment", "argument")


def test_toc_config_names_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "toc.toml").write_text("tables = 8\n")
    other = tmp_path / "other.toml"
    other.write_text("tables = 32\n")
    monkeypatch.setenv("TOC_CONFIG", str(other))
    assert Settings().tables == 32
    assert config_file() == other


@pytest.mark.parametrize(("text", "says"), [
    ('redis_ulr = "redis://h"\n', "did you mean 'redis_url'"),
    ("TOC_TABLES = 4\n", "did you mean 'tables'"),
    ("[toc]\ntables = 4\n", "'toc' is not a setting"),
    ("tables = \n", "is not TOML"),
    ('tables = "many"\n', "TOC_TABLES=many"),
])  # fmt: skip
def test_a_wrong_file_is_refused_with_a_reason(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "toc.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Settings()
    assert says in str(caught.value)


def test_a_file_that_is_named_but_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOC_CONFIG", "nowhere.toml")
    with pytest.raises(ConfigError, match=r"TOC_CONFIG=nowhere\.toml"):
        Settings()


@pytest.mark.parametrize(("values", "says"), [
    ({"databases": 3, "tables": 8}, "TOC_DATABASES=3: expected a power of two"),
    ({"tables": 2048}, "TOC_TABLES=2048"),
    ({"tables": 0}, "TOC_TABLES=0"),
    ({"metrics_address": "9464"}, "TOC_METRICS_ADDRESS=9464: expected HOST:PORT"),
    ({"metrics_address": "h:70000"}, "TOC_METRICS_ADDRESS=h:70000: expected HOST:PORT"),
    ({"tables": "4.5"}, "TOC_TABLES=4.5"),
    ({"databases": 8, "tables": 4}, "TOC_DATABASES=8 is more than TOC_TABLES=4"),
    ({"database_urls": "sqlite:///a.db", "databases": 2}, "set TOC_DATABASES=1"),
    ({"database_urls": "sqlite:///a.db,mysql+pymysql://h", "databases": 2}, "sqlite cannot be combined"),
    ({"database_urls": "mysql+pymysql://a,mysql+pymysql://b"}, "names 2 servers"),
    ({"database_urls": "mysql+pymysql://a,mysql+pymysql://a", "databases": 2}, "named twice"),
    ({"database_urls": "sqlite:///a.db,sqlite:///b.db"}, "sqlite cannot be combined"),
    ({"database_urls": "postgresql://h"}, "expected mysql+pymysql://"),
    ({"database_urls": "mysql://h"}, "expected mysql+pymysql://"),
    ({"database_urls": 5}, "TOC_DATABASE_URLS=5"),
    ({"redis_url": "http://h"}, "TOC_REDIS_URL=http://h: expected redis://"),
    ({"zookeeper": "zk://h"}, "TOC_ZOOKEEPER=zk://h: expected [user:password@]host:port"),
    ({"zookeeper": "a b"}, "TOC_ZOOKEEPER"),
    ({"namespace": "a{b}"}, "TOC_NAMESPACE=a{b}"),
    *(({"namespace": name}, f"TOC_NAMESPACE={name}") for name in ("a:b", "a b", "a}b", "ü", "")),
    ({"namespace": "x" * 65}, "at most 64"),
    ({"cluster": "a/b"}, "TOC_CLUSTER=a/b"),
    ({"host": "namespace/pod"}, "TOC_HOST=namespace/pod"),
    ({"host": ".."}, "TOC_HOST=.."),
    ({"host": "a\tb"}, "TOC_HOST="),
    ({"database_prefix": "toc`;"}, "TOC_DATABASE_PREFIX"),
    ({"database_prefix": "toc_; DROP DATABASE x"}, "TOC_DATABASE_PREFIX"),
    ({"database_prefix": "toc.x"}, "TOC_DATABASE_PREFIX"),
    ({"max_delay": "nan"}, "TOC_MAX_DELAY=nan"),
    ({"max_delay": "inf"}, "TOC_MAX_DELAY=inf"),
    ({"connect_timeout": 0}, "TOC_CONNECT_TIMEOUT=0"),
    ({"read_timeout": "nan"}, "TOC_READ_TIMEOUT=nan"),
    ({"processes": 0}, "TOC_PROCESSES=0"),
    ({"weight": -1}, "TOC_WEIGHT=-1"),
    ({"max_body": True}, "TOC_MAX_BODY=True: no setting is a flag"),
    ({"log_level": "loud"}, "'debug', 'info', 'warning' or 'error'"),
    ({"tabels": 4}, "did you mean 'tables'"),
])  # fmt: skip
def test_a_wrong_value_is_refused_by_name_with_what_is_expected(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)
    assert says in str(caught.value)


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(tables=3, cluster="a b", log_level="x")
    assert all(name in str(caught.value) for name in ("TOC_TABLES", "TOC_CLUSTER", "TOC_LOG_LEVEL"))


@pytest.mark.parametrize("values", [
    {"database_urls": f"mysql://root:{CANARY}@h"}, {"database_urls": [f"root:{CANARY}@h"]},
    {"database_urls": f"mysql+pymysql://u:{CANARY}/x@y@h1,bad://u:{CANARY}@h"},
    {"redis_url": f"http://:{CANARY}@h"}, {"redis_url": f"u:{CANARY}@h:1"},
    {"redis_url": f"http://h?password={CANARY}"}, {"zookeeper": f"digest://u:{CANARY}@h"},
    {"redis_url": f"redis://u:{CANARY}"}, {"redis_url": f"redis+cluster://h:1,u:{CANARY}/x"},
    {"redis_url": f"u:{CANARY}"}, {"database_urls": f"u:{CANARY}"}, {"zookeeper": f"u:{CANARY}"},
])  # fmt: skip
def test_no_refusal_shows_a_password(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)
    error: BaseException | None = caught.value
    while error is not None:
        assert CANARY not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_what_is_shown_has_no_password() -> None:
    settings = Settings(
        database_urls=[f"mysql+pymysql://u:{CANARY}@h1", f"mysql+pymysql://u:{CANARY}%40@h2"],
        databases=2,
        redis_url=f"redis+sentinel://:{CANARY}@h1:1,h2:2/service?sentinel_password={CANARY}",
    )
    for text in (repr(settings), str(settings), f"{settings}", str(settings.masked())):
        assert CANARY not in text
        assert "h2" in text
    assert CANARY in settings.database_urls[0]


def test_a_missing_server_says_what_to_set_or_run() -> None:
    with pytest.raises(ConfigError, match=r"TOC_DATABASE_URLS.*`toc dev`"):
        Settings().need_database_urls()
    Path(".toc").mkdir()
    Path(".toc/toc.toml").touch()
    with pytest.raises(ConfigError, match=r"`export TOC_CONFIG=\$PWD/\.toc/toc\.toml`"):
        Settings().need_database_urls()


def test_names_that_are_nearly_right_are_told_and_those_of_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOC_DATABSE_URLS", "mysql+pymysql://h")
    monkeypatch.setenv("TOC_TABLE", "8")
    for service in ("", "GATEWAY_", "REDIS_", "ZOOKEEPER_", "HOST_"):
        for name in ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_8080_TCP", "PORT_8080_TCP_ADDR"):
            monkeypatch.setenv(f"TOC_{service}{name}", "tcp://10.0.0.1:8080")
    assert misspelt() == {"TOC_DATABSE_URLS": "TOC_DATABASE_URLS", "TOC_TABLE": "TOC_TABLES"}
    with pytest.raises(ConfigError, match=r"TOC_DATABSE_URLS is not .* did you mean TOC_DATABASE_URLS\?"):
        Settings().need_database_urls()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("connect redis://:pw@h:1/0 failed", "connect redis://:***@h:1/0 failed"),
        (
            "mysql+pymysql://u:p@ss/w@h,mysql+pymysql://u:q@i",
            "mysql+pymysql://u:***@h,mysql+pymysql://u:***@i",
        ),
        ("redis://h?password=pw&db=1", "redis://h?password=***&db=1"),
        ("nothing: here@all", "nothing: here@all"),
    ],
)
def test_passwords_in_any_text_are_redacted(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_log_events_are_redacted_in_every_field() -> None:
    event = {
        "event": "x",
        "urls": ["redis://:pw@h"],
        "error": OSError("redis://:pw@h"),
        "n": 1,
        "password": "pw",
    }
    shown = redact_event(None, "info", event)
    assert "pw" not in str(list(shown.values()))
    assert shown["n"] == 1


# The command line without any server: values, help, and how refusals end.

HEAVY = ("alembic", "hiredis", "kazoo", "pydantic", "pymysql", "redis", "sqlalchemy")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0), ("0.5", 0.5), ("0", 0.0), ("500ms", 0.5), ("30m", 1800.0), ("1.5h", 5400.0),
        ("7d", 604_800.0), ("2W", 1_209_600.0), (" 3 s ", 3.0),
    ],
)  # fmt: skip
def test_durations_are_seconds_or_have_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "nan", "inf", "-inf", "-5", "-5m", "1e400", "5x", "1.2.3s", "m", "1M", "1 minute"]
)
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(InvalidDelay):
        parse_duration(text)


def test_policies_in_whole_seconds_refuse_a_fraction() -> None:
    assert whole_seconds("2m") == 120
    with pytest.raises(InvalidDelay, match="whole number of seconds"):
        whole_seconds("1500ms")


def test_digits_are_a_number_and_all_else_a_text() -> None:
    assert [biz_id(text, as_text=False) for text in ("42", "0", "-1", "007", "a1", "1.0")] == [
        42, 0, -1, "007", "a1", "1.0",
    ]  # fmt: skip
    assert biz_id("42", as_text=True) == "42"
    assert biz_id("9" * 10_000, as_text=False) == int("9" * 25)


NO_TIMES = [
    "20300131", "1893456000", "1893456000000", "1893456000.5", "1e10", "2030-01-31", "2030-01-31T12:00Z",
    "20300131T120000Z", "2030-W05-4T12:00:00Z", "2030-01-31T12:00:00+0100", "2030-01-31T12:00:00 01:00",
    "2030-01-31T12:00:00", "2030-02-30T12:00:00Z", "2030-01-31T24:30:00Z", "+2030-01-31T12:00:00Z",
    "\u0662030-01-31T12:00:00Z", "9999-12-31T23:59:59.999999-14:00", "tomorrow", "", " 2030-01-31T12:00:00Z",
]  # fmt: skip


def test_times_are_of_rfc_3339_with_a_zone_and_nothing_else_is_one() -> None:
    for text in ("2030-01-31T12:00:00Z", "2030-01-31t13:00:00.000000000+01:00", "2030-01-31 12:00:00z"):
        assert parse_instant(text) == datetime(2030, 1, 31, 12, tzinfo=UTC)
        assert past(text, 0) == parse_instant(text)
    for text in NO_TIMES:
        for parse in (parse_instant, partial(past, now_ms=0)):
            with pytest.raises(InvalidInput):
                parse(text)
    with pytest.raises(InvalidInput, match="%2B01:00"):
        parse_instant("2030-01-31T12:00:00 01:00")
    assert to_ms(past("2h", 10**10)) == 10**10 - 7_200_000


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, toc.cli.main as m\n"
        "code = m.main(['--help'])\n"
        f"print(code, [name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "0 []"
    assert "demo" in ended.stdout


@pytest.mark.parametrize("command", [
    ["db", "check"], ["db", "upgrade"], ["topic", "list"],
    ["submit", "t", "--biz-id", "1", "--delay", "1"], ["get", "1"], ["slots"], ["dead", "list"],
    ["worker", "--app", "toc.dev.demo:center"],
])  # fmt: skip
def test_without_settings_a_command_says_so(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: TOC_DATABASE_URLS is not set")
    assert "toc dev" in shown.err


def test_config_show_masks_passwords_and_tells_the_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TOC_REDIS_URL", "redis://:canary@h:1/0")
    (tmp_path / "toc.toml").write_text("tables = 8\n")
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["redis_url"] == "redis://:***@h:1/0"
    assert main(["config", "show"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "TOC_" in line}
    assert "canary" not in "".join(lines.values())
    assert "environment" in lines["TOC_REDIS_URL"]
    assert "toc.toml" in lines["TOC_TABLES"]
    assert "default" in lines["TOC_DATABASES"]


@pytest.mark.parametrize("text", ["nan", "inf", "1e", ".", "", "0", "1e400", "x"])
def test_what_is_no_number_in_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="--rate must be"):
        number(text, "--rate", 0.001, 1e6)
    assert (number("0.5"), number(".5e1"), number("7."), number("0", least=0)) == (0.5, 5.0, 7.0, 0.0)


def test_the_operator_is_the_user_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "mallory")
    assert who().partition("@")[0] == pwd.getpwuid(os.getuid()).pw_name


# Tables on terminals of any width and height.


@pytest.mark.parametrize(
    ("metrics", "machine", "address"),
    [
        ("0.0.0.0:9464", "here", "127.0.0.1:9464"),
        ("0.0.0.0:9464", "there", "host7:9464"),
        ("[::]:9464", "there", "host7:9464"),
        ("127.0.0.1:9464", "here", "127.0.0.1:9464"),
        ("127.0.0.1:9464", "there", "host7:9464"),
        ("10.0.0.7:9464", "here", "10.0.0.7:9464"),
        ("10.0.0.7:9464", "there", "10.0.0.7:9464"),
    ],
)
def test_a_daemon_is_asked_where_it_can_be_reached_from_here(
    metrics: str, machine: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    worker = Member("host7-0-1", "host7", 1, metrics=metrics, machine=machine)
    assert addresses([worker]) == [address]


def test_what_others_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = "a\x1b[2Jb\x07c\x9b31md\re\x7f\r\n\tgrün"
    show_one({"last_error": error, "history": [{"error": error}], "list": [error]}, as_json=False)
    show([{"last_error": error}], as_json=False, empty="none")
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\x07\x9b\x7f"), ascii(said)
    assert "\r" not in said.replace("\r\n", "")
    assert said.count("a\ufffd[2Jb\ufffdc\ufffd31md\ufffde\ufffd") == 3
    assert said.count("\tgrün") == 2, "lines of a text are shown as they are"


# What operators can do is declared once: a call and a command follow from it.


@operation(
    "host.greet", "POST /v1/hosts/{host}:greet", Right.CHANGE_CLUSTER, "Greet a host",
    Param("host", Value.TEXT, "Whom.", REQUIRED),
    Param("wait", Value.SECONDS, "How long.", REQUIRED),
    Param("times", Value.WHOLE, "How often.", 1, least=1, most=3),
    Param("words", Value.TEXT, "Which.", many=True),
    Param("loudly", Value.FLAG, "How.", default=False),
    takes="Greeting", changes=False,
)  # fmt: skip
def greet(_doing: Doing, host: str, **values: Any) -> Record:
    """Greet a host."""
    return {"host": host, **values}


def test_an_operation_is_a_call_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    call = call_of(greet)
    assert (call.name, call.access, call.summary) == (
        "POST /v1/hosts/{host}:greet", Right.CHANGE_CLUSTER, "Greet a host",
    )  # fmt: skip
    assert call.body is not None
    assert call.body.__name__ == "Greeting"
    assert call.body.model_json_schema()["required"] == ["wait"]
    sent = call.body.model_validate_json('{"wait": 90, "words": ["a"]}')
    assert sent.model_dump() == {"wait": 90.0, "times": 1, "words": ["a"], "loudly": False}

    app = typer.Typer()
    app.command("greet")(made(greet, lambda record, *, as_json: print(record, as_json)))
    command: Any = typer.main.get_command(app)
    command(["h1", "--wait", "1.5m", "--words", "a", "--loudly", "--json"], standalone_mode=False)
    shown = {"host": "h1", "wait": 90.0, "times": 1, "words": ["a"], "loudly": True}
    assert capsys.readouterr().out == f"{shown} True\n"


def test_every_name_is_of_one_subject_and_what_changes_is_named_once() -> None:
    names = [one.name for one in OPERATIONS if one.changes]
    assert sorted(set(names)) == sorted(names)
    assert {name.count(".") for name in names} == {1}
    routes = [one.route for one in OPERATIONS if one.route]
    assert sorted(set(routes)) == sorted(routes)


def test_a_file_of_headers_that_is_json_is_told_what_it_should_be(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    for text in ('{"Authorization": "Bearer hush"}', "hush"):
        file.write_text(f"A: b\n{text}\n")
        with pytest.raises(InvalidTarget) as refused:
            headers(str(file))
        assert str(refused.value) == "headers: line 2 is not 'Name: value'; write one header a line, no JSON"
    file.write_text("A: b\r\nC-d:e:f\n")
    assert headers(str(file)) == {"A": "b", "C-d": "e:f"}
