"""The console: who gets in, what each role sees, and that what users wrote does nothing."""

import gzip
import re
from contextlib import ExitStack, closing
from typing import Any

import pytest
from harness.console import Browser
from harness.gateway import Gateway
from harness.patience import until
from harness.rows import change

from toc import Settings, TimeoutCenter, Topic
from toc.console.console import MAX_LIVE
from toc.console.pages import PAGES
from toc.console.pages.overview import by_topic
from toc.model.access import Role
from toc.model.lateness import Cause, Episode
from toc.store.records.targets import new_key
from toc.store.tasks.history import FailedTry, line


def test_a_stranger_learns_nothing(shared: Gateway) -> None:
    stranger = Browser(shared, None)
    assert [stranger.get(path).status for path in ("", "/tasks", "/nothing")] == [303, 303, 303]
    assert stranger.get("/topics").headers["location"] == "/console/login?next=%2Fconsole%2Ftopics"
    assert stranger.get("/live?of=/console/running").status == 401
    assert stranger.post("/logout", csrf="x").status == 401
    page = stranger.get("/login")
    assert page.status == 200
    assert "test.sync" not in page.html
    assert "script" not in page.html


def test_a_login_lasts_as_long_as_its_token(shared: Gateway) -> None:
    secret = shared.make_token("short-lived", "read")
    browser = Browser(shared, None)
    answer = browser.log_in(secret, "/console/topics?x=1")
    assert (answer.status, answer.headers["location"]) == (303, "/console/topics?x=1")
    assert re.fullmatch(
        r"__Host-toc=[\w-]+; Path=/; Secure; HttpOnly; SameSite=Strict", answer.headers["set-cookie"]
    )
    assert secret not in answer.headers["set-cookie"]
    assert browser.get("/topics").status == 200
    with browser.asked("GET", "/console/live?of=/console/running") as stream:
        assert stream.getheader("Content-Type") == "text/event-stream"
        told = stream.getheader("X-Accel-Buffering"), stream.getheader("Cache-Control")
        assert told == ("no", "no-store")
        assert shared.call("DELETE", "/v1/tokens/short-lived").status == 200
        assert b"Your login has ended" in (rest := stream.read())
        assert b"event: end" in rest
    assert until(lambda: browser.get("/topics").status == 303, 10)


def test_open_pages_of_one_token_leave_places_for_those_of_others(shared: Gateway) -> None:
    """Each is drawn every few seconds: 300 of them made the calls of others ten times as slow."""
    browsers = [Browser(shared, shared.make_token(f"viewer-{n}", "read")) for n in range(2)]
    with ExitStack() as stack:

        def follow(browser: Browser) -> bool:
            stream = stack.enter_context(browser.asked("GET", "/console/live?of=/console/running"))
            return stream.read(1) != b""

        assert sum(follow(browsers[0]) for _ in range(MAX_LIVE)) == MAX_LIVE // 2
        assert follow(browsers[1])


def test_a_cookie_that_was_changed_lets_nobody_in(shared: Gateway) -> None:
    browser = Browser(shared)
    name, _, value = browser.cookie.partition("=")
    for place in (0, 50, 60, len(value) - 2):
        other = value[:place] + ("A" if value[place] != "A" else "B") + value[place + 1 :]
        browser.cookie = f"{name}={other}"
        assert browser.get("/topics").status == 303
    for odd in ("", "x", "=" * 300, "A" * 96):
        browser.cookie = f"{name}={odd}"
        assert browser.get("/topics").status == 303


def test_who_logs_out_is_out(shared: Gateway) -> None:
    browser = Browser(shared)
    answer = browser.post("/logout")
    assert (answer.status, answer.headers["location"]) == (303, "/console/login")
    assert "Max-Age=0" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    "headers",
    [{"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}, {"Origin": "https://evil.example"},
     *({"Origin": one} for one in ("null", "http://[", "http://", "", "//", "x"))],
)  # fmt: skip
def test_a_form_of_another_site_is_refused(shared: Gateway, headers: dict[str, str]) -> None:
    browser = Browser(shared)
    assert browser.post("/logout", None, **headers).status == 403
    assert browser.log_in(shared.tokens["all"], **headers).status == 403
    assert "call_failed" not in shared.told()


def test_a_form_needs_the_token_of_its_login(shared: Gateway) -> None:
    browser, other = Browser(shared), Browser(shared, "read")
    for csrf in ("", "x" * 64, "é", other.csrf()):
        assert browser.post("/logout", csrf=csrf).status == 403
    assert browser.post("/logout", Origin=f"http://127.0.0.1:{shared.port}").status == 303


