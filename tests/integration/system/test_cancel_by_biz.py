"""Cancels that meet trouble: of thousands of tasks in one call, and of a topic that is not known yet."""

from __future__ import annotations

from collections import Counter

import pytest
from fault.kit.proxy import Proxy
from harness import secured
from harness.schema import make_tables
from harness.system import System
from sqlalchemy.engine import make_url

from toc import CancelOutcome, NewTask, Settings, TimeoutCenter
from toc.dev.local.servers import MariaDB, RedisServer
from toc.index.messages import Peek
from toc.model.errors import PartialCancel
from toc.model.sharding import BizId
from toc.operate import admin

COUNT = 1200


@pytest.mark.skipif(secured.SECURED, reason="a proxy that eats replies must read along")
def test_a_cancel_by_biz_takes_few_round_trips_and_carries_its_outcomes_when_it_breaks_off(
    system: System, mariadb: MariaDB
) -> None:
    system.create_topics()
    center = system.center
    ids = center.submit_many([NewTask("test.sync", 42, 1800.0) for _ in range(COUNT)])
    other = center.submit("test.batch", biz_id=42, delay=1800)
    center.store.finish([(ids[0], 0)])
    with Proxy(mariadb.port) as proxy:
        url = make_url(mariadb.url).set(port=proxy.port).update_query_dict({"ssl_disabled": "true"})
        urls = [url.render_as_string(hide_password=False)]
        with TimeoutCenter(system.settings.model_copy(update={"database_urls": urls})) as through:
            through.get(ids[0])
            proxy.eat(b"%d" % sorted(ids)[600], refuse=True)  # in the second of three batches
            with pytest.raises(PartialCancel) as caught:
                through.cancel_by_biz("test.sync", biz_id=42)
            proxy.accept()
            assert len(caught.value.outcomes) == 500
            assert sorted([*caught.value.outcomes, *caught.value.unknown]) == sorted(ids)
            before = proxy.stats.requests
            outcomes = through.cancel_by_biz("test.sync", biz_id=42)
            assert proxy.stats.requests - before < 20
    assert Counter(outcomes.values()) == {CancelOutcome.CANCELLED: COUNT - 1, CancelOutcome.TOO_LATE: 1}
    assert outcomes.keys() == set(ids)
    assert {outcomes[job_id] for job_id in caught.value.outcomes} == set(caught.value.outcomes.values())
    slot = center.catalog.get("test.sync").slot(system.row(ids[0]).slot_crc)
    peek = center.queues.peek([slot])[slot]
    assert isinstance(peek, Peek)
    assert peek.store == 1  # of what was processed by hand: the others were taken out
    assert system.row(other).status == 0


@pytest.mark.skipif(secured.SECURED, reason="a proxy must be able to hang up")
def test_a_cancel_answers_although_its_topic_is_not_known_here_and_the_topic_table_is_away(
    mariadb: MariaDB, clean_redis: RedisServer, database_prefix: str
) -> None:
    with Proxy(mariadb.port) as proxy:
        first = make_url(mariadb.url).set(port=proxy.port).update_query_dict({"ssl_disabled": "true"})
        settings = Settings(
            database_urls=[first.render_as_string(hide_password=False), mariadb.url],
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
