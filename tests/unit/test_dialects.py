"""What dialects decide without a server: names, words, who may use a port; the bytes of lmstfy's wire."""

import asyncio
import string
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toc.dialects import lmstfy_wire as wire
from toc.dialects import port, redis_delayed
from toc.dialects.delay_task import ADD, DelayTask, SecondFull
from toc.dialects.dialect_tasks import DialectTasks, key_for, topic_for
from toc.dialects.lmstfy_wire import Refused
from toc.dialects.lmstfy_wire import template_of as lmstfy_template
from toc.dialects.port import Guard, Request
from toc.dialects.process import DIALECTS
from toc.gateway.exchange import CURRENT
from toc.model.errors import InvalidTopic, StoreUnavailable, TaskExists
from toc.model.sharding import BizId
from toc.model.task import NewTask
from toc.model.topic import OF_DIALECTS, check_native, check_topic_name

# What dialects decide without a server: names, words, and who may use a port.


@given(st.lists(st.text(min_size=1), unique=True, max_size=20))
def test_every_name_has_a_topic_of_its_own(names: list[str]) -> None:
    topics = [topic_for(name, "p.") for name in names]
    assert len(set(topics)) == len(topics)
    for topic in topics:
        check_topic_name(topic)
        assert topic.startswith("p.")


def test_a_name_that_fits_stays_and_any_other_is_hashed() -> None:
    assert topic_for("order.close", "youzan.") == "youzan.order.close"
    for name in ("订单", "a b", "", "x" * 128, "a/b", "h-" + "0" * 32):
        assert topic_for(name, "youzan.").startswith("youzan.h-")
    assert topic_for("h-shop", "youzan.") == "youzan.h-shop"
    assert topic_for("-a", "p.") == "p.-a"
    assert topic_for("-a").startswith("h-")


def test_the_topics_of_dialects_are_those_that_native_doors_refuse() -> None:
    patterns = [template.pattern for dialect in DIALECTS.values() for template in dialect.templates]
    patterns += [lmstfy_template(name).pattern for name in ("ns", "n" * 255, "youzan")]
    assert {pattern.partition(".")[0] for pattern in patterns} == OF_DIALECTS
    for pattern in patterns:
        with pytest.raises(InvalidTopic):
            check_native(pattern.replace("*", "x"))
    for name in ("youzan", "youzans.x", "x.youzan.", "lmstfy-.x"):
        check_native(name)


def test_a_template_of_a_dialect_makes_a_hundred_topics_of_four_slots() -> None:
    templates = [template for dialect in DIALECTS.values() for template in dialect.templates]
    for template in (*templates, lmstfy_template("ns")):
        assert (template.most_topics, template.topic("t", 1).slot_amount) == (100, 4), template


@given(st.lists(st.text(min_size=1, max_size=60), unique=True, max_size=20))
def test_every_id_has_a_key_of_its_own_that_a_task_may_have(texts: list[str]) -> None:
    keys = [key_for(text) for text in texts]
    assert len(set(keys)) == len(keys)
    for key in keys:
        BizId.of(key)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_not_understood(data: bytes) -> None:
    with suppress(port.NotUnderstood):
        assert isinstance(port.parsed(data), dict)


async def _nothing(*_: object) -> None:
    return None


def test_a_task_too_many_in_a_second_is_refused_with_a_reason_of_its_own() -> None:
    async def taken(_: NewTask) -> None:
        raise TaskExists("taken")

    async def parsed(_: bytes, parse: Callable[[], object]) -> object:
        return parse()

    dialect = DelayTask(
        cast(
            "Any",
            SimpleNamespace(parsed=parsed, center=SimpleNamespace(settings=SimpleNamespace(max_body=1))),
        )
    )
    dialect.tasks = cast("Any", SimpleNamespace(prefix="delay-task:", make_topic=_nothing, put=taken))
    request = Request("POST", ADD, b"", [], b'{"topic":"t","timing_moment":2000000000,"content":"{}"}')
    with pytest.raises(SecondFull) as full:
        asyncio.run(dialect.answer(request))
    answer = '{"dm_error":1,"error_msg":"%s","task_id":0}'
    assert dialect.failed(request, full.value).content.decode() == answer % "同一秒到期的任务太多"
    assert dialect.failed(request, StoreUnavailable("x")).content.decode() == answer % "系统繁忙"