def test_the_next_page_is_one_of_the_console(shared: Gateway) -> None:
    browser = Browser(shared, None)
    for path in ("https://evil.example", "//evil.example", "/consoles", "/console\r\nx: y", "/v1/tokens"):
        assert browser.log_in(shared.tokens["all"], path).headers["location"] == "/console"


def test_a_link_from_another_site_finds_the_login_again(shared: Gateway) -> None:
    page = Browser(shared, None).get("/tasks?biz_id=4711&topic=a%20b", Sec_Fetch_Site="cross-site")
    assert page.status == 200
    assert 'content="0; url=/console/tasks?biz_id=4711&amp;topic=a%20b"' in page.html


def test_the_login_page_says_where_it_cannot_work(shared: Gateway) -> None:
    stranger = Browser(shared, None)
    assert "cannot log in at this address" in stranger.get("/login", Host="gate.example:8080").text
    assert "cannot log in" not in stranger.get("/login").text
    behind = stranger.get("/login", Host="gate.example", Sec_Fetch_Site="none")  # a proxy has the certificate
    assert "cannot log in" not in behind.text


def test_every_page_has_a_policy_without_which_no_script_runs(shared: Gateway) -> None:
    browser = Browser(shared)
    nonces = set()
    for page in (browser.get("/topics"), browser.get("/nothing"), browser.get("/login")):
        rules = page.headers["content-security-policy"].split(";")
        policy = dict(one.strip().partition(" ")[::2] for one in rules)
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        found = re.fullmatch(r"'nonce-([\w-]{20,})'", policy["script-src"])
        assert found
        nonces.add(found[1])
        tags = re.findall(r"<(?:script|[^>]+ hx-)[^>]*>", page.html)
        assert all(f'nonce="{found[1]}"' in tag for tag in tags)
        assert not re.search(r"<[^>]+\s(on\w+|style)=|<style|javascript:", page.html)
    assert len(nonces) == 3


ROLES = ("produce", "consume", "read", "operate")
HOSTILE = "<script>alert(1)</script>'\"><img src=x onerror=y>{{7*7}}\u202egnp.exe\u2066\x00\x1b[2J👩‍👧 ünder"


@pytest.fixture(scope="module")
def filled(shared: Gateway) -> dict[str, str]:
    """Something of each kind that has a page, with what does harm elsewhere. Returns a path for each page."""
    value = HOSTILE.replace("\x00", "").replace("\x1b", "")
    given: dict[str, Any] = {"biz_id": value, "attribute": {value: [value]}, "dedup_key": value[:60]}
    job_id = shared.submit(**given, body="x" * (1 << 20)).body["job_id"]
    failed = [FailedTry(n, 0, 0, 1_700_000_000_047, HOSTILE, stack=HOSTILE + "\nline") for n in (1, 2)]
    for number, status in ((job_id, 0), (shared.submit(**{**given, "dedup_key": "2"}).body["job_id"], 4)):
        sets, history = f"status={status},last_error=%s,history=%s", "".join(map(line, failed))
        change(shared.system.center.store, number, sets, HOSTILE * 5, history)
    schedule = {"name": "nightly", "topic": "test.sync", "cron": "30 2 * * *", "zone": "Europe/Berlin"}
    assert shared.call("POST", "/v1/schedules", {**schedule, "attribute": {"x": value}}).status == 201
    shared.submit("test.batch", biz_id=value)
    wanted = {"topic": "test.batch", "biz_id": value, "tasks": 1, "confirm": "test.batch"}
    job = shared.call("POST", "/v1/bulk:cancel", wanted).body["name"]
    settings = shared.system.settings.model_dump() | {"secret_key": new_key()}
    with closing(TimeoutCenter(Settings(**settings))) as center:
        center.targets.create("shop", "https://example.com/x?secret=1")
        center.targets.pause("shop", why=value[:200], by="test")
    return {
        "topics/{topic}": "topics/test.sync", "tasks/{job_id}": f"tasks/{job_id}",
        "tasks/{job_id}/body": f"tasks/{job_id}/body", "schedules/{name}": "schedules/nightly",
        "dead": "dead?newest=true", "targets/{name}": "targets/shop", "bulk/{name}": f"bulk/{job}",
        "do/{act}": f"do/cancel-task?job_id={job_id}",
    }  # fmt: skip


