"""Which server holds which database and table, and what is refused."""

from __future__ import annotations

import pytest

from toc.model.clock import Clock
from toc.model.errors import ConfigError
from toc.store.servers.shards import Layout
from toc.store.store import Store

ONE, TWO = "mysql+pymysql://u:s3cret@h1:3306", "mysql+pymysql://u:s3cret@h2"


def test_servers_take_blocks_of_databases_in_order() -> None:
    layout = Layout([ONE, TWO], 8, 1024, "toc_")
    assert [list(layout.databases_of(server)) for server in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(layout.tables_of(3))[:3] == [3, 11, 19]
    assert len(layout.tables_of(3)) == 128
    assert layout.database_name(7) == "toc_7"


def test_every_table_belongs_to_one_server() -> None:
    store = Store([ONE, TWO], databases=8, tables=64, clock=Clock())
    first, second = store.tables_of_server()
    assert sorted(first + second) == list(range(64))
    assert {table % 8 for table in first} == {0, 1, 2, 3}
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "u:s3cret@h",
        "mysql+pymysql://u:s3cret@h:port",
        ONE + "?ssl_cq=x",
        ONE + "?ssl_verify_identity=ture",
        ONE + "?ssl_ca=/nowhere/ca.pem",
        ONE + "?ssl_disabled=true&ssl_disabled=false",
        "mysql+pymysql://u:pw@s3cret@h",
    ],
)
def test_a_url_that_no_server_can_have_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Store([url], databases=1, tables=4, clock=Clock())
    assert "s3cret" not in str(caught.value)


def test_nothing_connects_before_it_is_used() -> None:
    store = Store(["mysql+pymysql://u:s3cret@127.0.0.1:1"], databases=1, tables=4, clock=Clock())
    store.close()
