"""What keeps tasks waiting for their webhook targets, for ``toc doctor``, and the rotation of their key."""

from __future__ import annotations

from collections.abc import Iterable

from toc.model.errors import NotInstalled, SecretsLocked, TocError
from toc.model.finding import Finding, Level
from toc.model.topic import Delivery, Topic
from toc.operate.cluster import workers
from toc.sdk.client import TimeoutCenter
from toc.store.records.targets import Resealed, key_mark


def examine(center: TimeoutCenter, topics: Iterable[Topic]) -> list[Finding]:
    """Return the targets that are missing, paused, or locked for this host. Asks no receiver."""
    try:
        targets = {target.name: target for target in center.targets.list()}
    except TocError:
        return []  # the schema or the server fails: reported elsewhere
    found = []
    for topic in topics:
        if topic.delivery is not Delivery.WEBHOOK or not topic.target:
            continue
        if topic.target not in targets:
            what = f"topic {topic.name} sends to it, and it does not exist: its tasks wait"
            do = f"toc target create {topic.target}, or toc topic alter {topic.name} --target NAME"
            found.append(Finding(Level.WARN, topic.target, what, do))
        elif not targets[topic.target].serves(topic.name):
            what = f"topic {topic.name} sends to it, and it is not for that topic: its tasks wait"
            do = f"toc target alter {topic.target} --topics ..., or toc topic alter {topic.name} --target X"
            found.append(Finding(Level.WARN, topic.target, what, do))
    for target in targets.values():
        if target.paused:
            why = f": {target.paused_why}" if target.paused_why else ""
            what = f"paused by {target.paused_by}{why}; its tasks wait"
            found.append(Finding(Level.NOTE, target.name, what, f"toc target resume {target.name}"))
        try:
            center.store.targets.open(target)
        except SecretsLocked as exc:
            found.append(Finding(Level.WARN, target.name, str(exc), "set TOC_SECRET_KEY on this host"))
        except NotInstalled:
            pass  # this host sends none
    return found


def rotate_key(center: TimeoutCenter) -> Resealed:
    """Encrypt the secrets of all targets with the first key of TOC_SECRET_KEY. May be repeated.

    Raises SecretsLocked, with the hosts, if workers of the cluster send webhooks and do not know that key;
    CoordinationUnavailable or StoreUnavailable if that cannot be told.
    """
    if keys := center.settings.secret_key:
        mark = key_mark(keys[0].get_secret_value())
        senders = [row.member for row in workers(center) if Delivery.WEBHOOK in row.member.serves]
        hosts = sorted({member.host for member in senders if mark not in member.keys})
        if hosts:
            raise SecretsLocked(
                f"nothing was changed: the first key of TOC_SECRET_KEY is not known to the workers that send "
                f"webhooks on {', '.join(hosts)}; put it first there, restart them and try again"
            )
    return center.targets.reseal()