GUARD = Guard([ip_network("10.0.0.0/8"), ip_network("fd00::/8")], ["Queue.Example"])


def refuses(client: str | None, *headers: tuple[str, str], browsers: bool = False) -> str | None:
    scope = {
        "client": None if client is None else (client, 1),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }
    return GUARD.refuses(scope, browsers=browsers)


@pytest.mark.parametrize(
    ("allowed", "clients"),
    [
        (True, ["127.0.0.1", "127.8.8.8", "::1", "::ffff:10.1.2.3", "10.255.0.1", "fd00::1"]),
        (False, ["11.0.0.1", "192.168.0.1", "::ffff:11.0.0.1", "fe80::1", None]),
    ],
)
def test_only_who_is_near_may_ask(clients: list[str | None], *, allowed: bool) -> None:
    for client in clients:
        assert (refuses(client) is None) == allowed, client
        assert (refuses(client, browsers=True) is None) == allowed, client


@pytest.mark.parametrize(
    ("own", "hosts"),
    [
        (True, ["localhost", "LOCALHOST:9277", "localhost.", "queue.example:1", "127.0.0.1", "[::1]:9277"]),
        (False, ["evil.example", "", "localhost.evil.example", "evil@localhost", "[::1", "127.1", "0x7f.1"]),
    ],
)
def test_a_port_is_asked_by_its_own_names_only(hosts: list[str], *, own: bool) -> None:
    for host in hosts:
        assert (refuses("127.0.0.1", ("host", host)) is None) == own, host
    assert refuses("127.0.0.1", ("host", "localhost"), ("host", "localhost")) is not None


@pytest.mark.parametrize("header", [
    ("origin", "http://127.0.0.1:9277"),
    ("origin", "null"),
    *(("sec-fetch-site", text) for text in ("cross-site", "same-site", "nonsense")),
    ("accept", "image/avif,image/webp,image/apng,image/svg+xml,image/*,*/*;q=0.8"),
    ("accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"),
    *(("accept", text) for text in ("text/css,*/*;q=0.1", "TEXT/HTML")),
    ("user-agent", "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"),
])  # fmt: skip
def test_what_a_page_may_have_sent_is_refused(header: tuple[str, str]) -> None:
    assert refuses("127.0.0.1", header) is not None
    assert refuses("127.0.0.1", header, browsers=True) is None


@pytest.mark.parametrize("header", [
    *(("accept", text) for text in ("*/*", "application/json, text/plain, */*")),
    ("accept", "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2"),  # Java's HttpURLConnection
    *(("user-agent", text) for text in ("Java/17.0.9", "Go-http-client/1.1", "GuzzleHttp/7")),
    ("user-agent", "Mozilla/5.0 (Windows NT; Windows NT 10.0; en-US) WindowsPowerShell/5.1.22621.963"),
    ("accept-language", "*"),  # Node's fetch
    ("sec-fetch-mode", "cors"),
    ("sec-fetch-site", "none"),
])  # fmt: skip
def test_what_clients_send_by_default_is_let_in(header: tuple[str, str]) -> None:
    assert refuses("127.0.0.1", header) is None


def test_only_a_pull_that_waits_takes_a_place_among_those_that_wait() -> None:
    """Else pops that wait would keep pushes out."""
    places: list[str] = []

    @contextmanager
    def place() -> Iterator[None]:
        places.append("taken")
        yield
        places.append("given back")

    async def pull(wait: float) -> None:
        CURRENT.set(SimpleNamespace(waiting=place))  # type: ignore[arg-type]
        catalog = SimpleNamespace(known=dict)
        service: Any = SimpleNamespace(center=SimpleNamespace(catalog=catalog), pulls=None, stopping=True)
        assert await DialectTasks(service, "youzan", []).pull(["youzan.t"], 1.0, wait=wait) == []

    asyncio.run(pull(0.0))
    assert places == []
    asyncio.run(pull(60.0))
    assert places == ["taken", "given back"]


FORM = [(b"content-type", b"application/x-www-form-urlencoded")]


@given(text=st.text(), fill=st.integers(0, 7))
def test_a_form_is_read_as_it_was_encoded_wherever_it_is_cut(text: str, fill: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_delayed, "PIECE_BYTES", 4)
        body = urlencode({"id": "x" * fill + text, text: "%%4 +&="}).encode()
        found = redis_delayed._fields(Request("POST", "/delay/add", b"id=", FORM, body))
    assert found == {text: "%%4 +&=", "id": ""}


