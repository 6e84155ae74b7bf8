"""The assignment of slots: what holds for any members, topics, intents and history."""

import random
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toc.coordination.assignment import TABLES, Member, Owners, Spread, assign

TOPIC_NAMES = ["order.close", "order.remind", "parcel.confirm", "trial.end", TABLES]
HOSTS = ["h0", "h1", "h2", "h3"]

slot_amounts = st.sampled_from([1, 2, 4, 8, 16])
spreads = st.sampled_from([Spread(), Spread(4, 4), Spread(8, 2)])
topic_tables = st.dictionaries(st.sampled_from(TOPIC_NAMES), slot_amounts, min_size=1)


@st.composite
def member_lists(draw: st.DrawFn, *, alike: bool = False, min_size: int = 0) -> list[Member]:
    numbers = draw(st.sets(st.integers(0, 15), min_size=min_size, max_size=9))
    weights = st.just(1.0) if alike else st.sampled_from([0.5, 1.0, 2.0, 3.0])
    handled = st.none() if alike else st.none() | st.frozensets(st.sampled_from(TOPIC_NAMES))
    return [
        Member(f"w{number:02}", draw(st.sampled_from(HOSTS)), draw(weights), draw(handled))
        for number in sorted(numbers)
    ]


@st.composite
def histories(draw: st.DrawFn, topics: dict[str, int]) -> dict[str, list[str | None]]:
    """What may have been before: shorter or longer, of workers that are there and that are not."""
    owners = st.none() | st.integers(0, 17).map(lambda number: f"w{number:02}")
    return {
        topic: draw(st.lists(owners, max_size=2 * slots))
        for topic, slots in topics.items()
        if draw(st.booleans())
    }


def moves(before: Owners, after: Owners) -> list[tuple[str | None, str | None]]:
    return [
        (old, new)
        for topic, slots in after.items()
        for old, new in zip(before[topic], slots, strict=True)
        if old != new
    ]


def loads(owners: Owners) -> Counter[str]:
    return Counter(owner for slots in owners.values() for owner in slots if owner is not None)


def spread(members: list[Member], owners: Owners, topic: str) -> int:
    counts = Counter(owners[topic])
    return max(counts[m.worker_id] for m in members) - min(counts[m.worker_id] for m in members)


@given(st.data())
def test_a_slot_is_without_owner_only_if_nobody_may_have_it_and_goes_to_who_may(data: st.DataObject) -> None:
    topics = data.draw(topic_tables)
    members = data.draw(member_lists())
    drained = data.draw(st.sets(st.sampled_from(HOSTS)))
    owners = assign(members, topics, previous=data.draw(histories(topics)), drained_hosts=drained)
    assert {topic: len(slots) for topic, slots in owners.items()} == topics
    for topic, slots in owners.items():
        may: set[str | None] = {m.worker_id for m in members if m.can_handle(topic) and m.host not in drained}
        assert set(slots) <= (may or {None})


@given(st.data())
def test_a_pin_holds_while_its_target_may_have_the_slot(data: st.DataObject) -> None:
    topics = data.draw(topic_tables)
    members = data.draw(member_lists())
    drained = data.draw(st.sets(st.sampled_from(HOSTS), max_size=2))
    targets = [*HOSTS, *(member.worker_id for member in members), "gone"]
    pins = data.draw(
        st.dictionaries(st.tuples(st.sampled_from(TOPIC_NAMES), st.integers(0, 20)), st.sampled_from(targets))
    )
    owners = assign(members, topics, previous=data.draw(histories(topics)), pins=pins, drained_hosts=drained)
    for (topic, number), target in pins.items():
        fit = {
            m.worker_id
            for m in members
            if target in (m.worker_id, m.host) and m.can_handle(topic) and m.host not in drained
        }
        if fit and number < topics.get(topic, 0):
            assert owners[topic][number] in fit


@given(st.data())
def test_no_slot_could_go_to_another_and_make_the_loads_more_equal(data: st.DataObject) -> None:
    """So members that are alike are within one slot over all, and who joins has a fair share."""
    topics = data.draw(topic_tables)
    members = data.draw(member_lists())
    owners = assign(members, topics, previous=data.draw(histories(topics)), spread=data.draw(spreads))
    load = loads(owners)
    member_of = {member.worker_id: member for member in members}
    for topic, slots in owners.items():
        for owner in set(slots) - {None}:
            giver = member_of[str(owner)]
            for taker in members:
                if taker is not giver and taker.can_handle(topic):
                    given_up = (2 * load[giver.worker_id] - 1) / giver.weight
                    gained = (2 * load[taker.worker_id] + 1) / taker.weight
                    assert given_up <= gained * 1.000001


@given(st.data())
def test_rebalance_brings_members_that_are_alike_within_one_slot_of_each_topic(data: st.DataObject) -> None:
    topics = data.draw(topic_tables)
    members = data.draw(member_lists(alike=True, min_size=1))
    history, spread_ = data.draw(histories(topics)), data.draw(spreads)
    owners = assign(members, topics, previous=history, rebalance=True, spread=spread_)
    assert all(spread(members, owners, topic) <= 1 for topic in topics)


@given(st.data())
def test_nothing_moves_when_nothing_has_changed(data: st.DataObject) -> None:
    topics = data.draw(topic_tables)
    members = data.draw(member_lists())
    pins = data.draw(
        st.dictionaries(st.tuples(st.sampled_from(TOPIC_NAMES), st.integers(0, 9)), st.sampled_from(HOSTS))
    )
    drained = data.draw(st.sets(st.sampled_from(HOSTS), max_size=2))
    history, spread_ = data.draw(histories(topics)), data.draw(spreads)
    first = assign(members, topics, previous=history, pins=pins, drained_hosts=drained, spread=spread_)
    again = assign(members, topics, previous=first, pins=pins, drained_hosts=drained, spread=spread_)
    assert again == first


