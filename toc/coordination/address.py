"""Parses TOC_ZOOKEEPER."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from kazoo.hosts import collect_hosts  # type: ignore[import-untyped]  # kazoo has no type information

from toc.model.errors import ConfigError

_FORM = "[user:password@]host:port,host:port[/chroot][?tls=true&ca=...&cert=...&key=...]"
_OPTIONS = re.compile(r"\?(?=(?:tls|ca|cert|key)=)")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of ZooKeeper and our identity there. The password is never shown."""

    hosts: str
    chroot: str = ""
    credential: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``[user:password@]host:port,host:port[/chroot][?tls=true&ca=FILE&cert=FILE&key=FILE]``.

        User and password may be percent-encoded. With them, nobody else can change the nodes that we make
        (scheme digest). Raises ConfigError, which does not show the password.
        """
        options_at = _OPTIONS.search(text)  # searched first: the path of a file may hold an "@"
        head, tail = (text[: options_at.start()], text[options_at.end() :]) if options_at else (text, "")
        login, at, rest = head.strip().rpartition("@")
        place, _, query = rest.partition("?")
        hosts, slash, chroot = place.partition("/")
        credential = None
        if at:
            user, colon, password = login.partition(":")
            if not user or not colon:
                raise ConfigError(f"the ZooKeeper address ...@{rest} names a user without password: {_FORM}")
            credential = f"{unquote(user)}:{unquote(password)}"
        try:
            parsed, _ = collect_hosts(hosts)
        except ValueError as exc:
            raise ConfigError(f"{hosts!r} is not a list of ZooKeeper hosts: {_FORM}") from exc
        if not parsed or "//" in slash + chroot:
            raise ConfigError(f"{place!r} is not a ZooKeeper address: {_FORM}")
        options = dict(parse_qsl(f"{query}&{tail.strip()}", keep_blank_values=True))
        unknown = sorted(options.keys() - {"tls", "ca", "cert", "key"})
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is not an option of a ZooKeeper address: {_FORM}")
        files = {name: options[name] for name in ("ca", "cert", "key") if name in options}
        for name, path in files.items():
            if not Path(path).is_file():  # kazoo would retry forever
                raise ConfigError(f"the ZooKeeper address names {name}={path}, which is not a file")
        tls = options.get("tls", "true" if files else "false")
        if tls not in ("true", "false"):
            raise ConfigError(f"tls={tls} in the ZooKeeper address must be true or false")
        return cls(hosts, (slash + chroot).rstrip("/"), credential, tls == "true", **files)