def test_a_form_of_escapes_takes_little_memory() -> None:
    body = b"message=" + b"%41" * (2 << 20)
    tracemalloc.start()
    try:
        found = redis_delayed._fields(Request("POST", "/delay/add", b"", FORM, body))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == {"message": "A" * (2 << 20)}
    assert most < 40 << 20, "an object for each byte takes 150 MiB"


# lmstfy's wire: what requests are read as, and the bytes of answers.


@pytest.mark.parametrize(("body", "jobs"), [
    (b'["a"]', [b'"a"']),
    (b' [ {"b" : 1.50,"a":[ ]} , null,true ] \n', [b'{"b" : 1.50,"a":[ ]}', b"null", b"true"]),
    (b'["\xff\x80", "gr\xc3\xbcn"]', [b'"\xff\x80"', b'"gr\xc3\xbcn"']),
    (b"[" + b"9" * 5000 + b"]", [b"9" * 5000]),
    (b"[" + b"1," * 63 + b"1]", [b"1"] * 64),
    (b'["' + b"x" * (2**20 - 2) + b'"]', [b'"' + b"x" * (2**20 - 2) + b'"']),
])  # fmt: skip
def test_jobs_of_a_bulk_are_the_bytes_that_stand_in_the_array(body: bytes, jobs: list[bytes]) -> None:
    assert wire.bulk_jobs(body) == jobs


@pytest.mark.parametrize(("body", "status", "why"), [
    *(
        (body, 400, "request body should be an array of objects")
        for body in (
            b"", b"{}", b'"a"', b"[1", b"[1,]", b"[,1]", b"[1] 2", b"[NaN]", b"[Infinity]", b"[01]",
            b"[1 2]", b'["\n"]', b"[" * 200_000, b"\xff", b"]",
        )
    ),
    (b"[]", 400, "no jobs"),
    (b" null ", 400, "no jobs"),
    (b"[" + b"1," * 64 + b"1]", 400, "too many jobs"),
    (b'["' + b"x" * (2**20 - 1) + b'"]', 413, "job too large"),
    (b"[[" + b"[]," * 2**19 + b"[]]]", 413, "job too large"),
    (b"[" + b"9" * (2**20 + 1) + b"]", 413, "job too large"),
    (b"[" + b"1," * 64 + b"wrong, but one too many", 400, "too many jobs"),
    (b"[" + b"[" * 65 + b"]" * 65 + b"]", 400, "request body should be an array of objects"),
])  # fmt: skip
def test_a_bulk_that_is_no_list_of_jobs_is_refused(body: bytes, status: int, why: str) -> None:
    with pytest.raises(Refused) as refused:
        wire.bulk_jobs(body)
    assert (refused.value.status, refused.value.content) == (status, {"error": why})


def test_a_ttl_is_rounded_to_seconds_and_never_looks_endless() -> None:
    assert [wire.seconds_left(at, 1000) for at in (0, 11_000, 10_600, 10_400, 1100, 500)] == [
        0, 10, 10, 9, 1, 1,
    ]  # fmt: skip


def test_job_ids_are_ulids_that_tell_when_they_were_made() -> None:
    now = 1_764_000_000_123
    plain, versioned = wire.new_job_id(now, 7, versioned=False), wire.new_job_id(now, 7, versioned=True)
    assert (len(plain), len(versioned), versioned[0]) == (26, 27, "1")
    assert plain != wire.new_job_id(now, 7, versioned=False)
    assert set(plain) <= set(string.digits + string.ascii_uppercase) - set("ILOU")
    assert wire.made_at(plain) == wire.made_at(versioned) == wire.made_at(plain.lower()) == now
    assert wire.made_at("01ARZ3NDEKTSV4RRFFQ69G5FAV") == 1_469_922_850_259  # of the specification
    assert wire.made_at("job") == wire.made_at("U" * 26) == 0


def test_a_bulk_of_too_much_is_refused_before_it_is_built() -> None:
    tracemalloc.start()
    try:
        for body in (b"[[" + b"[]," * (5 << 20) + b"[]]]", b"[" + b"11," * (5 << 20) + b"1]"):
            with pytest.raises(Refused):
                wire.bulk_jobs(body)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 80 << 20, "the lists of 16 MiB take 300"
