"""Schedules over HTTP."""

from __future__ import annotations

import re
from typing import Any

from harness.gateway import Gateway

DAILY = {"topic": "test.sync", "cron": "0 2 * * *", "zone": "Europe/Berlin"}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def made(gateway: Gateway, name: str, **more: Any) -> dict[str, Any]:
    answer = gateway.call("POST", "/v1/schedules", {**DAILY, "name": name, **more})
    assert answer.status == 201, answer
    body: dict[str, Any] = answer.body
    return body


def test_a_schedule_lives_over_http(shared: Gateway) -> None:
    first = made(shared, "life", window=7200, jitter=60.5, attribute={"region": "eu"}, overlap="buffer_one")
    assert {name: first[name] for name in ("name", "topic", "cron", "zone", "every", "dst")} == {
        "name": "life", "topic": "test.sync", "cron": "0 2 * * *", "zone": "Europe/Berlin", "every": None,
        "dst": "cron",
    }  # fmt: skip
    assert (first["missed_policy"], first["missed"], first["overlap"]) == ("latest", 0, "buffer_one")
    assert (first["window"], first["jitter"], first["attribute"]) == (7200.0, 60.5, {"region": "eu"})
    assert isinstance(first["schedule_id"], str)
    assert all(TIME.fullmatch(first[name]) for name in ("next_time", "created", "modified"))
    again = shared.call("POST", "/v1/schedules", {**DAILY, "name": "life"})
    assert (again.status, again.body["type"]) == (409, "/docs#exists")
    shown = shared.call("GET", "/v1/schedules/life", token="read")
    assert (shown.status, shown.body["schedule_id"]) == (200, first["schedule_id"])

    paused = shared.call("POST", "/v1/schedules/life:pause", token="operate").body
    assert (paused["paused"], paused["next_time"]) == (True, None)
    resumed = shared.call("POST", "/v1/schedules/life:resume", token="operate").body
    assert (resumed["paused"], resumed["next_time"]) == (False, first["next_time"])

    change = {"every": 86400, "anchor": "2030-01-01T01:00:00+01:00", "missed": "all", "topic": "test.batch"}
    altered = shared.call("PATCH", "/v1/schedules/life", change).body
    assert (altered["cron"], altered["every"], altered["anchor"]) == (None, 86400, "2030-01-01T00:00:00.000Z")
    assert (altered["missed_policy"], altered["topic"]) == ("all", "test.batch")
    assert (altered["overlap"], altered["attribute"]) == ("buffer_one", {"region": "eu"})
    assert altered == shared.call("GET", "/v1/schedules/life").body | {"modified": altered["modified"]}

    assert shared.call("DELETE", "/v1/schedules/life").body == {"name": "life", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", ":resume"), ("POST", ":trigger")):
        gone = shared.call(method, f"/v1/schedules/life{path}")
        assert (gone.status, gone.body["type"]) == (404, "/docs#unknown")
    audit = shared.call("GET", "/v1/audit?target=life").body["actions"]
    assert [(one["action"], one["by"]) for one in reversed(audit)] == [
        ("schedule.create", "all"), ("schedule.create", "all"), ("schedule.pause", "operate"),
        ("schedule.resume", "operate"), ("schedule.alter", "all"), ("schedule.delete", "all"),
    ]  # fmt: skip


def test_a_list_goes_by_name_in_pages_and_shows_what_the_token_may_see(shared: Gateway) -> None:
    names = [f"page.{number}" for number in range(7)]
    for name in names:
        made(shared, name, topic="test.batch" if name > "page.3" else "test.sync")

    def listed(token: str) -> list[str]:
        found: list[str] = []
        after = "page"
        for _ in range(20):
            page = shared.call("GET", f"/v1/schedules?limit=2&after={after}", token=token)
            assert page.status == 200, page
            found += [one["name"] for one in page.body["schedules"]]
            if page.body["next"] is None:
                return [name for name in found if name in names]
            after = page.body["next"]
        raise AssertionError("it has no end")

    assert listed("all") == names
    assert listed("sync-only") == names[:4]


def test_a_preview_has_the_offsets_of_the_zone_stored_or_not(shared: Gateway) -> None:
    rule = {"cron": "30 2 * * *", "zone": "Europe/Berlin"}
    fires = [
        {"nominal": "2030-03-30T02:30:00.000+01:00", "due": "2030-03-30T01:30:00.000Z"},
        {"nominal": "2030-03-31T03:00:00.000+02:00", "due": "2030-03-31T01:00:00.000Z"},
        {"nominal": "2030-04-01T02:30:00.000+02:00", "due": "2030-04-01T00:30:00.000Z"},
    ]
    given = {**rule, "after": "2030-03-30T00:00:00Z", "count": 3}
    assert shared.call("POST", "/v1/schedules:preview", given, token="read").body == {"fires": fires}
    made(shared, "looked", **rule)
    shared.call("POST", "/v1/schedules/looked:pause")
    path = "/v1/schedules/looked:preview"
    assert shared.call("GET", f"{path}?after=2030-03-30T00:00:00Z&count=3").body == {"fires": fires}
    assert len(shared.call("GET", path).body["fires"]) == 20
    short = {"every": 1.5, "after": "2030-01-01T00:00:00Z", "count": 2}
    found = shared.call("POST", "/v1/schedules:preview", short).body["fires"]
    assert [fire["nominal"][19:] for fire in found] == [".500+00:00", ".000+00:00"]
    late = {"every": 86400 * 3000, "anchor": "9999-12-31T23:59:59Z"}
    assert shared.call("POST", "/v1/schedules:preview", late).body == {"fires": []}


def test_a_backfill_of_too_many_occurrences_is_refused(shared: Gateway) -> None:
    made(shared, "busy", cron="* * * * *", paused=True)
    wanted = {"from": "2020-01-01T00:00:00Z", "to": "2026-01-01T00:00:00Z", "dry_run": True}
    answer = shared.call("POST", "/v1/schedules/busy:backfill", wanted)
    assert (answer.status, answer.body["field"]) == (422, "to"), answer


def test_a_token_needs_the_pattern_of_the_topic_that_a_schedule_has_or_shall_have(shared: Gateway) -> None:
    own, other = {**DAILY, "name": "own"}, {**DAILY, "name": "other", "topic": "test.batch"}
    assert shared.call("POST", "/v1/schedules", own, token="sync-only").status == 201
    refused = shared.call("POST", "/v1/schedules", other, token="sync-only")
    assert (refused.status, refused.body["type"]) == (404, "/docs#unknown-topic")
    moved = shared.call("PATCH", "/v1/schedules/own", {"topic": "test.batch"}, token="sync-only")
    assert moved.body == refused.body
    assert shared.call("GET", "/v1/schedules/own").body["topic"] == "test.sync"
    made(shared, "other", topic="test.batch")
    for method, path, body in (
        ("GET", "", None), ("PATCH", "", {"cron": "0 1 * * *"}), ("DELETE", "", None),
        ("POST", ":pause", None), ("POST", ":resume", None), ("POST", ":trigger", None),
        ("GET", ":preview", None),
        ("POST", ":backfill", {"from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"}),
    ):  # fmt: skip
        hidden = shared.call(method, f"/v1/schedules/other{path}", body, token="sync-only")
        absent = shared.call(method, f"/v1/schedules/absent{path}", body, token="sync-only")
        assert (hidden.status, hidden.body) == (404, absent.body)
    assert not shared.call("GET", "/v1/schedules/other").body["paused"]
