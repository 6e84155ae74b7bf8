"""Names of everything that toc keeps in Redis. They are fixed, because other tools find the data by them.

    StoreQueue      order.close_3                  entries that wait: job_id -> due time
    PrepareQueue    prepare_{order.close_3}        taken entries: job_id -> when, tries left, by whom
    DeadQueue       dead_{order.close_3}           tasks out of tries: job_id -> time of death (ms)
    claims          claims_{order.close_3}         hash: next -> counter, number -> worker_id
    generation      gen_{order.close_3}            run_id of the server on which the slot was last rebuilt
    wake channel    wake_{order.close_3}           pub/sub: the new first score of the StoreQueue
    owner           toc_owner                      hash: the owner of these queues; one for all slots
    permits         permits_{webhook_shop}         each process's share of the limits of target "shop"

The braces are a cluster hash tag: the keys of one slot are on one node, those of a topic on many. A namespace
comes first in the tag (``prepare_{ns:order.close_3}``) and before ``toc_owner``, with a colon.

The channel is plain pub/sub, not sharded: a cluster sends each message to all its nodes, so a subscription to
any node hears every slot. Channels have no hash slot and are not in KEYS.
"""

from __future__ import annotations

from binascii import crc_hqx
from typing import NamedTuple

from toc.model.topic import Slot

HASH_SLOTS = 16384
"""Hash slots of a cluster."""


class SlotKeys(NamedTuple):
    """The keys of one slot, and the cluster hash slot (0..16383) that they share."""

    store: str
    prepare: str
    dead: str
    claims: str
    generation: str
    channel: str
    hash_slot: int

    @classmethod
    def of(cls, slot: Slot, namespace: str | None) -> SlotKeys:
        """Build all keys of ``slot``."""
        name = f"{namespace}:{slot}" if namespace else str(slot)
        return cls(
            name,  # of a key without braces, the whole name is hashed
            f"prepare_{{{name}}}",
            f"dead_{{{name}}}",
            f"claims_{{{name}}}",
            f"gen_{{{name}}}",
            f"wake_{{{name}}}",
            hash_slot_of(name),
        )


def owner_key(namespace: str | None = None) -> str:
    """Return the key of the hash with the owner of these queues: ``toc_owner``."""
    return f"{namespace}:toc_owner" if namespace else "toc_owner"


def permits_key(target: str, namespace: str | None = None) -> str:
    """Return the key of the shares of a webhook target's limits: ``permits_{webhook_shop}``."""
    name = f"webhook_{target}"
    return f"permits_{{{namespace}:{name}}}" if namespace else f"permits_{{{name}}}"


def hash_slot_of(key: str) -> int:
    """Return the hash slot (0..16383) of a key: of what is between its first braces, or of the whole."""
    tag = key.partition("{")[2].partition("}")[0]
    return crc_hqx((tag or key).encode(), 0) % HASH_SLOTS