def test_each_role_sees_its_pages_and_no_other(shared: Gateway, filled: dict[str, str]) -> None:
    for role in ROLES:
        browser = Browser(shared, role)
        assert browser.get("").status == {"consume": 403, "produce": 303}.get(role, 200)
        for one in PAGES:
            if one.path and one.method == "GET" and one.right is not None:
                allowed = Role(role) in one.right.roles
                page = browser.get(f"/{filled.get(one.path, one.path)}")
                assert page.status == (200 if allowed else 403), (role, one.path)
                assert allowed == (f'href="/console/{one.path}"' in page.html) or not one.menu
                if not allowed:
                    assert "example.com" not in page.html
                    assert "test.sync" not in page.html


def test_who_reads_sees_what_tasks_carry_only_with_a_role_for_it(shared: Gateway) -> None:
    shared.make_token("all-seeing", "read", "values")
    job_id = shared.submit(attribute={"iban": "DE4711"}, body="secret").body["job_id"]
    seen, hidden = (Browser(shared, name).get(f"/tasks/{job_id}") for name in ("all-seeing", "read"))
    assert ("DE4711" in seen.text, "DE4711" in hidden.html) == (True, False)
    assert "role values" in hidden.text
    assert shared.call("GET", f"/v1/tasks/{job_id}", token="read").body["attribute"] is None
    found = shared.call("GET", "/v1/tasks?limit=1000", token="operate").body["tasks"]
    assert {one["attribute"] for one in found if one["job_id"] == job_id} == {None}
    assert shared.call("GET", f"/v1/tasks/{job_id}/body", token="read").status == 403
    file = Browser(shared, "all-seeing").get(f"/tasks/{job_id}/body")
    assert (file.html, file.headers["content-disposition"]) == ("secret", "attachment")


def test_a_token_of_some_topics_sees_those_alone(shared: Gateway) -> None:
    browser = Browser(shared, "sync-only")
    other = shared.submit("test.doomed", biz_id="elsewhere").body["job_id"]
    mine = shared.submit("test.sync", biz_id="here").body["job_id"]
    assert browser.get(f"/tasks/{mine}").status == 200
    unknown = browser.get("/tasks/4711000")
    for path in (f"/tasks/{other}", f"/tasks/{other}/body"):
        assert browser.get(path).status == 404
    assert browser.get(f"/tasks/{other}").text == unknown.text
    hidden = browser.get("/topics/test.doomed")
    assert (hidden.status, "/docs#unknown-topic" in hidden.links()) == (404, True), "it leads to what that is"
    for path in ("/topics", "/tasks?limit=1000", "/dead", "/schedules", "/tokens"):
        page = browser.get(path)
        assert page.status == 200
        assert "test.doomed" not in page.html, path
        assert "elsewhere" not in page.html, path
    for path in ("/workers", "/health", "/running", "/audit", "/targets"):  # of the whole cluster
        assert browser.get(path).status == 403
    assert browser.get("").headers["location"] == "/console/topics"


def test_pages_are_compressed_and_files_are_kept(shared: Gateway) -> None:
    browser = Browser(shared)
    page = browser.get("").html
    with browser.asked("GET", "/console", more={"Accept-Encoding": "gzip"}) as answer:
        assert answer.getheader("Content-Encoding") == "gzip"
        sent = answer.read()
    total, packed = len(browser.get("/login").html) + len(sent), gzip.decompress(sent).decode()
    assert browser.csrf() in packed
    for path in re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page):
        for accepted, encoding in (("gzip, br", "gzip"), ("", None)):
            with browser.asked("GET", path, more={"Accept-Encoding": accepted}) as answer:
                assert answer.getheader("Content-Encoding") == encoding
                assert "immutable" in str(answer.getheader("Cache-Control"))
                total += (len(answer.read()) + len(str(answer.headers))) if encoding else 0
    assert total < 60_000, "a first visit"
    assert browser.get("/static/0000000000000000/htmx.js").status == 404
    assert browser.get("/static/../console.py").status == 404


