"""Over TLS a server must prove who it is, by a CA and by its name, and nothing goes in the clear."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pymysql
import pymysql.cursors
import pytest
from harness import secured
from harness.secured import (
    CANARY,
    SECURED,
    SecuredMariaDB,
    SecuredRedis,
    SecuredZooKeeper,
    Tls,
    migrating,
    zookeeper_url,
)
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB
from toc import Settings, TimeoutCenter, Topic
from toc.coordination.operator import Operator
from toc.index import preflight
from toc.index.queues import Queues
from toc.model.clock import Clock
from toc.model.errors import (
    ConfigError,
    CoordinationUnavailable,
    IndexUnavailable,
    StoreUnavailable,
    TocError,
)
from toc.store.migrate import Migrator
from toc.store.servers import mysql
from toc.store.store import Store

# kazoo leaves a socket whose handshake failed to the garbage collector, which visit_zookeeper calls
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")


class Servers(NamedTuple):
    """One of each, whose certificates are for 127.0.0.1 alone."""

    redis: SecuredRedis
    mariadb: SecuredMariaDB
    zookeeper: SecuredZooKeeper


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    directory = tmp_path_factory.mktemp("tls")
    with (
        SecuredRedis(directory / "redis") as redis,
        SecuredMariaDB(directory / "mariadb") as mariadb,
        SecuredZooKeeper(directory / "zookeeper") as zookeeper,
    ):
        yield Servers(redis, mariadb, zookeeper)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another CA, which has signed none of the servers' certificates."""
    return Tls.make(tmp_path_factory.mktemp("stranger")).ca


def visit_redis(url: str) -> None:
    with closing(Queues(url)) as queues:
        preflight.require_fit(queues)


def visit_mysql(url: str) -> None:
    with closing(Store([url], databases=1, tables=4, clock=Clock())) as store:
        store.topics.list()


def visit_zookeeper(url: str) -> None:
    try:
        with Operator(url, cluster="tls", connect_timeout=1) as operator:
            operator.workers()
    finally:
        gc.collect()


VISITS: dict[str, Callable[[str], None]] = {
    "redis": visit_redis,
    "mariadb": visit_mysql,
    "zookeeper": visit_zookeeper,
}
AWAY = (IndexUnavailable, StoreUnavailable, CoordinationUnavailable)


def refusal(name: str, url: str) -> str:
    """What toc says of a server that it does not trust. A busy machine may need longer to see why."""
    for _ in range(30):
        with pytest.raises(AWAY) as caught:
            VISITS[name](url)
        assert CANARY not in str(caught.value)
        if "no error reported" not in str(caught.value):
            break
    return str(caught.value)


@pytest.fixture(scope="module")
def center(servers: Servers) -> Iterator[TimeoutCenter]:
    """A system with the accounts of deploy/ on these servers."""
    options = {"databases": 1, "tables": 4, "prefix": "toc_tls_"}
    Migrator([migrating(servers.mariadb.url)], **options).upgrade()  # type: ignore[arg-type]
    settings = Settings(
        database_urls=[servers.mariadb.url],
        tables=4,
        database_prefix="toc_tls_",
        redis_url=servers.redis.url,
        zookeeper=servers.zookeeper.url,
        connect_timeout=60,
    )
    with TimeoutCenter(settings) as center:
        center.store.topics.create(Topic("test.sync", 1, 2))
        yield center


@pytest.mark.parametrize("name", VISITS)
def test_a_server_by_another_name_is_refused(servers: Servers, name: str) -> None:
    url = getattr(servers, name).url
    assert "certificate" in refusal(name, url.replace("127.0.0.1", "localhost")).lower()


@pytest.mark.parametrize("name", VISITS)
@pytest.mark.parametrize("rest", ["", "ssl_check_hostname=false"])
def test_a_server_of_another_ca_is_refused(servers: Servers, stranger: Path, name: str, rest: str) -> None:
    if name == "zookeeper" and rest:
        return  # it has no such option: the name is always looked at
    url = getattr(servers, name).url.replace(str(Tls.shared().ca), str(stranger))
    assert "certificate" in refusal(name, f"{url}&{rest}" if rest else url).lower()


