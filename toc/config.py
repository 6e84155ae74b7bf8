"""Settings: TOC_* variables, then toc.toml, then defaults. Validated once, at the start of a program.

The file is the one that TOC_CONFIG names, else ``toc.toml`` in the working directory if it exists. It uses
the same names in lower case without ``TOC_``::

    database_urls = ["mysql+pymysql://toc:secret@db1:3306", "mysql+pymysql://toc:secret@db2:3306"]
    databases = 8
    tables = 1024
    redis_url = "redis+cluster://:secret@cache1:6379,cache2:6379"
    zookeeper = "zk1:2181,zk2:2181,zk3:2181"

All lower layers receive plain values.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, SettingsConfigDict
from pydantic_settings import PydanticBaseSettingsSource as Source

from toc.model.errors import ConfigError, shown
from toc.model.horizon import BUDGET_FORM, Budget
from toc.model.sharding import MAX_TABLES, is_power_of_two
from toc.model.target import Allow
from toc.model.task import MAX_BODY
from toc.model.topic import NAME, NAMESPACE, NAMESPACE_HINT
from toc.observe.log import redact

TEN_YEARS = 3653 * 86_400
"""The default of TOC_MAX_DELAY, and its largest value, in seconds."""

_REDIS_SCHEMES = (
    "redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel",
)  # fmt: skip
_DATABASE_SCHEMES = ("mysql+pymysql://", "mariadb+pymysql://", "sqlite:///", "sqlite+pysqlite:///")
_DATABASE_HINT = "mysql+pymysql://user:password@host:3306 or sqlite:///path/to/file.db"
_REDIS_HINT = (
    "redis://host:6379/0, rediss://..., unix:///path, redis+cluster://h1:p1,h2:p2 or "
    "redis+sentinel://h1:p1,h2:p2/service"
)
MAX_SHOWN = 500
"""A message shows at most this many characters of a value."""
NEAR = 0.85
"""How like a setting a variable must be to be one that is misspelt: TOC_ZOOKEEPER_PORT is not."""
_KEY = re.compile(r"[A-Za-z0-9_-]{43}=")
_PREFIX = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_ADDRESS = re.compile(r"(?:[^\s:/@\[\]]*|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")
_ZOOKEEPER = re.compile(r"(?:[^\s/@]+@)?[^\s,/@?]+(?:,[^\s,/@?]+)*(?:/[^\s,?]+)?(?:\?\S+)?")
_ZOOKEEPER_HINT = "[user:password@]host:port,host:port[/chroot][?tls=true&ca=...]"


def _is_address(text: str) -> bool:
    match = _ADDRESS.fullmatch(text)
    return match is not None and int(match[1]) <= 65_535


_POWER = (is_power_of_two, f"a power of two up to {MAX_TABLES}: 1, 2, 4, ...")
_FORMS: dict[str, tuple[Callable[[Any], object], str]] = {
    "databases": _POWER,
    "tables": _POWER,
    "database_prefix": (_PREFIX.fullmatch, "letters, digits and '_', beginning with a letter, at most 32"),
    "redis_url": (lambda url: url.partition("://")[0] in _REDIS_SCHEMES, _REDIS_HINT),
    "namespace": (NAMESPACE.fullmatch, NAMESPACE_HINT),
    "redis_budget": (Budget.of, BUDGET_FORM),
    "zookeeper": (lambda hosts: "://" not in hosts and _ZOOKEEPER.fullmatch(hosts), _ZOOKEEPER_HINT),
    "cluster": (NAME.fullmatch, "letters, digits, '.', '_' and '-', at most 128"),
    "host": (
        lambda name: name not in (".", "..") and name.isprintable() and "/" not in name,  # it names nodes
        "a name without '/' and control characters",
    ),
    "metrics_address": (_is_address, "HOST:PORT, such as 127.0.0.1:9464, or :9464 for every address"),
    "secret_key": (
        lambda keys: all(_KEY.fullmatch(key.get_secret_value()) for key in keys),
        "keys of 44 characters each, as `toc secrets key` prints them",
    ),
}
"""What a setting must look like, and how to say so."""


class Settings(BaseSettings):
    """All settings, with defaults for development. All durations are seconds.

    ``Settings()`` reads the environment and toc.toml; ``Settings(redis_url=..., ...)`` overrides both. Raises
    ConfigError, which names each wrong setting, its value with secrets masked, and the expected form.
    """

    model_config = SettingsConfigDict(
        env_prefix="TOC_", env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    database_urls: Annotated[list[str], NoDecode] = Field([], description=_DATABASE_HINT)
    """Servers of the task table, as SQLAlchemy URLs: each takes a block of databases, in order. Or one
    sqlite:/// URL."""
    databases: int = Field(1, ge=1, le=MAX_TABLES, description="a power of two, 8 in production")
    """Number of databases, ``toc_0``, ``toc_1``, ... Fixed from the first ``toc db upgrade`` on."""
    tables: int = Field(
        4, ge=1, le=MAX_TABLES, description=f"a power of two up to {MAX_TABLES}, which is for production"
    )
    """Number of task tables over all databases. Fixed from the first ``toc db upgrade`` on."""
    database_prefix: str = Field("toc_", description="letters, digits and _, beginning with a letter")
    """Prefix of the databases' names."""

    redis_url: str | None = Field(None, description=_REDIS_HINT)
    """URL of the Redis that holds the index. Unset: there is none, and the rows alone say what is due."""
    namespace: str | None = Field(None, description=NAMESPACE_HINT)
    """Prefix of topics in Redis keys, so that environments can share a Redis."""

    redis_budget: str = Field("60%", description=BUDGET_FORM)
    """How much memory each Redis node may use. What is due too late to fit waits in its rows alone: the
    horizon becomes shorter. Without maxmemory a percentage bounds nothing."""

    zookeeper: str | None = Field(None, description=_ZOOKEEPER_HINT)
    """Servers that coordinate many hosts. Unset: the first database does, which is enough for a few."""
    session_timeout: float = Field(6.0, ge=1, le=10, description="seconds, 1 to 10")
    """How long a daemon is silent until its slots go to others."""
    cluster: str = Field("default", description="letters, digits, '.', '_' and '-'")
    """Name of this cluster in ZooKeeper."""

    max_delay: float = Field(TEN_YEARS, gt=0, le=TEN_YEARS, description="seconds, up to ten years")
    """Longest delay of a task; longer ones are refused as mistakes."""
    max_body: int = Field(1 << 20, ge=0, le=MAX_BODY, description="bytes, up to 4 MiB")
    """Longest body of a task. Row and body are one packet to MySQL, each byte takes two; beyond
    max_allowed_packet a caller's transaction is lost."""
    connect_timeout: float = Field(3.0, gt=0, le=300, description="seconds, more than 0")
    """Timeout of a connection attempt; at most 0.5 s for Redis."""
    read_timeout: float = Field(10.0, gt=0, le=3600, description="seconds, more than 0")
    """Timeout of a server's answer; at most 2 s for Redis."""
    write_timeout: float = Field(10.0, gt=0, le=3600, description="seconds, more than 0")
    """Timeout of sending to a server."""

    processes: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1, le=256, description="1 to 256")
    """Worker processes of a daemon. Default: the number of cores."""
    threads: int = Field(16, ge=1, le=1024, description="1 to 1024")
    """``def`` handlers that each worker process runs at once. Of several topics, one gets at most three
    quarters of them."""
    async_limit: int = Field(4000, ge=1, le=100_000, description="1 to 100000")
    """Coroutines of ``async def`` handlers that each worker process runs at once, per topic."""
    topic_drift: Literal["warn", "refuse"] = "warn"
    """Whether a worker starts whose application declares topics otherwise than they are."""
    max_crashes: int = Field(3, ge=1, le=100, description="1 to 100")
    """Tries in a row that may end with their worker before the task runs alone."""
    shutdown_deadline: float = Field(30.0, ge=0, le=86_400, description="seconds, 0 or more")
    """How long a stopping daemon waits for running handlers."""
    weight: float = Field(1.0, gt=0, le=1000, description="more than 0, up to 1000")
    """Share of the slots that this host takes, relative to other hosts."""
    host: str = Field(default_factory=socket.gethostname, min_length=1, max_length=255, description="no '/'")
    """Name of this host for operators."""

    metrics_address: str | None = Field(
        None, description="HOST:PORT, such as 127.0.0.1:9464, or :9464 for all"
    )
    """HTTP address of a daemon's /metrics, /livez and /readyz. Unset: none. Port 0: a free one, which the log
    shows."""

    secret_key: Annotated[list[SecretStr], NoDecode] = Field(
        [], description="keys that `toc secrets key` prints, separated by commas"
    )
    """Keys for the secrets of webhook targets: the first encrypts, each decrypts. Unset: webhooks wait."""
    webhook_allow: Annotated[list[str], NoDecode] = Field(
        [], description="origins such as http://10.0.0.7:8080 and networks such as 10.0.0.0/8"
    )
    """What webhooks may reach beside public addresses by https on port 443: an origin allows its scheme and
    port, a network its addresses."""

    audit_retention: float = Field(31_536_000.0, ge=60, le=TEN_YEARS, description="seconds, 60 to ten years")
    """How long the audit of operators' changes is kept."""

    traces: float = Field(0.0, ge=0, le=1, description="a share of all tasks, 0 to 1")
    """Share of tasks that OpenTelemetry traces, the same wherever they are submitted and run; needs the extra
    otel."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Events of lower levels are not logged."""
    log_format: Literal["auto", "pretty", "json"] = "auto"
    """``auto`` is pretty on a terminal and JSON lines otherwise."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as exc:  # not chained: pydantic's own text could show a password
            raise ConfigError("\n".join(map(_explain, exc.errors()))) from None

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Source, env_settings: Source,
        dotenv_settings: Source, file_secret_settings: Source,  # noqa: ARG003 - pydantic calls by these names
    ) -> tuple[Source, ...]:  # fmt: skip
        """Order the sources: arguments, then the environment, then the file."""
        return init_settings, env_settings, InitSettingsSource(settings_cls, _read_file())

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag(cls, value: Any) -> Any:
        if isinstance(value, bool):  # in toc.toml it would be the number 1 or 0
            raise ValueError("no setting is a flag")  # noqa: TRY004 - pydantic shows no TypeError
        return value

    @field_validator("database_urls", "secret_key", "webhook_allow", mode="before")
    @classmethod
    def _split(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, str):
            return value
        # A comma may be part of a password: there it separates only if a scheme follows it.
        separator = r",\s*(?=[a-z0-9+]+://)" if info.field_name == "database_urls" else ","
        return [part.strip(", ") for part in re.split(separator, value) if part.strip(", ")]

    @field_validator("database_urls")
    @classmethod
    def _check_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not url.startswith(_DATABASE_SCHEMES):
                raise ValueError(f"{_masked_url(url)!r} is not a supported URL; expected {_DATABASE_HINT}")
        if len(set(urls)) != len(urls):
            raise ValueError("the same server is named twice; name each server once")
        if len(urls) > 1 and any(url.startswith("sqlite") for url in urls):
            raise ValueError(
                "sqlite cannot be combined with others; expected one sqlite:/// URL, or MySQL servers only"
            )
        return urls

    @field_validator("database_urls", "redis_url", "zookeeper")
    @classmethod
    def _check_hosts(cls, value: list[str] | str | None) -> list[str] | str | None:
        for url in [value] if isinstance(value, str) else value or []:
            for host, port in _hosts(url):
                try:
                    host.encode("idna")  # as every driver does, each with a different error
                except UnicodeError:
                    raise ValueError(
                        f"{shown(host)} is not a host name; expected parts of at most 63 letters, "
                        f"digits and '-', with dots between them"
                    ) from None
                if port is not None and not (
                    port.isdecimal() and port.isascii() and len(port) < 6 and 0 < int(port) < 65_536
                ):
                    # Not shown: without "@" it may be the password of a user, with the host left out.
                    what = f"what follows {shown(f'{host}:')}"
                    raise ValueError(f"{what} is not a port; expected a number from 1 to 65535")
        return value

    @field_validator(*_FORMS)
    @classmethod
    def _check_form(cls, value: Any, info: ValidationInfo) -> Any:
        fits, expected = _FORMS[str(info.field_name)]
        if value is not None and not fits(value):
            raise ValueError(f"expected {expected}")
        return value

    @field_validator("webhook_allow")
    @classmethod
    def _check_allow(cls, entries: list[str]) -> list[str]:
        Allow(entries)
        return entries

    @field_validator("log_level", "log_format", "topic_drift", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if self.databases > self.tables:
            raise ValueError(
                f"TOC_DATABASES={self.databases} is more than TOC_TABLES={self.tables}: "
                f"each database needs a table; raise TOC_TABLES"
            )
        if self.sqlite and self.databases != 1:
            raise ValueError(
                f"TOC_DATABASES={self.databases} cannot be used with a sqlite:/// URL, "
                f"which is one database: set TOC_DATABASES=1"
            )
        if self.database_urls and self.databases % len(self.database_urls):
            raise ValueError(
                f"TOC_DATABASE_URLS names {len(self.database_urls)} servers, and TOC_DATABASES="
                f"{self.databases} cannot be spread evenly over them: name a power of two of servers, "
                f"at most TOC_DATABASES"
            )
        return self

    @property
    def sqlite(self) -> bool:
        """Whether the task table is SQLite (the embedded default)."""
        return bool(self.database_urls) and self.database_urls[0].startswith("sqlite")

    def need_database_urls(self) -> list[str]:
        """Return the servers of the task table. Raises ConfigError if none is set."""
        if not self.database_urls:
            for name in (name for name, meant in misspelt().items() if meant == "TOC_DATABASE_URLS"):
                raise ConfigError(f"{name} is not a setting; did you mean TOC_DATABASE_URLS?")
            do = "or run `toc dev`, which starts everything here"
            if Path(".toc/toc.toml").is_file():
                do = "or, for that of `toc dev` here, run `export TOC_CONFIG=$PWD/.toc/toc.toml`"
            raise ConfigError(f"TOC_DATABASE_URLS is not set: set it (or write it into toc.toml), {do}")
        return self.database_urls

    @property
    def allow(self) -> Allow:
        """What webhooks may reach beside public addresses."""
        return Allow(self.webhook_allow)

    def masked(self) -> dict[str, Any]:
        """Return the settings for display, with passwords in URLs replaced by ``***``."""
        shown = self.model_dump()
        shown["database_urls"] = [redact(url) for url in self.database_urls]
        shown["redis_url"] = self.redis_url and redact(self.redis_url)
        shown["zookeeper"] = self.zookeeper and _masked(self.zookeeper)
        shown["secret_key"] = ["***" for _ in self.secret_key]
        return shown

    def __repr_args__(self) -> Any:
        return self.masked().items()


def _hosts(url: str) -> list[tuple[str, str | None]]:
    """Return each host of a URL with its port text, or None without a colon. Empty for files and sockets."""
    scheme, _, rest = url.rpartition("://")
    if scheme.startswith(("sqlite", "unix")):
        return []
    hosts = re.split(r"[/?#]", rest.rpartition("@")[2] if "@" in rest else rest, maxsplit=1)[0]
    found = []
    for part in hosts.split(","):
        address = re.match(r"\[[^]]*\]", part)  # IPv6, with colons inside
        host, colon, port = part[address.end() if address else 0 :].partition(":")
        found.append((host, port if colon else None))
    return found


def config_file() -> Path | None:
    """Return the settings file, or None. Raises ConfigError if TOC_CONFIG names no readable file."""
    named = os.environ.get("TOC_CONFIG")
    if named:
        path = Path(named)
        if not os.access(path, os.R_OK) or not path.is_file():  # in this order: a name may be too long
            raise ConfigError(
                f"TOC_CONFIG={_short(named)} is not a readable file: correct the path or the file's "
                f"mode, or unset TOC_CONFIG"
            )
        return path
    path = Path("toc.toml")
    return path if path.is_file() else None


def _read_file() -> dict[str, Any]:
    path = config_file()
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    except (ValueError, RecursionError) as exc:  # also for numbers and lists that no setting has
        raise ConfigError(f"{path} is not TOML: {exc}") from exc
    known = list(Settings.model_fields)
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: {key!r} is not a setting{_nearest(key, known)}")
    return values


def misspelt() -> dict[str, str]:
    """Return the variables that are no settings, each with the one that it nearly is. Others may be an
    image's, or name a service of Kubernetes."""
    known = [*Settings.model_fields, "config"]
    names = [name for name in os.environ if name[:4] == "TOC_" and name[4:].lower() not in known]
    near = {name: difflib.get_close_matches(name[4:].lower(), known, 1, NEAR) for name in names}
    return {name: f"TOC_{found[0].upper()}" for name, found in near.items() if found}


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key.lower().removeprefix("toc_"), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; the settings are {', '.join(known)}"