def test_dead_tasks_are_grouped_by_their_errors(shared: Gateway) -> None:
    shared.call("POST", "/v1/topics", {"name": "test.grouped", "biz_type": 978, "slot_amount": 1})
    for n, who in enumerate(("order 1", "order 2", "order 3", "5")):
        job_id = shared.submit("test.grouped", biz_id=n).body["job_id"]
        dead = f"status=4,last_error='{who} is 4711 days old\nmore'"
        change(shared.system.center.store, job_id, dead)
    found = shared.call("GET", "/v1/dead:groups?topic=test.grouped", token="read").body
    said = [(one["error"], one["tasks"], one["contains"], one["others"]) for one in found["groups"]]
    assert said == [("order # is # days old", 3, "order ", 0), ("# is # days old", 1, " days old", 3)]
    page = Browser(shared, "read").get("/dead?topic=test.grouped")
    assert "order # is # days old" in page.text
    links = [one for one in page.links() if "error=" in one]
    listed, _ = dict.fromkeys(links)
    assert links.count(listed) == 2, "by the error and by the number"
    assert listed == "/console/dead?topic=test.grouped&error=order%20&newest=true"
    assert Browser(shared, "read").get(listed.removeprefix("/console")).text.count("4711 days old") == 3


def test_an_open_page_is_brought_up_to_date_and_ends_with_the_gateway(shared: Gateway) -> None:
    gateway = Gateway(shared.system, host="leaving", beside=shared)
    try:
        browser = Browser(gateway)
        with browser.asked("GET", "/console/live?of=/console") as stream:
            seen = b""
            while b"test.new" not in seen:
                if b"data:" in seen and shared.call("GET", "/v1/topics/test.new").status == 404:
                    shared.system.center.store.topics.create(Topic("test.new", 977, 1))
                seen += stream.read1()
            gateway.process.terminate()
            stream.read()  # it ends
    finally:
        assert gateway.stop() == 0


def test_a_time_may_be_told_from_now(shared: Gateway) -> None:
    topic, browser = "test.from.now", Browser(shared)
    shared.system.center.store.topics.create(Topic(topic, 6100, 1))
    made = shared.system.center.submit(topic, biz_id=1, delay=5400)

    def found(path: str) -> bool:
        page = browser.get(path)
        assert page.status == 200, page.text
        return f"/console/tasks/{made}" in page.links()

    search = f"/tasks?topic={topic}"
    assert "2030-01-31T12:00:00Z, or from now: +2h, -30m" in browser.get(search).text
    assert found(f"{search}&due_after=%2B1h&due_before=%2B2h")
    assert found(f"{search}&due_after=-1d")
    assert not found(f"{search}&due_after=%2B2h")
    assert not found(f"{search}&due_before=%2B60m")
    sent = browser.post("/do/reschedule-task", {"job_id": str(made), "action_time": "+3h"})
    assert sent.status == 200, sent.text
    assert found(f"{search}&due_after=%2B2h")


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("path", "field", "value", "said"),
    [
        ("/tasks?topic=test.sync", "due_after", "2h", "is not a time: write RFC 3339"),
        ("/tasks?topic=test.sync", "due_after", "-999999d", "is not a time: write RFC 3339"),
        ("/tasks?topic=test.sync", "due_after", "2026-12-01T09:00:00", "has no time zone; append Z"),
        ("/dead?topic=test.sync", "due_before", "tomorrow", "is not a time: write RFC 3339"),
        ("/late?topic=test.sync", "after", "2026-12-01", "is not a time: write RFC 3339"),
        ("/audit?by=test", "after", "2026-12-01T09:00:00", "has no time zone; append Z"),
        ("/schedules/nightly?count=3", "after", "2026-12-01T09:00:00", "has no time zone; append Z"),
        ("/what-if?topic=test.sync", "pause", "soon", "is not a duration; write seconds"),
        ("/tasks?biz_id=1", "topic", "test.none", "there is no such topic"),
    ],
)
def test_what_a_search_refuses_stands_at_its_field_with_the_rest_as_typed(
    shared: Gateway, path: str, field: str, value: str, said: str
) -> None:
    page = Browser(shared).get(f"{path}&{field}={value}")
    assert page.status in (404, 422)
    told = re.search(rf'<strong class="error" id="f-{field}-error">(.*?)</strong>', page.html)
    assert told
    assert said in told[1]
    kept = path.partition("=")[2]
    assert {value, kept} <= set(re.findall(r'value="([^"]*)"', page.html))


