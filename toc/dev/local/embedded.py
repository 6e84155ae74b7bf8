"""What ``toc dev`` and ``toc demo`` use as servers.

One SQLite file, and if asked for a private Redis or Valkey behind a Unix socket. For one machine only: if its
disk is lost, so are the tasks; and SQLite writes one transaction at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from toc.dev.local.redis import EmbeddedRedis
from toc.model.errors import ConfigError, shown


class EmbeddedStack:
    """The servers of one directory, which keeps their data. They end with the thread that started them.

    ``redis``: whether there is one, or the database alone. ``settings`` holds the values for Settings:
    database_urls, databases and redis_url.
    """

    def __init__(self, directory: Path, *, redis: bool) -> None:
        self.directory = directory.absolute()
        self.redis = EmbeddedRedis(self.directory / "redis") if redis else None
        self.settings: dict[str, str | int | list[str]] = {
            "database_urls": [f"sqlite:///{quote(os.fsencode(self.directory / 'toc.sqlite3'))}"],
            "databases": 1,
        }
        if self.redis is not None:
            self.settings["redis_url"] = self.redis.url
        self._lock: int | None = None

    def start(self) -> Self:
        """Start what is not running. Raises ConfigError when another process uses the directory."""
        if self._lock is None:
            make_directory(self.directory)
            self._lock = lock(self.directory)
        if self.redis is not None:
            try:
                self.redis.start()
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Stop the servers and release the directory. May be called twice."""
        if self.redis is not None:
            self.redis.stop()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()


def write_config(path: Path, settings: Mapping[str, Any]) -> Path:
    """Write settings as a toc.toml that only its owner can read, and return its path."""
    path.touch(mode=0o600)  # it may hold a password
    # For texts, numbers and lists of them, JSON is TOML as well.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items()]
    path.write_text("".join(lines))
    return path


@contextmanager
def only_config(path: Path) -> Iterator[None]:
    """Within the block, settings come from this file alone, not from TOC_* variables of the caller, but for
    those of the log."""
    before = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("TOC_") and not name.startswith("TOC_LOG_")
    }
    for name in before:
        del os.environ[name]
    os.environ["TOC_CONFIG"] = str(path)
    try:
        yield
    finally:
        del os.environ["TOC_CONFIG"]
        os.environ.update(before)


def make_directory(path: Path) -> None:
    """Make a directory for servers, readable only by its owner, unless it exists. Raises ConfigError."""
    try:
        str(path).encode()  # servers read the path as UTF-8
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except (OSError, UnicodeEncodeError) as exc:
        raise not_usable(path, exc) from exc


def lock(directory: Path) -> int:
    """Lock the directory for this process; closing the returned descriptor unlocks it.

    Two servers on the same files would destroy them. Raises ConfigError when it is locked or missing.
    """
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise not_usable(directory, exc) from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise ConfigError(
            f"{directory} is in use by another process; end that process or use another directory"
        ) from exc
    return descriptor


def not_usable(path: Path, exc: Exception) -> ConfigError:
    """Return the error for a path that is not a directory, or that this user may not use."""
    why = exc.strerror if isinstance(exc, OSError) else "its name is not UTF-8"
    return ConfigError(f"{shown(str(path))} cannot be used as a directory: {why}")
