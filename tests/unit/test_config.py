"""Settings: what is accepted, where it comes from, and how refusals read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toc.config import Settings, config_file
from toc.model.errors import ConfigError
from toc.observe.log import redact, redact_event

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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('redis_ulr = "redis://h"\n', "did you mean 'redis_url'"),
        ("TOC_TABLES = 4\n", "did you mean 'tables'"),
        ("[toc]\ntables = 4\n", "'toc' is not a setting"),
        ("tables = \n", "is not TOML"),
        ('tables = "many"\n', "TOC_TABLES=many"),
    ],
)
def test_a_wrong_file_is_refused_with_a_reason(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "toc.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Settings()
    assert says in str(caught.value)


def test_a_file_that_is_named_but_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOC_CONFIG", "nowhere.toml")
    with pytest.raises(ConfigError, match=r"TOC_CONFIG=nowhere\.toml"):
        Settings()


@pytest.mark.parametrize(
    ("values", "says"),
    [
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
    ],
)
def test_a_wrong_value_is_refused_by_its_name_with_what_is_expected(
    values: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)
    assert says in str(caught.value)


def test_every_wrong_value_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(tables=3, cluster="a b", log_level="x")
    assert all(name in str(caught.value) for name in ("TOC_TABLES", "TOC_CLUSTER", "TOC_LOG_LEVEL"))


@pytest.mark.parametrize(
    "values",
    [
        {"database_urls": f"mysql://root:{CANARY}@h"},
        {"database_urls": [f"root:{CANARY}@h"]},
        {"database_urls": f"mysql+pymysql://u:{CANARY}/x@y@h1,bad://u:{CANARY}@h"},
        {"redis_url": f"http://:{CANARY}@h"},
        {"redis_url": f"u:{CANARY}@h:1"},
        {"redis_url": f"http://h?password={CANARY}"},
        {"zookeeper": f"digest://u:{CANARY}@h"},
        {"redis_url": f"redis://u:{CANARY}"},
        {"redis_url": f"redis+cluster://h:1,u:{CANARY}/x"},
        {"redis_url": f"u:{CANARY}"},
        {"database_urls": f"u:{CANARY}"},
        {"zookeeper": f"u:{CANARY}"},
    ],
)
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
