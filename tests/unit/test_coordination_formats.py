"""What is stored in ZooKeeper, and how TOC_ZOOKEEPER is read."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toc.coordination import znodes
from toc.coordination.assignment import Member
from toc.coordination.session import Address
from toc.model.errors import ConfigError, InvalidInput
from toc.model.topic import Slot

MAX_NODE = 1_000_000  # bytes, ZooKeeper's limit


def test_the_assignment_of_the_largest_topic_is_far_from_the_limit_of_a_node() -> None:
    owners: list[str | None] = [
        f"a-host-with-a-long-name-{number % 400}:12345:abcdef" for number in range(1024)
    ]
    assert len(znodes.assignment_data(owners, "h", 0)) < MAX_NODE / 20


@given(
    st.binary()
    | st.sampled_from(
        [b"[]", b"null", b"7", b'{"slots":[99,"x",-5],"workers":["w"]}', b'{"slots":3}', b"[" * 3000]
    )
)
def test_what_somebody_else_wrote_breaks_nothing(data: bytes) -> None:
    assert znodes.decode("t", data) is not None
    assert set(znodes.owners_of("t", data)) <= {None}
    assert znodes.member_of("w", data) is None


@pytest.mark.parametrize("weight", ["1", -1, 0, None, float("inf"), float("nan"), True, 1001, 10**400])
def test_a_member_without_a_sane_weight_is_none(weight: object) -> None:
    data = znodes.member_data(Member("w0", "h"))
    data = data.replace(b'"weight":1', b'"weight":' + json.dumps(weight).encode())
    assert znodes.member_of("w0", data) is None


@pytest.mark.parametrize(("name", "slot"), [
    ("order.close_3", Slot("order.close", 3)), ("a_b_10", Slot("a_b", 10)),
    ("~tables_0", Slot("~tables", 0)), ("order.close", None), ("order.close_x", None), ("_3", None),
    ("order.close_03", None), ("order.close_\u0663", None), ("order.close_1000000", None),
    ("order.close_" + "9" * 5000, None),
])  # fmt: skip
def test_a_slot_is_known_by_its_nodes_name(name: str, slot: Slot | None) -> None:
    assert znodes.slot_of(name) == slot
    assert slot is None or str(slot) == name


@pytest.mark.parametrize("at", [10**17, -1, "now", None, 1e12])
def test_an_instant_that_cannot_be_shown_is_none(at: object) -> None:
    assert znodes.instant({"at": at}, "at") == 0
    assert znodes.instant({"at": 253_402_300_799_999}, "at") == 253_402_300_799_999


def test_a_worker_is_named_after_its_host_whatever_dashes_that_has() -> None:
    assert znodes.host_of("web-1-0-6666c6d2.0bab8c1a") == "web-1"


def test_the_candidate_with_the_lowest_number_leads() -> None:
    assert znodes.first_candidate(["aa-0000000010", "ff-0000000009", "0-0000000011"]) == "ff-0000000009"
    assert znodes.first_candidate([]) == ""


def test_paths_stand_under_the_chroot_and_the_cluster() -> None:
    assert znodes.root_of("/apps", "blue") == "/apps/toc/blue"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a\0b"])
def test_a_name_that_cannot_be_a_nodes_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="cluster"):
        znodes.root_of("", name)


def test_an_address_is_hosts_and_maybe_a_chroot() -> None:
    assert Address.parse("h1:2181,h2:2182") == Address("h1:2181,h2:2182")
    assert Address.parse("h1:2181,h2:2182/a/b/") == Address("h1:2181,h2:2182", "/a/b")
    assert Address.parse("[::1]:2181/") == Address("[::1]:2181")


def test_an_address_may_carry_a_user_whose_password_is_never_shown() -> None:
    address = Address.parse("toc:s%40f/e%2C,@h1:2181/apps")
    assert (address.credential, address.hosts, address.chroot) == ("toc:s@f/e,,", "h1:2181", "/apps")
    assert "s@f" not in repr(address)


def test_an_address_may_ask_for_tls(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    assert Address.parse(f"h1:2182/apps?ca={ca}") == Address("h1:2182", "/apps", tls=True, ca=str(ca))
    assert Address.parse("h1:2182?tls=true").tls


def test_an_at_sign_in_the_path_of_a_file_is_not_the_end_of_a_password(tmp_path: Path) -> None:
    """As in a directory of systemd's credentials, toc-worker@1.service."""
    ca = tmp_path / "toc@1" / "ca.pem"
    ca.parent.mkdir()
    ca.touch()
    assert Address.parse(f"h1:2182?ca={ca}") == Address("h1:2182", tls=True, ca=str(ca))
    named = Address.parse(f"u:p@h1:2182/x?ca={ca}")
    assert (named.credential, named.hosts, named.chroot, named.ca) == ("u:p", "h1:2182", "/x", str(ca))


@pytest.mark.parametrize("text", [
    "", ",", "h1:port", "h1:2181,", "h1:2181//x", "canary@h1:2181", ":canary@h1:2181",
    "u:canary@h1:x", "u:canary@h1:2181?tls=maybe", "u:canary@h1:2181?ca=/nowhere/ca.pem",
    "u:canary@h1:2181?colour=red",
])  # fmt: skip
def test_an_address_that_is_wrong_is_refused_without_showing_its_password(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert "canary" not in str(caught.value)
