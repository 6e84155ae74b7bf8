"""The shop's own tables. Nothing here knows of toc.

ORDERS_DATABASE_URL names the database; by default it is the server of toc's task table, so that an order and
its deadline can be written in one transaction.
"""

from __future__ import annotations

import os
from functools import cache

from sqlalchemy import BigInteger, Column, Engine, Integer, MetaData, String, Table, create_engine

from toc import Settings

metadata = MetaData()

_ID = BigInteger().with_variant(Integer(), "sqlite")

orders = Table(
    "orders",
    metadata,
    Column("order_id", _ID, primary_key=True, autoincrement=False),
    # placed -> paying -> paid -> delivered -> confirmed; placed -> closed
    Column("state", String(16), nullable=False),
)

members = Table(
    "members",
    metadata,
    Column("member_id", String(64), primary_key=True),
    # seconds since 1970 UTC
    Column("expires_at", BigInteger, nullable=False),
    # the pending reminder's task
    Column("reminder", BigInteger),
)

# What was sent to whom. The key makes sending twice harmless: a second row with it is refused.
messages = Table(
    "messages",
    metadata,
    Column("message_key", String(128), primary_key=True),
    Column("member_id", String(64), nullable=False),
    Column("text", String(255), nullable=False),
)


@cache
def engine() -> Engine:
    """The connections to the shop's database."""
    return create_engine(os.environ.get("ORDERS_DATABASE_URL") or Settings().need_database_urls()[0])


def create_tables() -> None:
    """Create the tables that are missing."""
    metadata.create_all(engine())