@given(st.integers(1, 40), st.data())
def test_of_one_topic_not_one_slot_moves_beyond_balance_and_drains(slots: int, data: st.DataObject) -> None:
    members = data.draw(member_lists(alike=True, min_size=1))
    drained = data.draw(st.sets(st.sampled_from(HOSTS), max_size=2))
    previous = data.draw(histories({"t": slots}))
    able = [member.worker_id for member in members if member.host not in drained]
    owners = assign(
        members, {"t": slots}, previous=previous, drained_hosts=drained, spread=data.draw(spreads)
    )
    before = [*previous.get("t", []), *[None] * slots][:slots]
    kept = sum(old is not None and old == new for old, new in zip(before, owners["t"], strict=True))
    had = sorted((before.count(worker_id) for worker_id in able), reverse=True)
    share, more = divmod(slots, len(able)) if able else (0, 0)
    assert kept == sum(min(count, share + (rank < more)) for rank, count in enumerate(had))


@given(st.integers(1, 200), st.data())
def test_of_one_topic_nothing_moves_between_members_that_stay(slots: int, data: st.DataObject) -> None:
    members = [Member(m.worker_id, m.host, m.weight) for m in data.draw(member_lists(min_size=1))]
    there = data.draw(st.sets(st.sampled_from(members), min_size=1))
    before = assign(there, {"t": slots})
    if data.draw(st.booleans()):  # some go, or some come: not both at once
        before, there = assign(members, {"t": slots}), set(members)
        members = [member for member in members if data.draw(st.booleans())]
    after = assign(members, {"t": slots}, previous=before)
    stay = {member.worker_id for member in there} & {member.worker_id for member in members}
    assert not [(old, new) for old, new in moves(before, after) if old in stay and new in stay]


def test_over_many_topics_too_hardly_a_slot_moves_between_members_that_stay() -> None:
    rng = random.Random(7)
    steps = disturbed = 0
    for _ in range(40):
        topics = {f"t{number}": 2 ** rng.randint(0, 6) for number in range(rng.randint(2, 12))}
        members: list[Member] = []
        owners: Owners = {topic: [None] * slots for topic, slots in topics.items()}
        for number in range(12):
            stayed = {member.worker_id for member in members}
            if len(members) > 1 and rng.random() < 0.45:
                stayed.discard(members.pop(rng.randrange(len(members))).worker_id)
            else:
                members.append(Member(f"w{number:02}", f"h{number}"))
            before, owners = owners, assign(members, topics, previous=owners)
            steps += 1
            disturbed += any(old in stayed and new in stayed for old, new in moves(before, owners))
    assert disturbed <= steps / 50


@given(st.data())
def test_the_order_of_the_arguments_does_not_matter(data: st.DataObject) -> None:
    topics = data.draw(topic_tables)
    members = data.draw(member_lists())
    previous = data.draw(histories(topics))
    shuffled = data.draw(st.permutations(members))
    reversed_topics = dict(reversed(topics.items()))
    assert assign(shuffled, reversed_topics, previous=previous) == assign(members, topics, previous=previous)


def test_every_worker_can_sweep_tables_whatever_it_handles() -> None:
    members = [Member("w0", "h", topics=frozenset({"t"})), Member("w1", "h", topics=frozenset())]
    assert loads(assign(members, {TABLES: 8})) == {"w0": 4, "w1": 4}


def most_servers(owners: Owners, spread_: Spread) -> int:
    """On how many servers a worker has tasks at most."""
    servers: dict[str | None, set[int | None]] = {}
    for slots in owners.values():
        for number, owner in enumerate(slots):
            servers.setdefault(owner, set()).add(spread_.server(len(slots), number))
    return max(map(len, servers.values()))


@pytest.mark.parametrize("spread_", [Spread(32, 16), Spread(32, 4), Spread(8, 8)], ids=str)
def test_a_worker_has_tasks_on_one_server_also_after_each_host_was_restarted(spread_: Spread) -> None:
    topics = {f"t{number}": 128 for number in range(10)} | {TABLES: 256}
    hosts = {
        host: [Member(f"h{host:02}-{number}", f"h{host:02}") for number in range(8)] for host in range(8)
    }
    owners = assign(chain(*hosts.values()), topics, spread=spread_)
    for host, gone in hosts.items():
        hosts[host] = []
        owners = assign(chain(*hosts.values()), topics, previous=owners, spread=spread_)
        hosts[host] = [Member(f"again-{one.worker_id}", one.host) for one in gone]
        owners = assign(chain(*hosts.values()), topics, previous=owners, spread=spread_)
    assert most_servers(owners, spread_) == 1


def test_a_rebalance_brings_each_server_to_few_workers_where_they_came_one_by_one() -> None:
    topics, spread_ = {f"t{number}": 128 for number in range(6)}, Spread(16, 4)
    members: list[Member] = []
    owners: Owners = {}
    for number in range(8):
        members.append(Member(f"w{number}", f"h{number}"))
        owners = assign(members, topics, previous=owners, spread=spread_)
    assert most_servers(owners, spread_) == 4
    owners = assign(members, topics, previous=owners, spread=spread_, rebalance=True)
    assert most_servers(owners, spread_) == 1
    assert assign(members, topics, previous=owners, spread=spread_, rebalance=True) == owners
