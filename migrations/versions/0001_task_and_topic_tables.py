"""Task tables, and in the first database the topic table.

Revision: 0001. Written as SQL, because it must not change when toc.store.schema does. On MySQL a table is one
statement (with its keys) and many statements are one round trip: a thousand tables take seconds.
"""

from __future__ import annotations

from alembic import context, op

revision = "0001"
down_revision = None

BATCH = 32
"""Tables per round trip."""

MYSQL_TASK = """
CREATE TABLE IF NOT EXISTS timeout_task_{n} (
  job_id BIGINT UNSIGNED NOT NULL,
  gmt_create DATETIME(3) NOT NULL,
  gmt_modified DATETIME(3) NOT NULL,
  biz_id BIGINT UNSIGNED NOT NULL,
  biz_key VARBINARY(255),
  biz_type BIGINT UNSIGNED NOT NULL,
  status TINYINT NOT NULL,
  action_time DATETIME(3) NOT NULL,
  next_time DATETIME(3) NOT NULL,
  attribute VARCHAR(4096) NOT NULL,
  version INTEGER UNSIGNED NOT NULL,
  attempts SMALLINT UNSIGNED NOT NULL,
  crashes SMALLINT UNSIGNED NOT NULL,
  slot_crc INTEGER UNSIGNED NOT NULL,
  slot_amount SMALLINT UNSIGNED NOT NULL,
  dedup_key VARBINARY(255),
  last_error VARCHAR(1024),
  PRIMARY KEY (job_id),
  CONSTRAINT uk_dedup_{n} UNIQUE (biz_id, biz_type, dedup_key),
  INDEX ix_due_{n} (status, next_time)
) ENGINE=InnoDB CHARSET=utf8mb4 COLLATE=utf8mb4_bin
"""

MYSQL_TOPIC = """
CREATE TABLE IF NOT EXISTS timeout_topic (
  name VARCHAR(128) NOT NULL,
  biz_type BIGINT UNSIGNED NOT NULL,
  slot_amount SMALLINT UNSIGNED NOT NULL,
  topic_type VARCHAR(16) NOT NULL,
  retries TINYINT NOT NULL,
  backoff VARCHAR(16) NOT NULL,
  backoff_base DOUBLE NOT NULL,
  backoff_cap DOUBLE NOT NULL,
  prepare_timeout INTEGER UNSIGNED NOT NULL,
  max_runtime INTEGER UNSIGNED NOT NULL,
  horizon INTEGER UNSIGNED NOT NULL,
  retention INTEGER UNSIGNED NOT NULL,
  paused TINYINT NOT NULL,
  gmt_create DATETIME(3) NOT NULL,
  gmt_modified DATETIME(3) NOT NULL,
  version INTEGER UNSIGNED NOT NULL,
  PRIMARY KEY (name),
  CONSTRAINT uk_biz_type UNIQUE (biz_type)
) ENGINE=InnoDB CHARSET=utf8mb4 COLLATE=utf8mb4_bin
"""

SQLITE_TASK = """
CREATE TABLE IF NOT EXISTS timeout_task_{n} (
  job_id INTEGER NOT NULL,
  gmt_create BIGINT NOT NULL,
  gmt_modified BIGINT NOT NULL,
  biz_id BIGINT NOT NULL,
  biz_key BLOB,
  biz_type BIGINT NOT NULL,
  status SMALLINT NOT NULL,
  action_time BIGINT NOT NULL,
  next_time BIGINT NOT NULL,
  attribute VARCHAR(4096) NOT NULL,
  version INTEGER NOT NULL,
  attempts SMALLINT NOT NULL,
  crashes SMALLINT NOT NULL,
  slot_crc INTEGER NOT NULL,
  slot_amount SMALLINT NOT NULL,
  dedup_key BLOB,
  last_error VARCHAR(1024),
  PRIMARY KEY (job_id),
  CONSTRAINT uk_dedup_{n} UNIQUE (biz_id, biz_type, dedup_key)
);
CREATE INDEX IF NOT EXISTS ix_due_{n} ON timeout_task_{n} (status, next_time)
"""

SQLITE_TOPIC = """
CREATE TABLE IF NOT EXISTS timeout_topic (
  name VARCHAR(128) NOT NULL,
  biz_type BIGINT NOT NULL,
  slot_amount SMALLINT NOT NULL,
  topic_type VARCHAR(16) NOT NULL,
  retries SMALLINT NOT NULL,
  backoff VARCHAR(16) NOT NULL,
  backoff_base DOUBLE NOT NULL,
  backoff_cap DOUBLE NOT NULL,
  prepare_timeout INTEGER NOT NULL,
  max_runtime INTEGER NOT NULL,
  horizon INTEGER NOT NULL,
  retention INTEGER NOT NULL,
  paused SMALLINT NOT NULL,
  gmt_create BIGINT NOT NULL,
  gmt_modified BIGINT NOT NULL,
  version INTEGER NOT NULL,
  PRIMARY KEY (name),
  CONSTRAINT uk_biz_type UNIQUE (biz_type)
)
"""


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == "sqlite"
    if 0 in context.config.attributes["tables"]:  # the first database
        context.config.attributes["execute"]([SQLITE_TOPIC if sqlite else MYSQL_TOPIC])
    _each_table(SQLITE_TASK if sqlite else MYSQL_TASK)


def downgrade() -> None:
    _each_table("DROP TABLE IF EXISTS timeout_task_{n}")
    context.config.attributes["execute"](["DROP TABLE IF EXISTS timeout_topic"])


def _each_table(template: str) -> None:
    tables = list(context.config.attributes["tables"])
    for first in range(0, len(tables), BATCH):
        part = tables[first : first + BATCH]
        context.config.attributes["execute"]([template.replace("{n}", f"{n:04d}") for n in part])
        context.config.attributes["migrated"](revision, first + len(part))
