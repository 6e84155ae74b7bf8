"""All tables of the first version.

Revision: 1001. Edited in place, with toc.store.schema, until 0.1.0 is released; a test requires that both
make the same tables. From then on never: later changes are revisions that follow. Written as SQL, so that it
does not change when toc.store.schema does. On MySQL a table is one statement (with its keys) and many
statements are one round trip: a thousand tables take seconds.
"""

from __future__ import annotations

from alembic import context, op

revision = "1001"
down_revision = None

BATCH = 32
"""Tables per round trip."""

Tables = dict[str, tuple[str, tuple[str, str] | None]]

# The columns of each table, and its index beside its keys, if it has one. {n} is the number of a table.
SHARDED: Tables = {
    "timeout_task_{n}": (
        """
        job_id {rowid} NOT NULL,
        gmt_create {ms} NOT NULL,
        gmt_modified {ms} NOT NULL,
        biz_id {u64} NOT NULL,
        biz_key {key},
        biz_type {u64} NOT NULL,
        status {tiny} NOT NULL,
        action_time {ms} NOT NULL,
        next_time {ms} NOT NULL,
        attribute VARCHAR(4096) NOT NULL,
        version {u32} NOT NULL,
        attempts {u16} NOT NULL,
        crashes {u16} NOT NULL,
        slot_crc {u32} NOT NULL,
        slot_amount {u16} NOT NULL,
        dedup_key {key},
        last_error VARCHAR(1024),
        lease_owner {u64},
        lease_until {ms},
        lease_since {ms},
        history VARCHAR(4000),
        tries {u16} DEFAULT 0 NOT NULL,
        expires_at {ms},
        expired {tiny} DEFAULT 0 NOT NULL,
        body_length {u32},
        body_sha256 {b32},
        pull_nonce {b16},
        pull_began {ms},
        redrives {u16} DEFAULT 0 NOT NULL,
        late VARCHAR(600),
        PRIMARY KEY (job_id),
        CONSTRAINT uk_dedup_{n} UNIQUE (biz_id, biz_type, dedup_key)
        """,
        ("ix_due_{n}", "status, next_time, job_id, biz_type"),
    ),
    "timeout_body_{n}": (
        """
        job_id {u64} NOT NULL,
        version {u32} NOT NULL,
        content_type VARCHAR(255) NOT NULL,
        body {blob} NOT NULL,
        PRIMARY KEY (job_id, version)
        """,
        None,
    ),
    "timeout_schedule_{n}": (
        """
        name VARCHAR(128) NOT NULL,
        schedule_id {u64} NOT NULL,
        topic VARCHAR(128) NOT NULL,
        definition TEXT NOT NULL,
        version {u32} NOT NULL,
        change_id {u64} NOT NULL,
        paused {tiny} NOT NULL,
        after_time {ms} NOT NULL,
        next_time {ms},
        look_time {ms},
        buffered {ms},
        last_job_id {u64},
        fired {u64} NOT NULL,
        skipped {u64} NOT NULL,
        missed {u64} NOT NULL,
        missed_at {ms},
        gmt_create {ms} NOT NULL,
        gmt_modified {ms} NOT NULL,
        PRIMARY KEY (name)
        """,
        ("ix_look_{n}", "look_time,topic"),
    ),
}
IN_EACH_DATABASE: Tables = {
    "timeout_request": (
        """
        request_key {b32} NOT NULL,
        payload {b32} NOT NULL,
        answer TEXT,
        gmt_create {ms} NOT NULL,
        PRIMARY KEY (request_key)
        """,
        ("ix_request_age", "gmt_create"),
    ),
    "timeout_due": (
        """
        number {rowid} NOT NULL,
        part VARCHAR(8) NOT NULL,
        counts {long} NOT NULL,
        counted_at {ms} NOT NULL,
        PRIMARY KEY (number, part)
        """,
        None,
    ),
}
IN_THE_FIRST_DATABASE: Tables = {
    "timeout_topic": (
        """
        name VARCHAR(128) NOT NULL,
        biz_type {u64} NOT NULL,
        slot_amount {u16} NOT NULL,
        topic_type VARCHAR(16) NOT NULL,
        retries {tiny} NOT NULL,
        backoff VARCHAR(16) NOT NULL,
        backoff_base DOUBLE NOT NULL,
        backoff_cap DOUBLE NOT NULL,
        prepare_timeout {u32} NOT NULL,
        max_runtime {u32} NOT NULL,
        horizon {u32} NOT NULL,
        retention {u32} NOT NULL,
        paused {tiny} NOT NULL,
        gmt_create {ms} NOT NULL,
        gmt_modified {ms} NOT NULL,
        version {u32} NOT NULL,
        concurrency {u32} DEFAULT 0 NOT NULL,
        resume_rate {u32} DEFAULT 0 NOT NULL,
        resumed_at {u64} DEFAULT 0 NOT NULL,
        delivery VARCHAR(16) DEFAULT 'handler' NOT NULL,
        closed {tiny} DEFAULT 0 NOT NULL,
        target VARCHAR(128) DEFAULT '' NOT NULL,
        expires_in {u32} DEFAULT 0 NOT NULL,
        paused_at {u64} DEFAULT 0 NOT NULL,
        paused_by VARCHAR(128) DEFAULT '' NOT NULL,
        PRIMARY KEY (name),
        CONSTRAINT uk_biz_type UNIQUE (biz_type)
        """,
        None,
    ),
    "timeout_identity": (
        """
        number {tiny} NOT NULL,
        identity VARCHAR(32) NOT NULL,
        lease_secret VARCHAR(64) NOT NULL,
        indexed {tiny} DEFAULT 1 NOT NULL,
        gmt_create {ms} NOT NULL,
        horizon {u32} DEFAULT 0 NOT NULL,
        horizon_why VARCHAR(255) DEFAULT '' NOT NULL,
        horizon_since {u64} DEFAULT 0 NOT NULL,
        horizon_looked {u64} DEFAULT 0 NOT NULL,
        marked_by VARCHAR(255) DEFAULT '' NOT NULL,
        marked_until {ms},
        PRIMARY KEY (number)
        """,
        None,
    ),
    "timeout_template": (
        """
        pattern VARCHAR(128) NOT NULL,
        policies TEXT NOT NULL,
        most_topics {u32} NOT NULL,
        gmt_create {ms} NOT NULL,
        gmt_modified {ms} NOT NULL,
        version {u32} NOT NULL,
        PRIMARY KEY (pattern)
        """,
        None,
    ),
    "timeout_retired": (
        """
        biz_type {rowid} NOT NULL,
        name VARCHAR(128) NOT NULL,
        retention {u32} NOT NULL,
        gmt_create {ms} NOT NULL,
        PRIMARY KEY (biz_type)
        """,
        None,
    ),
    "timeout_token": (
        """
        name VARCHAR(64) NOT NULL,
        sha256 {b32} NOT NULL,
        roles VARCHAR(255) NOT NULL,
        topics TEXT NOT NULL,
        limits TEXT NOT NULL,
        expires_at {ms},
        revoked_at {ms},
        created_by VARCHAR(128) NOT NULL,
        gmt_create {ms} NOT NULL,
        version {u32} NOT NULL,
        PRIMARY KEY (name),
        CONSTRAINT uk_token_sha256 UNIQUE (sha256)
        """,
        None,
    ),
    "timeout_episode": (
        """
        episode_id {rowid} NOT NULL,
        topic VARCHAR(128) NOT NULL,
        cause VARCHAR(32) NOT NULL,
        who VARCHAR(300) NOT NULL,
        since_time {ms} NOT NULL,
        until_time {ms} NOT NULL,
        gmt_create {ms} NOT NULL,
        tasks {u32} NOT NULL,
        worst {u64} NOT NULL,
        job_id {u64} NOT NULL,
        evidence VARCHAR(255) NOT NULL,
        PRIMARY KEY (episode_id)
        """,
        ("ix_episode_age", "gmt_create"),
    ),
    "timeout_audit": (
        """
        audit_id {serial},
        action_id VARCHAR(32) NOT NULL,
        phase VARCHAR(8) NOT NULL,
        actor VARCHAR(128) NOT NULL,
        action VARCHAR(64) NOT NULL,
        target VARCHAR(255) NOT NULL,
        details TEXT NOT NULL,
        result TEXT,
        gmt_create {ms} NOT NULL,
        PRIMARY KEY (audit_id)
        """,
        ("ix_audit_age", "gmt_create"),
    ),
    "timeout_bulk": (
        """
        name VARCHAR(32) NOT NULL,
        kind VARCHAR(16) NOT NULL,
        topic VARCHAR(128) NOT NULL,
        details TEXT NOT NULL,
        created_by VARCHAR(128) NOT NULL,
        rate DOUBLE NOT NULL,
        tasks {u32} NOT NULL,
        state VARCHAR(16) NOT NULL,
        done {u32} NOT NULL,
        counts TEXT NOT NULL,
        error VARCHAR(1000) NOT NULL,
        owner {u64},
        lease_until {ms},
        gmt_create {ms} NOT NULL,
        gmt_modified {ms} NOT NULL,
        ended {ms},
        PRIMARY KEY (name)
        """,
        None,
    ),
    "timeout_bulk_part": (
        """
        name VARCHAR(32) NOT NULL,
        part {u32} NOT NULL,
        job_ids {blob} NOT NULL,
        outcomes {blob} NOT NULL,
        gmt_create {ms} NOT NULL,
        PRIMARY KEY (name, part)
        """,
        None,
    ),
    "timeout_target": (
        """
        name VARCHAR(128) NOT NULL,
        url TEXT NOT NULL,
        settings TEXT NOT NULL,
        paused {tiny} NOT NULL,
        paused_by VARCHAR(128) NOT NULL,
        paused_why VARCHAR(255) NOT NULL,
        previous_until {ms},
        sealed TEXT NOT NULL,
        change_id {u64} NOT NULL,
        gmt_create {ms} NOT NULL,
        gmt_modified {ms} NOT NULL,
        PRIMARY KEY (name)
        """,
        None,
    ),
    "timeout_member": (
        """
        name VARCHAR(300) NOT NULL,
        host VARCHAR(255) NOT NULL,
        beat {u64} NOT NULL,
        heartbeat {ms} NOT NULL,
        timeout {u32} NOT NULL,
        dead {tiny} NOT NULL,
        data {long} NOT NULL,
        gmt_create {ms} NOT NULL,
        PRIMARY KEY (name)
        """,
        None,
    ),
    "timeout_minute": (
        """
        minute {ms} NOT NULL,
        member VARCHAR(300) NOT NULL,
        counts {long} NOT NULL,
        PRIMARY KEY (minute, member)
        """,
        None,
    ),
}
MYSQL = {
    "u64": "BIGINT UNSIGNED", "rowid": "BIGINT UNSIGNED", "u32": "INTEGER UNSIGNED",
    "u16": "SMALLINT UNSIGNED", "tiny": "TINYINT",
    "ms": "DATETIME(3)", "serial": "BIGINT UNSIGNED NOT NULL AUTO_INCREMENT",
    "key": "VARBINARY(255)", "b32": "BINARY(32)", "b16": "BINARY(16)", "blob": "LONGBLOB",
    "long": "MEDIUMTEXT",
}  # fmt: skip
SQLITE = {
    "u64": "BIGINT", "rowid": "INTEGER", "u32": "INTEGER", "u16": "SMALLINT",
    "tiny": "SMALLINT", "ms": "BIGINT", "serial": "INTEGER NOT NULL",
    "key": "BLOB", "b32": "BLOB", "b16": "BLOB", "blob": "BLOB",
    "long": "TEXT",
}  # fmt: skip


