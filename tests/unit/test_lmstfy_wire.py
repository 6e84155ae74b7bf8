"""lmstfy's wire: what requests are read as, and the bytes of answers."""

import string
import tracemalloc

import pytest

from toc.dialects import lmstfy_wire as wire
from toc.dialects.lmstfy_wire import Refused


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


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
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
    ],
)  # fmt: skip
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
    assert wire.elapsed(plain, now + 5) == 5
    assert wire.elapsed(plain, now - 5) == wire.elapsed("job", now) == wire.elapsed("U" * 26, now) == 0


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