def test_a_ca_that_was_renewed_is_read_anew(servers: Servers, stranger: Path, tmp_path: Path) -> None:
    """Of Redis and ZooKeeper each connection reads it."""
    renewed = Path(shutil.copy(stranger, tmp_path))
    url = servers.mariadb.url.replace(str(Tls.shared().ca), str(renewed))
    with closing(Store([url], databases=1, tables=4, clock=Clock())) as store:
        with pytest.raises(StoreUnavailable, match="certificate"):
            store.topics.list()
        renewed.write_bytes(Tls.shared().ca.read_bytes())
        with pytest.raises(TocError, match="toc db upgrade"):  # it lets us in, where there is no schema
            store.topics.list()


@pytest.mark.parametrize(
    ("name", "query"), [("redis", ""), ("mariadb", "?ssl_verify_identity=true"), ("zookeeper", "?tls=true")]
)
def test_without_a_ca_that_is_named_the_systems_count(servers: Servers, name: str, query: str) -> None:
    url = getattr(servers, name).url.partition("?")[0]
    assert "certificate" in refusal(name, url + query).lower()


def test_a_name_is_looked_at_also_where_the_systems_cas_count(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    mysql._context.cache_clear()
    monkeypatch.setenv("SSL_CERT_FILE", str(Tls.shared().ca))  # the system trusts this CA
    url = servers.mariadb.url.partition("?")[0] + "?ssl_verify_identity=true"
    with pytest.raises(TocError, match="toc db upgrade"):  # it lets us in, where there is no schema
        visit_mysql(url)
    assert "certificate" in refusal("mariadb", url.replace("127.0.0.1", "localhost"))


def test_the_name_may_be_waived_and_the_ca_still_counts(servers: Servers) -> None:
    """Its other half is above: with the option, another CA is refused."""

    def waived(url: str) -> str:
        return f"{url}&ssl_check_hostname=false".replace("127.0.0.1", "localhost")

    visit_redis(waived(servers.redis.url))
    with pytest.raises(TocError, match="toc db upgrade"):  # it lets us in, where there is no schema
        visit_mysql(waived(servers.mariadb.url))


@pytest.mark.skipif(SECURED, reason="it wants a server that knows no TLS")
def test_who_names_a_ca_does_not_speak_in_the_clear(mariadb: MariaDB) -> None:
    """The server, or somebody in between, says that it knows no TLS."""
    assert "SSL is required" in refusal("mariadb", f"{mariadb.url}?ssl_ca={Tls.shared().ca}")


def test_passwords_may_hold_any_character(servers: Servers) -> None:
    secret = "p@ß€:/?#%&+ ü"
    login = f"umlaut:{quote(secret, safe='')}"
    servers.redis.call("ACL", "SETUSER", "umlaut", "on", f">{secret}", "~*", "&*", "+@all")
    visit_redis(servers.redis.url.replace(secured.login("toc"), login))
    with as_root(servers.mariadb) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE USER 'umlaut'@'%%' IDENTIFIED BY %s", (secret,))
        cursor.execute("GRANT SELECT ON *.* TO 'umlaut'@'%'")
    with pytest.raises(TocError, match="toc db upgrade"):  # it lets us in, where there is no schema
        visit_mysql(servers.mariadb.url.replace(secured.login("toc"), login))
    with Operator(zookeeper_url(servers.zookeeper, user=login, chroot=""), cluster="umlaut") as operator:
        operator.want("drain", "host-a", by="test")


def as_root(server: SecuredMariaDB, **options: Any) -> pymysql.Connection[pymysql.cursors.Cursor]:
    root = make_url(server.root_url)
    return pymysql.connect(
        host="127.0.0.1", port=server.port, user="root", password=str(root.password), **options
    )


def test_a_ca_that_cannot_be_read_is_a_setting_that_is_wrong(servers: Servers, tmp_path: Path) -> None:
    """Not a server that is away, which would be waited for."""
    nonsense = tmp_path / "ca.pem"
    nonsense.write_text("not a certificate")
    ca = str(Tls.shared().ca)
    for name, visit in VISITS.items():
        url = getattr(servers, name).url
        with pytest.raises(ConfigError, match="/nowhere/ca") as caught:
            visit(url.replace(ca, "/nowhere/ca"))
        assert CANARY not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        visit_mysql(servers.mariadb.url.replace(ca, str(nonsense)))
    with pytest.raises(CoordinationUnavailable, match="NO_CERTIFICATE"):
        visit_zookeeper(servers.zookeeper.url.replace(ca, str(nonsense)))
