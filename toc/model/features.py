"""Features that members of an earlier version would ignore: refused until every member knows them.

Members announce the features that they know (``workers/{worker_id}`` in ZooKeeper). The leading daemon
writes, beside the identity of the task table, which hosts lack which feature. Every process reads that
together with the topics, so the check costs a submit nothing.

    no row of identity      no member has ever run on this task table: nothing is refused
    a row without features  members of an earlier version have run, and no later one leads yet: all is refused
    a feature without hosts every member knows it
    a feature with hosts    they do not know it

When a member of an earlier version joins later, the features are refused again. If that member becomes the
leader, every other daemon writes what it lacks. At most 1.2 s pass until this is noticed, 2 s until it is
written, and 2 s until every process has read it.

Three things are not noticed: members of earlier versions alone, with no daemon of this version; a daemon of
an earlier version that runs without ZooKeeper; and, while the topic table is away, any change, because each
process uses what it read last. So stop using the features before you go back to an earlier version.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum

from toc.model.documents import parse_object
from toc.model.errors import FeatureNotReady, InvalidDocument

MOST_HOSTS = 10
"""How many hosts are kept for each feature."""


class Feature(StrEnum):
    """A feature of tasks or topics. A member that does not know the feature would ignore it."""

    BODIES = "bodies"
    TRIES = "tries"
    EXPIRES_AT = "expires_at"
    DELIVERY = "delivery"


KNOWN: frozenset[str] = frozenset(Feature)
"""What this version knows."""

Lacking = Mapping[str, Collection[str]]
"""feature -> the hosts that do not know it. A feature that is missing is unknown to the leader."""

NOBODY_LACKS: Lacking = {feature.value: () for feature in Feature}


def lacking(members: Iterable[tuple[str, Collection[str]]]) -> Lacking:
    """Return which hosts lack which feature, given the host and the known features of each member."""
    missing: dict[str, set[str]] = {feature.value: set() for feature in Feature}
    for host, known in members:
        for feature in KNOWN.difference(known):
            missing[feature].add(host)
    return {feature: tuple(sorted(hosts)[:MOST_HOSTS]) for feature, hosts in missing.items()}


def encode(found: Lacking) -> str:
    """Encode which hosts lack which feature, as the table stores it."""
    return json.dumps({feature: list(hosts) for feature, hosts in found.items()}, sort_keys=True)


def decode(text: str | None) -> Lacking:
    """Decode the text that ``encode`` wrote. Returns {} if there is no text or toc did not write
    it."""
    try:
        values = parse_object(text or "{}")
    except InvalidDocument:
        return {}
    return {str(name): tuple(map(str, hosts)) for name, hosts in values.items() if isinstance(hosts, list)}


def check(feature: Feature, found: Lacking) -> None:
    """Raise FeatureNotReady, naming the hosts, unless every member knows the feature."""
    hosts = found.get(feature.value)
    if hosts is None:
        raise FeatureNotReady(
            f"{feature.value!r} cannot be used yet: the workers that ran last are of an earlier version; "
            f"upgrade all of them"
        )
    if hosts:
        more = " and perhaps more" if len(hosts) >= MOST_HOSTS else ""
        raise FeatureNotReady(
            f"{feature.value!r} cannot be used yet: members of an earlier version run on "
            f"{', '.join(hosts)}{more}; upgrade them first"
        )
