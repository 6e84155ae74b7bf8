"""Webhook targets, the receivers of webhooks. Create and rotate show a secret, and nothing else does."""

from collections.abc import Mapping
from typing import Any

from toc.model.access import Action as Right
from toc.model.target import MAX_PREVIOUS_SECONDS, NOTICED_SECONDS, PREVIOUS_SECONDS, Target
from toc.operate.operation import REQUIRED, Doing, Param, Place, Record, Value, operation
from toc.operate.records import target_record

NAME = Param("name", Value.TEXT, "Such as shop: letters, digits, '.', '_', '-'.", REQUIRED)
URL = "Where tasks are sent: https://host/path."
LIMITS = (
    Param("timeout", Value.SECONDS, "Longest request. Default 15s."),
    Param("concurrency", Value.WHOLE, "Requests in flight, over all workers. Default 50."),
    Param("rate", Value.NUMBER, "Requests per second, over all workers. Default: no limit.", null=True),
    Param("dead_on", Value.WHOLE, "Which of 400, 404, 422 make a task dead. Default none.", many=True,
          metavar="LIST"),
    Param("topics", Value.TEXT,
          "Patterns of the topics that may use it: shop.*, pay.*. Default all that its creator may.",
          many=True, metavar="LIST"),
    Param("headers", Value.HEADERS, "Go with every request. Encrypted, and never shown."),
)  # fmt: skip


def _without_secrets(values: Record) -> Mapping[str, Any]:
    """Return what the audit tells of a target: the names of headers without their values, and the URL without
    user and query, which may hold a secret."""
    details = dict(values)
    if "headers" in details:
        details["headers"] = sorted(details["headers"])
    if "url" in details:
        scheme, _, rest = details["url"].partition("?")[0].rpartition("://")
        details["url"] = f"{scheme}://{rest.rpartition('@')[2]}"
    return details


def _record(doing: Doing, target: Target) -> Record:
    """Return a target as its reader may see it: who may only read does not see the query of its URL."""
    return target_record(target, whole_url=doing.may(Right.RUN_TARGET))


@operation("target.list", "GET /v1/targets", Right.READ_TARGETS, "List webhook targets")
def list_targets(doing: Doing) -> Record:
    """List the targets."""
    return {"targets": [_record(doing, target) for target in doing.center.targets.list()]}


@operation("target.show", "GET /v1/targets/{name}", Right.READ_TARGETS, "Show a webhook target", NAME)
def show_target(doing: Doing, name: str) -> Record:
    """Show a target, without secrets."""
    return _record(doing, doing.center.store.targets.get(name))


@operation("target.create", "POST /v1/targets", Right.CHANGE_TARGET, "Register a webhook target",
           NAME, Param("url", Value.TEXT, URL, REQUIRED, metavar="URL"), *LIMITS, takes="NewTarget",
           status=201, details=_without_secrets)  # fmt: skip
def create(doing: Doing, name: str, url: str, **limits: Any) -> Record:
    """Register a receiver, and show its signing secret, only this once.

    toc: Headers come from a file or from stdin, because other users of this host can read command lines.

    Example: toc target create shop --url https://shop.example.com/hooks --rate 100
    """
    if doing.token is not None:
        limits.setdefault("topics", doing.token.topics)
    made = doing.center.targets.create(name, url, **limits)
    return target_record(made.target) | {"secret": made.secret}


@operation("target.alter", "PATCH /v1/targets/{name}", Right.CHANGE_TARGET, "Change a webhook target",
           NAME, Param("url", Value.TEXT, URL, metavar="URL"), *LIMITS, takes="AlteredTarget",
           details=_without_secrets, settles=NOTICED_SECONDS)  # fmt: skip
def alter(doing: Doing, name: str, **changes: Any) -> Record:
    """Change a target; headers replace all that it had. Returns when every sender knows it.

    toc: An empty file removes all headers.

    Example: toc target alter shop --rate 0 --dead-on 404,422
    """
    return target_record(doing.center.targets.alter(name, wait=False, **changes))


@operation(
    "target.rotate", "POST /v1/targets/{name}:rotate", Right.CHANGE_TARGET, "Give a target a new secret",
    NAME,
    Param("keep", Value.SECONDS, "How long the former secret also signs; 0: not at all.", PREVIOUS_SECONDS,
          least=0, most=MAX_PREVIOUS_SECONDS),
    takes="Rotation", settles=NOTICED_SECONDS,
)  # fmt: skip
def rotate(doing: Doing, name: str, keep: float) -> Record:
    """Give a target a new signing secret, and show it, only this once. Returns when every sender uses it.

    Until the time to keep the former one is over, requests are signed with both, so receivers can switch
    without a gap.
    """
    made = doing.center.targets.rotate(name, keep=keep, wait=False)
    return target_record(made.target) | {"secret": made.secret}


@operation("target.test", "POST /v1/targets/{name}:test", Right.RUN_TARGET, "Send a webhook target a test",
           NAME, place=Place.RECEIVER)  # fmt: skip
def send_test(doing: Doing, name: str) -> Record:
    """Send a target one signed request that belongs to no task, and show the answer.

    toc: Exits with 1 unless the answer is a 2xx. The request has the topic toc.test.
    """
    answer = doing.center.targets.test(name)
    doing.result["status"] = answer.status
    return answer._asdict()


@operation("target.pause", "POST /v1/targets/{name}:pause", Right.RUN_TARGET, "Pause a webhook target",
           NAME, Param("why", Value.TEXT, "A reason, shown to other operators.", "", most=255), takes="Pause",
           settles=NOTICED_SECONDS)  # fmt: skip
def pause(doing: Doing, name: str, why: str) -> Record:
    """Send nothing more to a target; its tasks wait. Requests in flight end."""
    return target_record(doing.center.targets.pause(name, why=why, by=doing.by, wait=False))


@operation("target.resume", "POST /v1/targets/{name}:resume", Right.RUN_TARGET, "Resume a webhook target",
           NAME)  # fmt: skip
def resume(doing: Doing, name: str) -> Record:
    """Send to a paused target again. Its own answer 410 may have paused it."""
    return target_record(doing.center.targets.resume(name))


@operation("target.delete", "DELETE /v1/targets/{name}", Right.CHANGE_TARGET, "Delete a webhook target",
           NAME, settles=NOTICED_SECONDS)  # fmt: skip
def delete(doing: Doing, name: str) -> Record:
    """Delete a target and its secret. Its tasks wait until a target of that name exists again."""
    doing.center.targets.delete(name, wait=False)
    return {"name": name}


@operation("secrets.rotate", "", Right.CHANGE_TARGET, "Encrypt secrets with a new key",
           target=lambda _: "all targets")  # fmt: skip
def rotate_keys(doing: Doing) -> Record:
    """Encrypt the secrets of all targets with the first key of TOC_SECRET_KEY. May be repeated.

    First put the new key before the old one on every host. The webhooks of a host without it wait. Remove the
    old key afterwards.
    """
    done, locked = doing.center.targets.reseal()
    doing.result.update(targets=done, locked=locked)
    return {"targets": done, "locked": list(locked)}