def upgrade() -> None:
    tables = list(context.config.attributes["tables"])
    beside = dict(IN_EACH_DATABASE)
    if 0 in tables:  # the first database
        beside |= IN_THE_FIRST_DATABASE
    context.config.attributes["execute"]([each for name in beside for each in _create(name, *beside[name])])
    for first in range(0, len(tables), BATCH):
        part = [f"{table:04d}" for table in tables[first : first + BATCH]]
        statements = [each for n in part for name in SHARDED for each in _create(name, *SHARDED[name], n)]
        context.config.attributes["execute"](statements)
        context.config.attributes["migrated"](revision, first + len(part))


def _create(name: str, columns: str, index: tuple[str, str] | None, n: str = "") -> list[str]:
    sqlite = op.get_bind().dialect.name == "sqlite"
    name, columns = name.format(n=n), columns.format(n=n, **(SQLITE if sqlite else MYSQL))
    called, of = (index[0].format(n=n), index[1]) if index else ("", "")
    if sqlite:
        made = [f"CREATE TABLE IF NOT EXISTS {name} ({columns})"]
        return [*made, f"CREATE INDEX IF NOT EXISTS {called} ON {name} ({of})"] if index else made
    inner = f"{columns}, INDEX {called} ({of})" if index else columns
    options = "ENGINE=InnoDB ROW_FORMAT=DYNAMIC CHARSET=utf8mb4 COLLATE utf8mb4_bin"
    return [f"CREATE TABLE IF NOT EXISTS {name} ({inner}) {options}"]
