"""Checks whether each server of the task table is fit: version, durability, space, clock, schema.

For ``toc doctor``. It needs only rights that every account has.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping

from toc.model.clock import MAX_CLOCK_SKEW_MS
from toc.model.errors import StoreUnavailable
from toc.model.finding import Finding, Level, clock_finding
from toc.store.check import NO_TABLES, check_server
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Shards

PACKET_BYTES = 16 * 2**20
"""Enough for a batch of rows, with a margin."""
NEARLY_ALL = 0.8
OLDEST = {"MySQL": (8, 0), "MariaDB": (10, 6)}

_VARIABLES = (
    *("version", "innodb_flush_log_at_trx_commit", "log_bin", "sync_binlog", "read_only"),
    *("max_allowed_packet", "max_connections"),
)


def examine(shards: Shards) -> list[Finding]:
    """Return findings about every server, also good ones. A server out of reach is a finding too."""
    return [finding for server in shards.servers for finding in _examine(shards, server)]


def _examine(shards: Shards, server: DatabaseServer) -> Iterator[Finding]:
    try:
        if shards.layout.sqlite:
            yield Finding(
                Level.NOTE,
                server.name,
                "the task table is SQLite, for evaluation, development and tests on one machine. It is not "
                "for production: a lost disk loses every task, there is one writer at a time, and one host",
                "for production, set TOC_DATABASE_URLS=mysql+pymysql://...",
            )
        else:
            yield from _settings(server)
        yield from _schema(shards, server)
    except StoreUnavailable as exc:
        yield Finding(
            Level.REFUSE, server.name, str(exc), "bring it back, or correct it or TOC_DATABASE_URLS"
        )


def _settings(server: DatabaseServer) -> Iterator[Finding]:
    names = ",".join(f"'{name}'" for name in _VARIABLES)
    began = time.monotonic()
    ahead = server.clock()
    doubt_ms = (time.monotonic() - began) * 500
    variables, used = server.run(
        [
            Statement(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})"),
            Statement("SHOW GLOBAL STATUS WHERE Variable_name='Threads_connected'"),
        ]
    )
    facts = {str(name).lower(): str(value) for name, value in variables.rows}
    yield _version(server.name, facts.get("version", ""))
    for level, what, do in _wrong(facts):
        yield Finding(level, server.name, what, do)
    connected, most = int(used.rows[0][1]), int(facts.get("max_connections", "0"))
    room = f"{connected} of {most} connections in use"
    if most and connected > NEARLY_ALL * most:
        yield Finding(
            Level.WARN,
            server.name,
            room,
            "raise max_connections: a worker process takes up to 8 per server, and its handlers as many",
        )
    else:
        yield Finding(Level.OK, server.name, room, "")
    yield clock_finding(server.name, 1000 * ahead, doubt_ms + 1, MAX_CLOCK_SKEW_MS)


def _version(server: str, version: str) -> Finding:
    name = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and (int(number[1]), int(number[2])) >= OLDEST[name]:
        return Finding(Level.OK, server, f"{name} {version}", "")
    oldest = " or ".join(f"{each} {major}.{minor}" for each, (major, minor) in OLDEST.items())
    return Finding(Level.WARN, server, f"it is {name} {version or '?'}", f"use {oldest} or later")


def _wrong(facts: Mapping[str, str]) -> Iterator[tuple[Level, str, str]]:
    flush = facts.get("innodb_flush_log_at_trx_commit", "1")
    if flush != "1":
        yield (
            Level.REFUSE,
            f"innodb_flush_log_at_trx_commit is {flush}: a crash of the machine loses acknowledged tasks",
            "set innodb_flush_log_at_trx_commit = 1",
        )
    if facts.get("read_only", "OFF") not in ("OFF", "0"):
        yield Level.REFUSE, "it is read-only", "point TOC_DATABASE_URLS at the primary"
    if facts.get("log_bin") in ("ON", "1") and facts.get("sync_binlog", "1") != "1":
        yield (
            Level.WARN,
            f"sync_binlog is {facts['sync_binlog']}: after a crash replicas may lack commits",
            "set sync_binlog = 1",
        )
    packet = int(facts.get("max_allowed_packet", PACKET_BYTES))
    if packet < PACKET_BYTES:
        yield (
            Level.WARN,
            f"max_allowed_packet is {packet / 2**20:g} MiB: large batches would be refused",
            f"set max_allowed_packet = {PACKET_BYTES >> 20}M",
        )


def _schema(shards: Shards, server: DatabaseServer) -> Iterator[Finding]:
    statuses = check_server(shards, server)
    if absent := [status.database for status in statuses if status.absent]:
        several = " and other databases" if len(absent) > 1 else ""
        yield Finding(Level.REFUSE, server.name, f"{absent[0]}{several}: {NO_TABLES}", "see there")
    for status in statuses:
        if status.behind and not status.absent:
            yield Finding(Level.REFUSE, server.name, str(status), status.remedy)
    fit = [status for status in statuses if not status.behind]
    if fit:
        revisions = ", ".join(sorted({str(status.revision) for status in fit}))
        yield Finding(Level.OK, server.name, f"the schema of {len(fit)} databases is at {revisions}", "")
