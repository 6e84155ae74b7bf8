"""Servers that a system reaches as it should in production: over TLS, with the accounts of deploy/ alone.

With ``TOC_TEST_SECURED=1`` the servers that tests share are such ones, so that a whole suite runs under them:
``url`` is then what toc is given; what a test itself does to a server goes by an administrator's account.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import hashlib
import ipaddress
import os
import shutil
import socket
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast
from urllib.parse import quote

import pymysql
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from kazoo.client import KazooClient  # type: ignore[import-untyped]  # it ships no types
from sqlalchemy.engine import make_url

from benchmarks.local import MariaDB, RedisCluster, RedisServer, ZooKeeper, _ClusterNode
from benchmarks.resp import Reply, ask

SECURED = os.environ.get("TOC_TEST_SECURED") == "1"
DEPLOY = Path(__file__).parents[2] / "deploy"
CANARY = "c@nary:/?#%&"
"""Part of every password: what must not be in any log, and what a URL must encode."""
PASSWORDS = {name: f"{CANARY}{name}" for name in ("toc", "toc_migrate", "admin", "replica")}


AnyServer = TypeVar("AnyServer", RedisServer, RedisCluster, MariaDB, ZooKeeper)


def login(name: str) -> str:
    """``user:password`` as a URL wants it."""
    return f"{name}:{quote(PASSWORDS[name], safe='')}"


def acl_lines(text: str | None = None) -> list[str]:
    """redis-acl.conf with the hashes of PASSWORDS."""
    lines = []
    for line in (text or (DEPLOY / "redis-acl.conf").read_text()).splitlines():
        if line and not line.startswith("#"):
            for name, password in PASSWORDS.items():
                digest = hashlib.sha256(password.encode()).hexdigest()
                line = line.replace(f"#{name.upper()}_SHA256", f"#{digest}")
            lines.append(line)
    return lines


def grants() -> list[str]:
    """The statements of mysql-grants.sql; its pattern covers the databases of tests."""
    lines = (DEPLOY / "mysql-grants.sql").read_text().splitlines()
    script = "\n".join(line for line in lines if not line.startswith("--"))
    return [statement for statement in script.split(";") if statement.strip()]


@dataclass(frozen=True)
class Tls:
    """Files in PEM: a CA, and the certificate and key of a server at 127.0.0.1 that it vouches for."""

    ca: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, directory: Path, *, days: int = 1) -> Tls:
        """Make them anew; the server's certificate ends so many days from now."""
        now = datetime.datetime.now(datetime.UTC)
        keys = [rsa.generate_private_key(65537, 2048) for _ in range(2)]
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("CA", "server")]
        paths = []
        for number, (name, key) in enumerate(zip(names, keys, strict=True)):
            builder = (
                x509.CertificateBuilder()
                .subject_name(name)
                .issuer_name(names[0])
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - datetime.timedelta(days=9))
                .not_valid_after(now + datetime.timedelta(days=days if number else 9))
                .add_extension(x509.BasicConstraints(ca=number == 0, path_length=None), critical=True)
            )
            if number:
                address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
                builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
            paths.append(directory / f"{name.rfc4514_string()[3:]}.pem")
            certificate = builder.sign(keys[0], hashes.SHA256())
            paths[-1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        secret = directory / "key.pem"
        secret.write_bytes(
            keys[1].private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cls(paths[0], paths[1], secret)

    @classmethod
    @functools.cache
    def shared(cls) -> Tls:
        """Those of this run."""
        directory = Path(tempfile.mkdtemp(prefix="toc-tls-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        return cls.make(directory)


class SecuredRedis(RedisServer):
    """TLS on its only port, and the accounts of redis-acl.conf. ``call`` is the administrator's."""

    @property
    def url(self) -> str:
        """As the account ``toc``."""
        return f"rediss://{login('toc')}@127.0.0.1:{self.port}/0?ssl_ca_certs={Tls.shared().ca}"

    @property
    def admin_url(self) -> str:
        """As the account ``admin``."""
        return self.url.replace(login("toc"), login("admin"))

    def call(self, *words: str | int) -> Reply:
        """Send one command as the administrator."""
        context = ssl.create_default_context(cafile=Tls.shared().ca)
        with (
            socket.create_connection(("127.0.0.1", self.port), 5) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            connection.makefile("rwb") as stream,
        ):
            ask(stream, "AUTH", "admin", PASSWORDS["admin"])
            return ask(stream, *words)

    def _prepare(self) -> list[str | Path]:
        tls, given = Tls.shared(), self.config
        self.config = [
            *given, "port 0", f"tls-port {self.port}", f"tls-cert-file {tls.certificate}",
            f"tls-key-file {tls.key}", f"tls-ca-cert-file {tls.ca}", "tls-auth-clients no",
            *acl_lines(),
        ]  # fmt: skip
        try:
            return super()._prepare()
        finally:
            self.config = given


class _SecuredNode(SecuredRedis, _ClusterNode):
    """A node of a SecuredCluster."""


class SecuredCluster(RedisCluster):
    """Masters that speak TLS with clients and with each other."""

    def __init__(self, directory: Path, *, size: int = 3) -> None:
        super().__init__(directory, size=size)
        config = [
            "cluster-enabled yes",
            "cluster-node-timeout 2000",
            "tls-cluster yes",
            "tls-replication yes",
        ]
        self.nodes = [_SecuredNode(directory / str(n), config=config) for n in range(size)]

    @property
    def url(self) -> str:
        """As the account ``toc``."""
        nodes = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"rediss+cluster://{login('toc')}@{nodes}?ssl_ca_certs={Tls.shared().ca}"


class SecuredMariaDB(MariaDB):
    """It knows the accounts of mysql-grants.sql, and lets them in over TLS alone."""

    def __init__(self, directory: Path, *, config: Sequence[str] = (), **options: Any) -> None:
        tls = Tls.shared()
        lines = [f"ssl_cert={tls.certificate}", f"ssl_key={tls.key}", f"ssl_ca={tls.ca}"]
        lines += ["require_secure_transport=ON"]
        super().__init__(directory, config=[*config, *lines], **options)

    @property
    def url(self) -> str:
        """As the account ``toc``."""
        return f"mysql+pymysql://{login('toc')}@127.0.0.1:{self.port}?ssl_ca={Tls.shared().ca}"

    @property
    def root_url(self) -> str:
        """As root, over TLS as well: the driver offers it, and the server wants it."""
        return super().url

    def start(self) -> Self:
        """Start, and make the accounts when they are not there."""
        super().start()
        root = make_url(self.root_url)
        connection = pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", password=str(root.password), autocommit=True
        )
        with connection, connection.cursor() as cursor:
            for name in ("toc", "toc_migrate"):
                statement = f"CREATE USER IF NOT EXISTS '{name}'@'%%' IDENTIFIED BY %s REQUIRE SSL"
                cursor.execute(statement, (PASSWORDS[name],))
            for statement in grants():
                cursor.execute(statement)
        return self


class SecuredZooKeeper(ZooKeeper):
    """It speaks TLS alone. ``url`` names an account, whose nodes are nobody else's."""

    @property
    def url(self) -> str:
        """As ``toc``."""
        return f"{login('toc')}@127.0.0.1:{self.port}?tls=true&ca={Tls.shared().ca}"

    def _prepare(self) -> list[str | Path]:
        tls = Tls.shared()
        pem = self._write("both.pem", [tls.key.read_text() + tls.certificate.read_text()])
        java, *rest, conf = super()._prepare()
        lines = Path(conf).read_text().replace("clientPort", "secureClientPort").splitlines()
        lines += [
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.type=PEM",
            f"ssl.keyStore.location={pem}",
            "ssl.trustStore.type=PEM",
            f"ssl.trustStore.location={tls.ca}",
            "ssl.clientAuth=none",
        ]
        path = rest.index("-cp") + 1
        # what Netty needs and the manifest of Debian's package leaves out
        rest[path] = ":".join([str(rest[path]), *map(str, Path("/usr/share/java").glob("netty-*.jar"))])
        return [java, *rest, self._write("zoo.cfg", lines)]

    def _say(self) -> bytes:
        context = ssl.create_default_context(cafile=Tls.shared().ca)
        try:
            with (
                socket.create_connection(("127.0.0.1", self.port), timeout=5) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
            ):
                connection.sendall(b"srvr")
                return connection.recv(9)
        except OSError:
            return b""


def redis_server(directory: Path, **options: Any) -> RedisServer:
    """A Redis for a system under test; it is the caller's to start."""
    return SecuredRedis(directory, **options) if SECURED else RedisServer(directory, **options)


def redis_cluster(directory: Path) -> RedisCluster:
    """A Redis Cluster for systems under test."""
    return SecuredCluster(directory) if SECURED else RedisCluster(directory)


def mariadb(directory: Path) -> MariaDB:
    """A MariaDB for systems under test."""
    return SecuredMariaDB(directory) if SECURED else MariaDB(directory)


def zookeeper(directory: Path) -> ZooKeeper:
    """A ZooKeeper for systems under test."""
    return SecuredZooKeeper(directory) if SECURED else ZooKeeper(directory)


def migrating(url: str) -> str:
    """The URL with the account that may change the schema, where there is one of its own."""
    return url.replace(f"{login('toc')}@", f"{login('toc_migrate')}@")


def root_url(server: MariaDB) -> str:
    """The URL of the administrator of a database server."""
    return server.root_url if isinstance(server, SecuredMariaDB) else server.url


def admin_url(server: RedisServer) -> str:
    """The URL of the administrator of a Redis."""
    return server.admin_url if isinstance(server, SecuredRedis) else server.url


def zookeeper_client(server: ZooKeeper) -> KazooClient:
    """A client of the test's own, not yet started, that sees toc's nodes."""
    if not isinstance(server, SecuredZooKeeper):
        return KazooClient(server.url)
    return KazooClient(
        f"127.0.0.1:{server.port}",
        auth_data=[("digest", f"toc:{PASSWORDS['toc']}")],
        use_ssl=True,
        ca=str(Tls.shared().ca),
        check_hostname=True,
    )


def zookeeper_url(server: ZooKeeper, *, chroot: str, user: str | None = None) -> str:
    """Its URL with a chroot, and with another ``user:password`` or, with "", none."""
    place, question, query = server.url.partition("?")
    login, at, hosts = place.rpartition("@")
    if user is not None:
        login, at = user, "@" if user else ""
    return f"{login}{at}{hosts}{chroot}{question}{query}"


def kind(plain: type[AnyServer]) -> type[AnyServer]:
    """What to ``launch`` for a system under test."""
    return cast("type[AnyServer]", _KINDS[plain]) if SECURED else plain


_KINDS: dict[type[Any], type[Any]] = {
    RedisServer: SecuredRedis,
    RedisCluster: SecuredCluster,
    MariaDB: SecuredMariaDB,
    ZooKeeper: SecuredZooKeeper,
}