def _explain(error: Any) -> str:
    """Translate a pydantic error: the TOC_ name, the value without secrets, and the expected form."""
    reason = str(error.get("ctx", {}).get("error") or error["msg"])
    if not error["loc"]:
        return reason
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"{name!r} is not a setting{_nearest(name, list(Settings.model_fields))}"
    variable = f"TOC_{name.upper()}"
    value = "***" if name == "secret_key" else error["input"]
    show = _masked_url if name in ("database_urls", "redis_url", "zookeeper") else _masked
    parts = value if isinstance(value, list) else [value]
    shown = _short(", ".join(show(str(part)) for part in parts))
    if error["type"] == "value_error":
        return f"{variable}={shown}: {reason}"
    hint = Settings.model_fields[name].description
    return f"{variable}={shown}: {reason[:1].lower()}{reason[1:]}" + (f" ({hint})" if hint else "")


def _masked(value: str) -> str:
    """Mask a value for a message. Even if it is no URL, the part before "@" may be a password."""
    if "://" not in value and "@" in value:
        return f"***@{value.rpartition('@')[2]}"
    return redact(value)


def _short(value: str) -> str:
    return value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."


def _masked_url(value: str) -> str:
    """Mask a URL for a message. Without "@", the part after a colon may be a password whose host was left
    out."""
    if "@" not in value:
        value = re.sub(r"(^|//|,)([^\s:/,\[\]]*):(?!//)(?!\d+(?:[/?#,]|$))\S*", r"\1\2:***", value)
    return _masked(value)
