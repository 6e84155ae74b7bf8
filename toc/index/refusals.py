"""The table of error replies: what each means and what to do. Their first word is a code."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class RedisError(Exception):
    """A reply that is none, for one of two reasons."""


class Refusal(RedisError):
    """The server's error reply: the command was not executed."""

    @property
    def code(self) -> str:
        """The first word of the server's text, such as NOPERM."""
        return str(self).partition(" ")[0]


class Disconnected(RedisError):
    """The connection broke: what was sent may or may not have been executed."""


class TimedOut(Disconnected):
    """The server did not answer in time."""


class Then(Enum):
    """What to do with a refused call. It was not executed, so it may be sent again."""

    GIVE_UP = auto()
    LOAD_SCRIPT = auto()
    FOLLOW_MOVED = auto()
    FOLLOW_ASK = auto()
    PAUSE = auto()
    REDISCOVER = auto()
    """Read the map again, pause, send again."""


_LOG_IN = "check the user and password in TOC_REDIS_URL"

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
    "NOAUTH": (Then.GIVE_UP, _LOG_IN),
    "WRONGPASS": (Then.GIVE_UP, _LOG_IN),
}


class Meaning(NamedTuple):
    """An error's code, what to do, and advice for operators (None: only the server's text explains it)."""

    code: str
    then: Then
    advice: str | None


def meaning_of(error: Refusal) -> Meaning:
    """Look up an error. With a code that is not in the table, the call is given up."""
    then, advice = _ERROR_TABLE.get(error.code, (Then.GIVE_UP, None))
    return Meaning(error.code, then, advice)
