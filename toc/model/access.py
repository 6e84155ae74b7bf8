"""Access tokens: which actions of a gateway a role allows, on which topics. Pure decisions, without a server.

An action is allowed, forbidden or hidden. It is forbidden if none of the token's roles allows it. It
is hidden if the token's patterns do not match its topic: then the caller is told that the topic
does not exist. If it names a task, a biz_id or a lease, its topic is the topic of that task.
An action on the whole cluster needs the pattern ``*``; without it the action is forbidden.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from toc.model.errors import InvalidInput, NotGranted, shown
from toc.model.topic import EVERYTHING, any_matches, check_pattern, covers

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_PATTERNS = 20
MIN_RATE, MAX_RATE = 0.001, 1_000_000.0


class Role(StrEnum):
    """What the holder of a token does."""

    PRODUCE = "produce"
    """Submits tasks, cancels and reschedules them."""
    CONSUME = "consume"
    """Pulls tasks and ends them."""
    READ = "read"
    """Looks at everything but tokens, the audit and what tasks carry."""
    VALUES = "values"
    """Sees what tasks carry: attributes and bodies. Beside read or operate, for people who may."""
    OPERATE = "operate"
    """Operates existing topics, schedules, targets and hosts: pause, redrive, policies, drain.
    Reads too."""
    ADMIN = "admin"
    """Everything, also creating and deleting topics and handing out tokens."""


_P, _C, _R, _V, _O = Role.PRODUCE, Role.CONSUME, Role.READ, Role.VALUES, Role.OPERATE


class Action(StrEnum):
    """What a token may be used for: the name of the right, and the roles that have it beside admin.

    ``cluster``: it concerns the whole cluster, names no topic, and needs a token for all topics.
    """

    def __new__(cls, name: str, roles: Collection[Role] = (), cluster: str = "") -> Self:
        """Make a member."""
        self = str.__new__(cls, name)
        self._value_ = name
        self.roles = frozenset({*roles, Role.ADMIN})
        self.cluster = cluster == "cluster"
        return self

    roles: frozenset[Role]
    cluster: bool

    SUBMIT = "submit", {_P}
    CANCEL = "cancel", {_P, _O}
    RESCHEDULE = "reschedule", {_P, _O}
    GET_TASK = "get-task", {_P, _C, _R, _O}
    READ_VALUES = "read-values", {_P, _C, _V}
    """See the attributes of tasks and schedules; without it they are null."""
    GET_BODY = "get-body", {_C, _V}
    FIND_TASKS = "find-tasks", {_P, _R, _O}
    PULL = "pull", {_C}
    END_LEASE = "end-lease", {_C}
    """ack, nack and extend."""
    READ_TOPICS = "read-topics", {_R, _O}
    CHANGE_TOPIC = "change-topic", {_O}
    """Alter, pause, resume."""
    CREATE_TOPIC = "create-topic"
    DELETE_TOPIC = "delete-topic"
    READ_DEAD = "read-dead", {_R, _O}
    REDRIVE = "redrive", {_O}
    PURGE = "purge", {_O}
    READ_SCHEDULES = "read-schedules", {_R, _O}
    RUN_SCHEDULE = "run-schedule", {_O}
    """Pause, resume, trigger, backfill."""
    CHANGE_SCHEDULE = "change-schedule"
    """Create, alter, delete."""
    READ_TARGETS = "read-targets", {_R, _O}, "cluster"
    RUN_TARGET = "run-target", {_O}, "cluster"
    """Test, pause, resume."""
    CHANGE_TARGET = "change-target", (), "cluster"
    """Create, alter, rotate, delete."""
    SUBMIT_URL = "submit-url"
    """Submit a task with a URL of its own, for a webhook."""
    READ_TEMPLATES = "read-templates", {_R, _O}, "cluster"
    CHANGE_TEMPLATES = "change-templates", (), "cluster"
    READ_CLUSTER = "read-cluster", {_R, _O}, "cluster"
    """Slots, workers, intents, health, overview."""
    CHANGE_CLUSTER = "change-cluster", {_O}, "cluster"
    """Drain, pin, weight, rebalance."""
    READ_AUDIT = "read-audit", (), "cluster"
    READ_TOKENS = "read-tokens"
    CHANGE_TOKENS = "change-tokens"
    """Create and revoke. ``check_grant`` also limits what a new token may be allowed to do."""


class Access(StrEnum):
    """Whether a token allows an action."""

    ALLOWED = "allowed"
    FORBIDDEN = "forbidden"
    """No role of the token allows it, whatever the topic."""
    HIDDEN = "hidden"
    """A role of the token allows it, but not on this topic. Answer as if the topic did not exist."""


@dataclass(frozen=True, slots=True)
class Token:
    """An access token without its secret. Instants are ms; None: never.

    ``topics`` are patterns. ``rate``: requests a second that one gateway process accepts by this token; None:
    no limit of its own.
    """

    name: str
    roles: frozenset[Role]
    topics: tuple[str, ...]
    expires_at: int | None = None
    rate: float | None = None
    created_by: str = ""
    created: int = 0
    revoked_at: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            what = f"{shown(self.name)} is not a name of a token"
            raise InvalidInput(f"{what}: letters, digits, '.', '_' and '-', at most 64", "name")
        if not self.roles:
            raise InvalidInput(f"a token needs a role: {', '.join(Role)}", "roles")
        if not 1 <= len(self.topics) <= MAX_PATTERNS:
            raise InvalidInput(f"a token needs 1 to {MAX_PATTERNS} patterns of topics; '*' is all", "topics")
        for pattern in self.topics:
            check_pattern(pattern, "topics")
        if self.rate is not None and not MIN_RATE <= self.rate <= MAX_RATE:
            raise InvalidInput(f"rate must be {MIN_RATE:g} to {MAX_RATE:g} requests a second", "rate")

    def lives(self, now_ms: int) -> bool:
        """Whether it is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now_ms < self.expires_at)

    @property
    def everywhere(self) -> bool:
        """Whether it is for all topics, and so for the cluster as a whole: by ``*``, also written more than
        once."""
        return any(covers(pattern, EVERYTHING) for pattern in self.topics)

    def may(self, action: Action, topic: str | None = None) -> Access:
        """Whether the token allows an action, on a topic if it concerns one.

        For an action that names no topic, such as a search, pass None and filter what the search
        finds.
        """
        if not self.roles & action.roles:
            return Access.FORBIDDEN
        if action.cluster:
            return Access.ALLOWED if self.everywhere else Access.FORBIDDEN
        if topic is not None and not any_matches(self.topics, topic):
            return Access.HIDDEN
        return Access.ALLOWED

    def covers(self, other: Token) -> bool:
        """Whether this token allows all that ``other`` allows.

        If so, its holder may create, see and revoke ``other``.
        """
        return not self.lacks(other.roles, other.topics, other.expires_at, other.rate)

    def lacks(
        self, roles: Collection[Role], topics: Sequence[str], expires_at: int | None, rate: float | None
    ) -> str:
        """Return what of this exceeds its own rights, as text for a message; empty if nothing does."""
        had = frozenset(Role) if Role.ADMIN in self.roles else self.roles
        found = [f"role {role.value}" for role in sorted(set(roles) - had)]
        found += [
            f"topics {wanted}" for wanted in topics if not any(covers(wider, wanted) for wider in self.topics)
        ]
        if self.expires_at is not None and (expires_at is None or expires_at > self.expires_at):
            found.append("a later end")
        if self.rate is not None and (rate is None or rate > self.rate):
            found.append("a higher rate")
        return ", ".join(found)


def check_grant(
    giver: Token, roles: Collection[Role], topics: Sequence[str], expires_at: int | None, rate: float | None
) -> None:
    """Raise NotGranted if a new token would allow more than ``giver``, the token that creates it.

    The message names what ``giver`` itself does not allow.
    """
    if too_much := giver.lacks(roles, topics, expires_at, rate):
        raise NotGranted(f"token {giver.name!r} cannot grant {too_much}: it does not have that itself")
