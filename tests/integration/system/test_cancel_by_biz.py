"""Cancels that meet trouble: of thousands of tasks in one call, and of a topic that is not known yet."""

from __future__ import annotations

import pytest
from fault.kit.proxy import Proxy, through
from harness import secured
from harness.schema import make_tables

from benchmarks.local import MariaDB, RedisServer
from toc import CancelOutcome, Settings, TimeoutCenter
from toc.model.sharding import BizId
from toc.operate import admin


@pytest.mark.skipif(secured.SECURED, reason="a proxy must be able to hang up")
def test_a_cancel_answers_although_its_topic_is_not_known_here_and_the_topic_table_is_away(
    mariadb: MariaDB, clean_redis: RedisServer, database_prefix: str
) -> None:
    with Proxy(mariadb.port) as proxy:
        settings = Settings(
            database_urls=[through(proxy, mariadb.url), mariadb.url],
            databases=2,
            tables=2,
            database_prefix=database_prefix,
            redis_url=clean_redis.url,
            connect_timeout=0.5,
        )
        make_tables(settings)
        with TimeoutCenter(settings) as one, TimeoutCenter(settings) as other:
            admin.create_topic(one, "known", biz_type=1, slot_amount=2)
            assert other.get(one.submit("known", biz_id=1, delay=1800)) is not None
            admin.create_topic(one, "later", biz_type=2, slot_amount=2)
            on_second = next(biz for biz in range(100) if BizId.of(biz).crc % 2)
            job_id = one.submit("later", biz_id=on_second, delay=1800)
            proxy.refuse()
            assert other.cancel(job_id) is CancelOutcome.CANCELLED
            proxy.accept()
