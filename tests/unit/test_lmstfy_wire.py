"""lmstfy's wire: what requests are read as, and the bytes of answers."""

import string

import pytest

from toc.dialects import lmstfy_wire as wire
from toc.dialects.json_fields import to_go_json
from toc.dialects.lmstfy_wire import Call, Query, Refused, Route


def test_names_of_255_characters_are_allowed_and_consumers_may_list_queues() -> None:
    wire.check_names(Route(Call.PUBLISH, "n" * 255, "q" * 255))
    wire.check_names(Route(Call.CONSUME, "ns", ",_a,b," + "q" * 300))
    with pytest.raises(Refused, match="queue name contains"):
        wire.check_names(Route(Call.CONSUME, "ns", "a;b"))


def test_publish_has_the_originals_defaults_and_limits() -> None:
    assert wire.publishing(Query(b"")) == (0, 86_400, 1)
    assert wire.publishing(Query(b"delay=7&ttl=7&tries=65535")) == (7, 7, 65_535)
    assert wire.publishing(Query(b"delay=4294967295&ttl=0&tries=1")) == (4_294_967_295, 0, 1)
    assert wire.publishing(Query(b"delay=007&delay=9")).delay == 7


def test_consume_has_the_originals_defaults_and_lists_queues_in_order() -> None:
    assert wire.consuming("q", Query(b"")) == (["q"], 120, 0, 1)
    assert wire.consuming("b,a,,b", Query(b"ttr=0&timeout=3&count=100&freeze_tries=maybe")) == (
        ["b", "a"],
        0,
        3,
        100,
    )


def test_limits_of_dead_letters_are_signed_64_bit_numbers() -> None:
    assert wire.limit(Query(b"")) == 1
    assert wire.limit(Query(b"limit=%2B9223372036854775807")) == 2**63 - 1
    assert wire.respawn_ttl(Query(b"ttl=-0")) == 0
    for text in (b"0", b"-1", b"", b"9223372036854775808", b"%2B-1", b"--1"):
        with pytest.raises(Refused, match="invalid limit"):
            wire.limit(Query(b"limit=" + text))
    with pytest.raises(Refused, match="invalid ttl"):
        wire.respawn_ttl(Query(b"ttl=-1"))


@pytest.mark.parametrize(
    ("body", "jobs"),
    [
        (b'["a"]', [b'"a"']),
        (b' [ {"b" : 1.50,"a":[ ]} , null,true ] \n', [b'{"b" : 1.50,"a":[ ]}', b"null", b"true"]),
        (b'["\xff\x80", "gr\xc3\xbcn"]', [b'"\xff\x80"', b'"gr\xc3\xbcn"']),
        (b"[" + b"9" * 5000 + b"]", [b"9" * 5000]),
        (b"[" + b"1," * 63 + b"1]", [b"1"] * 64),
        (b'["' + b"x" * (2**20 - 2) + b'"]', [b'"' + b"x" * (2**20 - 2) + b'"']),
    ],
)
def test_jobs_of_a_bulk_are_the_bytes_that_stand_in_the_array(body: bytes, jobs: list[bytes]) -> None:
    assert wire.bulk_jobs(body) == jobs


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        *(
            (body, 400, "request body should be an array of objects")
            for body in (
                b"",
                b"{}",
                b'"a"',
                b"[1",
                b"[1,]",
                b"[,1]",
                b"[1] 2",
                b"[NaN]",
                b"[Infinity]",
                b"[01]",
                b"[1 2]",
                b'["\n"]',
                b"[" * 200_000,
                b"\xff",
                b"]",
            )
        ),
        (b"[]", 400, "no jobs"),
        (b" null ", 400, "no jobs"),
        (b"[" + b"1," * 64 + b"1]", 400, "too many jobs"),
        (b'["' + b"x" * (2**20 - 1) + b'"]', 413, "job too large"),
    ],
)
def test_a_bulk_that_is_no_list_of_jobs_is_refused(body: bytes, status: int, why: str) -> None:
    with pytest.raises(Refused) as refused:
        wire.bulk_jobs(body)
    assert (refused.value.status, refused.value.content) == (status, {"error": why})


def test_attributes_are_headers_with_bounded_keys_and_values() -> None:
    headers = [
        (b"job-attr-flag", b"1"), (b"job-attr-empty", b""), (b"x-other", b"2"), (b"job-attr-flag", b"later"),
        (b"job-attr-" + b"k" * 300, b"v" * 300), (b"job-attr-bytes", b"\xff"),
    ]  # fmt: skip
    found = {"flag": "1", "k" * 32: "v" * 128, "bytes": "\ufffd"}
    assert wire.attributes(headers, versioned=True) == found
    assert wire.attributes(headers, versioned=False) == {}
    with pytest.raises(Refused, match="too many attributes, cannot exceed 16"):
        wire.attributes([(b"job-attr-%d" % number, b"x") for number in range(17)], versioned=True)


def test_a_token_may_name_its_pool_and_a_header_comes_before_the_query() -> None:
    assert wire.token([(b"x-token", b"default:a:b")], Query(b"token=c")) == ("default", "a:b")
    assert wire.token([(b"x-token", b"")], Query(b"token=other%3Ac")) == ("other", "c")
    assert wire.token([], Query(b"")) == ("default", "")


def test_answers_are_written_as_go_writes_them() -> None:
    job = wire.Job("ns", "q", "01J", b"<hi>", 10, 5, 0, {"b": "<&>", "a": "gr\u00fcn\u2028"})
    assert (
        to_go_json(wire.render(job, consumed=True), sort_keys=True)
        == (
            '{"attributes":{"a":"grün\\u2028","b":"\\u003c\\u0026\\u003e"},"data":"PGhpPg==","elapsed_ms":5,'
            '"job_id":"01J","msg":"new job","namespace":"ns","queue":"q","remain_tries":0,"ttl":10}'
        ).encode()
    )
    gone = wire.Job("ns", "q", "01J", None, 0, 5, 0, {})
    assert to_go_json(wire.render(gone), sort_keys=True) == (
        b'{"attributes":null,"data":null,"elapsed_ms":5,"job_id":"01J","namespace":"ns","queue":"q",'
        b'"remain_tries":0,"ttl":0}'
    )
    assert (
        to_go_json({"b": ["q"], "a": []}, sort_keys=True, indent=True)
        == b'{\n    "a": [],\n    "b": [\n        "q"\n    ]\n}'
    )


def test_a_ttl_is_rounded_to_seconds_and_never_looks_endless() -> None:
    assert [wire.seconds_left(at, 1000) for at in (0, 11_000, 10_600, 10_400, 1100, 500)] == [
        0,
        10,
        10,
        9,
        1,
        1,
    ]


def test_job_ids_are_ulids_that_tell_when_they_were_made() -> None:
    now = 1_764_000_000_123
    plain, versioned = wire.new_job_id(now, 7, versioned=False), wire.new_job_id(now, 7, versioned=True)
    assert (len(plain), len(versioned), versioned[0]) == (26, 27, "1")
    assert plain != wire.new_job_id(now, 7, versioned=False)
    assert set(plain) <= set(string.digits + string.ascii_uppercase) - set("ILOU")
    assert wire.made_at(plain) == wire.made_at(versioned) == wire.made_at(plain.lower()) == now
    assert wire.made_at("01ARZ3NDEKTSV4RRFFQ69G5FAV") == 1_469_922_850_259  # of the specification
    assert wire.elapsed(plain, now + 5) == 5
    assert wire.elapsed(plain, now - 5) == wire.elapsed("job", now) == wire.elapsed("U" * 26, now) == 0
