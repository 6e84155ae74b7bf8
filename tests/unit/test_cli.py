"""The command line without any server: values, help, and how refusals end."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from toc.cli.main import main
from toc.cli.values import biz_id, number, past, who, whole_seconds
from toc.model.clock import parse_duration, to_ms
from toc.model.documents import parse_instant
from toc.model.errors import InvalidDelay, InvalidInput

HEAVY = ("alembic", "hiredis", "kazoo", "pydantic", "pymysql", "redis", "sqlalchemy")


pytestmark = pytest.mark.usefixtures("nothing_outside")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("0.5", 0.5),
        ("0", 0.0),
        ("500ms", 0.5),
        ("30m", 1800.0),
        ("1.5h", 5400.0),
        ("7d", 604_800.0),
        ("2W", 1_209_600.0),
        (" 3 s ", 3.0),
    ],
)
def test_durations_are_seconds_or_have_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "nan", "inf", "-inf", "-5", "-5m", "1e400", "5x", "1.2.3s", "m"]
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
        42,
        0,
        -1,
        "007",
        "a1",
        "1.0",
    ]
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


@pytest.mark.parametrize(
    "command",
    [
        ["db", "check"],
        ["db", "upgrade"],
        ["topic", "list"],
        ["submit", "t", "--biz-id", "1", "--delay", "1"],
        ["get", "1"],
        ["slots"],
        ["dead", "list"],
        ["worker", "--app", "toc.dev.demo.app:center"],
    ],
)
def test_without_settings_a_command_says_what_to_set(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
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
