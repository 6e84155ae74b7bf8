"""Names of everything that toc keeps in Redis. Fixed, because other tools find the data by these names.

    StoreQueue      order.close_3                  scheduled tasks: job_id -> due time
    PrepareQueue    prepare_{order.close_3}        taken and not finished: job_id -> when, tries left, by whom
    DeadQueue       dead_{order.close_3}           out of tries: job_id -> millisecond of death
    claims          claims_{order.close_3}         hash: next -> counter, number -> worker_id
    generation      gen_{order.close_3}            run_id of the server on which the slot was last rebuilt
    waiting         waiting_{order.close_3}        what its worker has taken and cannot start: since when
    wake channel    wake_{order.close_3}           pub/sub: the new first score of the StoreQueue
    owner           toc_owner                      hash: whose queues these are; one for all slots

The braces are a cluster hash tag: the keys of one slot are on one node, the slots of a topic on many. With a
namespace, ``ns:`` precedes the topic, inside the tag, and ``toc_owner``.

The channel is plain pub/sub, not sharded: a cluster sends each message to all its nodes, so a subscription to
any node hears every slot. Channels have no hash slot and are not in KEYS.
"""

from __future__ import annotations

from typing import NamedTuple

from redis.crc import key_slot

from toc.model.errors import ConfigError
from toc.model.topic import NAMESPACE, NAMESPACE_HINT, Slot


class SlotKeys(NamedTuple):
    """The keys of one slot, and the cluster hash slot (0..16383) that they share."""

    store: str
    prepare: str
    dead: str
    claims: str
    generation: str
    waiting: str
    channel: str
    hash_slot: int

    @classmethod
    def of(cls, slot: Slot, namespace: str | None) -> SlotKeys:
        """Build all keys of ``slot``."""
        return cls(
            store_key(slot, namespace),
            prepare_key(slot, namespace),
            dead_key(slot, namespace),
            claims_key(slot, namespace),
            generation_key(slot, namespace),
            waiting_key(slot, namespace),
            wake_channel(slot, namespace),
            key_slot(store_key(slot, namespace).encode()),
        )


def check_namespace(namespace: str | None) -> str | None:
    """Return ``namespace`` if it can be part of a hash tag. Raises ConfigError."""
    if namespace is not None and not NAMESPACE.fullmatch(namespace):
        raise ConfigError(f"{namespace!r} is not a namespace: {NAMESPACE_HINT}")
    return namespace


def store_key(slot: Slot, namespace: str | None = None) -> str:
    """The StoreQueue: ``order.close_3``. Without braces, the whole name is its hash tag."""
    return f"{namespace}:{slot}" if namespace else str(slot)


def prepare_key(slot: Slot, namespace: str | None = None) -> str:
    """The PrepareQueue: ``prepare_{order.close_3}``."""
    return f"prepare_{{{store_key(slot, namespace)}}}"


def dead_key(slot: Slot, namespace: str | None = None) -> str:
    """The DeadQueue: ``dead_{order.close_3}``."""
    return f"dead_{{{store_key(slot, namespace)}}}"


def claims_key(slot: Slot, namespace: str | None = None) -> str:
    """The hash of claim numbers: ``claims_{order.close_3}``."""
    return f"claims_{{{store_key(slot, namespace)}}}"


def generation_key(slot: Slot, namespace: str | None = None) -> str:
    """The run_id of the server on which the slot was last rebuilt: ``gen_{order.close_3}``."""
    return f"gen_{{{store_key(slot, namespace)}}}"


def waiting_key(slot: Slot, namespace: str | None = None) -> str:
    """The note of what a worker has taken and cannot start yet: ``waiting_{order.close_3}``."""
    return f"waiting_{{{store_key(slot, namespace)}}}"


def wake_channel(slot: Slot, namespace: str | None = None) -> str:
    """The channel that carries the StoreQueue's new first score: ``wake_{order.close_3}``."""
    return f"wake_{{{store_key(slot, namespace)}}}"


def owner_key(namespace: str | None = None) -> str:
    """The hash with the owner of these queues: ``toc_owner``."""
    return f"{namespace}:toc_owner" if namespace else "toc_owner"