def test_the_page_of_a_schedule_stays_when_its_search_is_refused_and_says_that_it_is_paused(
    shared: Gateway,
) -> None:
    schedule = {"name": "held", "topic": "test.sync", "cron": "30 2 * * *"}
    assert shared.call("POST", "/v1/schedules", schedule).status == 201
    browser = Browser(shared)
    assert "none of these runs" not in browser.get("/schedules/held").text
    assert shared.call("POST", "/v1/schedules/held:pause", {}).status == 200
    for query, status in (("", 200), ("?after=x", 422)):
        page = browser.get(f"/schedules/held{query}")
        assert (page.status, "Paused: none of these runs." in page.text) == (status, True)
        assert {"Schedule held", "30 2 * * *", "Show"} <= set(page.text.split("\n"))
        assert "/console/do/resume-schedule" in page.html


def test_who_paused_a_schedule_is_told_unless_a_program_did_or_it_was_changed_since(shared: Gateway) -> None:
    schedules, path = shared.system.center.schedules, "/v1/schedules/stopped"
    browser, operator = Browser(shared), shared.make_token("anna", "operate")

    def paused_by() -> str | None:
        found: str | None = shared.call("GET", path).body["paused_by"]
        assert f"Paused by\n{found or '-'}\n" in browser.get("/schedules/stopped").text
        return found

    schedules.create("stopped", topic="test.sync", every=3600)
    assert paused_by() is None
    assert shared.call("POST", f"{path}:pause", {}, token=operator).status == 200
    assert paused_by() == "anna"
    assert shared.call("POST", f"{path}:pause", {}).status == 200
    assert paused_by() == "anna", "who came later changed nothing"
    schedules.resume("stopped")
    assert paused_by() is None
    schedules.pause("stopped")
    assert paused_by() is None
    schedules.delete("stopped")
    schedules.create("stopped", topic="test.sync", every=3600, paused=True)
    assert paused_by() is None, "that was another one"


def test_a_task_leads_to_all_of_its_biz_id(shared: Gateway) -> None:
    browser = Browser(shared)
    for biz_id, query in ((4711, "4711"), ("4711", "4711&text=true"), ("order 1", "order%201")):
        made = shared.system.center.submit("test.sync", biz_id=biz_id, delay=3600)
        page = browser.get(f"/tasks/{made}")
        (link,) = [one for one in page.links() if one.startswith("/console/tasks?")]
        assert link.removesuffix("&text=false") == f"/console/tasks?biz_id={query}"
        assert f"Biz id\n{biz_id}\n" in page.text
        assert f"/console/tasks/{made}" in browser.get(link.removeprefix("/console")).links()


def test_the_life_of_a_cancelled_task_ends_there(shared: Gateway) -> None:
    made = shared.submit(biz_id=1, delay=3600, expires_at="2035-01-01T00:00:00Z").body["job_id"]
    browser = Browser(shared)

    def steps() -> list[str]:
        life = browser.get(f"/tasks/{made}").html.partition("Its life")[2]
        return [one for one in re.findall(r"<bdi>([^<]+)</bdi>", life) if one.isalpha()]

    assert steps() == ["stored", "due", "expires"]
    assert shared.call("DELETE", f"/v1/tasks/{made}").status == 200
    assert steps() == ["stored", "cancelled"]


def test_what_could_not_be_read_of_a_topic_is_not_0() -> None:
    read = {"slot": "a_0", "owner": "w", "scheduled": 2, "prepared": 0, "dead": 1, "overdue": None}
    counts = dict.fromkeys(("scheduled", "prepared", "dead", "overdue"))
    away = [{"slot": slot, "owner": "w", **counts} for slot in ("b_0", "a_1", "b_1")]
    some, none = by_topic([read, *away])
    assert (some["scheduled"], some["dead"], some["overdue"], some["unread"]) == (2, 1, 0, 1)
    assert none == {"topic": "b", "slots": 2, "unowned": 0, "unread": 2, **counts}


def test_who_looks_for_a_task_first_sees_the_search(shared: Gateway) -> None:
    html = Browser(shared).get("/tasks").html
    assert 0 < html.index('name="biz_id"') < html.index('name="job_id"')


def test_late_tasks_are_listed_with_why(shared: Gateway) -> None:
    now = shared.system.center.clock.now_ms()
    one = Episode(
        7, "test.batch", Cause.BACKLOG, HOSTILE[:60], now - 9000, now, now, 12, 9000, 4711, HOSTILE[:60]
    )
    shared.system.center.store.episodes.write(one)
    browser, said = Browser(shared, "read"), "backlog\ntest.batch\n12\n9 s\n4711"
    assert until(lambda: said in browser.get("/late").text), "it shows the episode"
    assert "<script>alert" not in browser.get("/late").html
    assert "test.batch" not in Browser(shared, "sync-only").get("/late").html
