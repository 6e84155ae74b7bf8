"""The table of error replies: what each means and what to do.

For some codes the driver has classes, and removes the code from the text; other codes are the text's first
word.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

REPLIES = (ResponseError, BusyLoadingError, AuthenticationError, AuthorizationError)
"""The driver's classes for error replies, other than broken connections: the command was not executed."""


class Then(Enum):
    """What to do with a refused call. It was not executed, so it may be sent again."""

    GIVE_UP = auto()
    LOAD_SCRIPT = auto()
    FOLLOW_MOVED = auto()
    FOLLOW_ASK = auto()
    PAUSE = auto()
    REDISCOVER = auto()
    """Read the map again, pause, send again."""


_CODES: tuple[tuple[type[RedisError], str], ...] = (
    (NoScriptError, "NOSCRIPT"),
    (MovedError, "MOVED"),  # before ASK: the driver derives it from AskError
    (AskError, "ASK"),
    (TryAgainError, "TRYAGAIN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (BusyLoadingError, "LOADING"),
    (MasterDownError, "MASTERDOWN"),
    (ReadOnlyError, "READONLY"),
    (OutOfMemoryError, "OOM"),
    (NoPermissionError, "NOPERM"),
    (AuthorizationError, "NOAUTH"),
    (AuthenticationError, "NOAUTH"),
)

_ERROR_TABLE: dict[str, tuple[Then, str]] = {
    "NOSCRIPT": (
        Then.LOAD_SCRIPT,
        "its scripts disappear as soon as they are loaded; check who runs SCRIPT FLUSH",
    ),
    "MOVED": (Then.FOLLOW_MOVED, "its nodes disagree about who serves this slot; check CLUSTER SLOTS"),
    "ASK": (Then.FOLLOW_ASK, "this slot is being moved between nodes; try again"),
    "TRYAGAIN": (Then.PAUSE, "this slot is being moved between nodes; try again"),
    "CLUSTERDOWN": (Then.REDISCOVER, "the cluster does not serve this slot; check CLUSTER INFO"),
    "MASTERDOWN": (Then.REDISCOVER, "it has lost its master; wait for the failover"),
    "READONLY": (
        Then.REDISCOVER,
        "it is a replica; wait for the failover, or point TOC_REDIS_URL at the master",
    ),
    "LOADING": (Then.PAUSE, "it is loading its data; wait"),
    "BUSY": (Then.PAUSE, "another program's script blocks it; see SLOWLOG, or use SCRIPT KILL"),
    "MISCONF": (Then.PAUSE, "it cannot save to disk and refuses writes; check its disk and log"),
    "NOREPLICAS": (Then.PAUSE, "it has fewer replicas than min-replicas-to-write; check them"),
    "OOM": (Then.GIVE_UP, "its memory is full (maxmemory); give it more, or let it drain"),
    "WRONGTYPE": (
        Then.GIVE_UP,
        "toc did not write a key of this slot; `toc doctor` names it: remove it",
    ),
    "NOPERM": (Then.GIVE_UP, "the user lacks a permission; see the grants in the documentation"),
    "NOAUTH": (Then.GIVE_UP, "check the user and password in TOC_REDIS_URL"),
}


class Meaning(NamedTuple):
    """An error's code, what to do, and advice for operators (None: only the server's text explains it)."""

    code: str
    then: Then
    advice: str | None


def meaning_of(error: RedisError) -> Meaning:
    """Look up an error. With a code that is not in the table, the call is given up."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), str(error).partition(" ")[0])
    then, advice = _ERROR_TABLE.get(code, (Then.GIVE_UP, None))
    return Meaning(code, then, advice)
