"""What the console changes, by role, only what was confirmed;
and that nobody who may only look holds up others."""

import asyncio
import http.client
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any, NamedTuple
from urllib.parse import urlencode

import pytest
from fault.kit.proxy import Proxy, through
from harness import secured
from harness.console import FORM, Browser, Shown
from harness.gateway import Gateway
from harness.patience import until
from harness.rows import change, known
from harness.system import NewSystem, System

from benchmarks.local import MariaDB
from toc import TimeoutCenter
from toc.cli.commands import _late as print_late
from toc.console.console import Console
from toc.console.pages.acts import ACTS, Act
from toc.console.sessions import COOKIE, Session, Sessions
from toc.console.shown import Column
from toc.console.view import BY_NAME
from toc.gateway.app import App
from toc.gateway.crowd import Crowd, server
from toc.gateway.service import Line, Service
from toc.model.access import Role
from toc.model.documents import instant
from toc.model.due import OTHERS, Counted
from toc.model.errors import StoreUnavailable
from toc.model.lateness import Cause, Episode, LateStart, Span
from toc.model.minute import KEPT, MINUTE_MS, Minute, write
from toc.model.task import NewTask, TaskStatus
from toc.operate.due import BOUNDS, show
from toc.operate.late import late
from toc.operate.operation import Doing
from toc.operate.tokens import TokenBook, create_token
from toc.store.records.cluster import MinuteRow
from toc.store.servers.shards import Answers
from toc.store.tasks.scan import OverdueRows, Scans, StoredCount

# What the console changes: by role, only what was confirmed, and with the reason at its field if refused.

TOPIC, OTHER = "test.sync", "test.doomed"
PATH = {"topic": TOPIC, "job_id": "1234567", "name": "nobody", "host": "nobody", "slot": f"{TOPIC}_0"}


def press(browser: Browser, page: Shown, **typed: str) -> Shown:
    """Send the one form of a page, as it stands and with what is typed."""
    forms = re.findall(
        r'<form class="fields" method="post" action="/console([^"]+)">(.*?)</form>', page.html, re.S
    )
    assert len(forms) == 1, page.text
    ((action, inside),) = forms
    values: dict[str, str] = {}
    for tag in re.findall(r"<input[^>]*>", inside):
        found = dict(re.findall(r'(\w+)="([^"]*)"', tag))
        if found.get("type") != "checkbox":
            values[found["name"]] = unescape(found["value"])
    for name, options in re.findall(r'<select id="[^"]*" name="(\w+)".*?>(.*?)</select>', inside, re.S):
        chosen = re.findall(r"<option selected>(.*?)</option>", options)
        values[name] = chosen[0] if chosen else ""
    csrf = values.pop("csrf")
    return browser.post(action, {**values, **typed}, csrf=csrf)


def offers(page: Shown) -> set[str]:
    """The actions that a page offers."""
    return {found for link in page.links() if (found := link.partition("?")[0]).startswith("/console/do/")}


def follow(browser: Browser, answer: Shown) -> Shown:
    assert answer.status == 303, answer.text
    return browser.get(answer.headers["location"].removeprefix("/console"))


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
def test_an_action_is_for_the_roles_of_its_call(shared: Gateway, act: Act) -> None:
    shared.make_token(f"only-{act.name}", "admin", topics=("nothing.*",))
    form = {name: PATH[name] for name in act.in_path} | {"sure": "yes", "topic": "nothing.there"}
    for role in ("produce", "consume", "read", "operate"):
        browser = Browser(shared, role)
        allowed = Role(role) in act.http.access.roles
        assert (browser.get(f"/do/{act.name}?topic=x").status == 403) is not allowed, role
        if not allowed:
            refused = browser.post(f"/do/{act.name}", form)
            assert (refused.status, "needs an access token with the role" in refused.text) == (403, True)
    narrow = Browser(shared, f"only-{act.name}")
    refused = narrow.post(f"/do/{act.name}", {**form, **PATH})
    assert refused.status in (403, 404, 409, 422), refused.text
    if act.http.access.cluster:
        assert refused.status == 403


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name)
def test_an_action_needs_the_token_of_the_login(shared: Gateway, act: Act) -> None:
    browser = Browser(shared)
    for csrf in ("", "x" * 64):
        answer = browser.post(f"/do/{act.name}", {**PATH, "sure": "yes"}, csrf=csrf)
        assert (answer.status, "form is of another login" in answer.text) == (403, True)
    assert browser.post(f"/do/{act.name}", PATH, Sec_Fetch_Site="cross-site").status == 403


def test_a_task_is_created_moved_and_cancelled(shared: Gateway) -> None:
    browser, reader = Browser(shared, "produce"), Browser(shared, "read")
    form = browser.get(f"/do/submit?topic={TOPIC}")
    refused = press(browser, form, biz_id="order-1", delay="soon")
    assert refused.status == 422
    assert 'aria-invalid="true"' in refused.html
    assert re.search(r'id="f-delay-error"><bdi>Input should be a valid number', refused.html)
    assert 'value="order-1"' in refused.html, "what was typed stays"
    page = follow(browser, press(browser, form, biz_id="order-1", delay="2h", attribute='{"a": "<b>"}'))
    job_id = page.text.split("Task ")[1].split()[0]
    row = shared.system.row(int(job_id))
    assert (row.biz_key, row.status) == ("order-1", TaskStatus.PENDING)
    assert offers(page) == {"/console/do/cancel-task", "/console/do/reschedule-task"}
    assert offers(reader.get(f"/tasks/{job_id}")) == set()

    form = browser.get(f"/do/reschedule-task?job_id={job_id}")
    nothing = press(browser, form)
    assert (nothing.status, "give a delay or an action_time" in nothing.text) == (422, True)
    later = (datetime.now(UTC) + timedelta(days=1)).replace(microsecond=0)
    assert "no try has started" in press(browser, form, action_time=later.isoformat()).text
    assert shared.system.row(int(job_id)).action_time == later.timestamp() * 1000

    form = browser.get(f"/do/cancel-task?job_id={job_id}")
    assert shared.system.row(int(job_id)).status == TaskStatus.PENDING, "a link changes nothing"
    assert "no try has started" in press(browser, form).text
    assert shared.system.row(int(job_id)).status == TaskStatus.CANCELLED


def test_a_topic_is_paused_altered_and_resumed(shared: Gateway) -> None:
    browser, store = Browser(shared, "operate"), shared.system.center.store
    page = browser.get(f"/topics/{TOPIC}")
    assert offers(page) == {"/console/do/pause-topic", "/console/do/alter-topic"}
    page = follow(browser, press(browser, browser.get(f"/do/pause-topic?topic={TOPIC}")))
    topic = known(store.topics.get(TOPIC))
    assert (topic.paused, topic.paused_by) == (True, "operate")
    assert "Paused by\noperate" in page.text
    assert shared.call("POST", f"/v1/topics/{TOPIC}:pause", {}).body["paused_by"] == "operate"
    assert "/console/do/resume-topic" in offers(page)

    form = browser.get(f"/do/alter-topic?topic={TOPIC}")
    assert "Changes\n-\nBack" in press(browser, form, retries=str(topic.retries)).text
    shown = press(browser, form, retries="7", max_runtime="900")
    assert f"Retries\n{topic.retries}\n7" in shown.text
    assert store.topics.get(TOPIC) == topic, "nothing was confirmed"
    store.topics.alter(TOPIC, retries=5)
    changed = press(browser, shown)
    assert (changed.status, "has changed since it was shown" in changed.text) == (409, True)
    assert "Retries\n5\n7" in changed.text
    page = follow(browser, press(browser, changed))
    altered = known(store.topics.get(TOPIC))
    assert (altered.retries, altered.max_runtime, altered.paused) == (7, 900, True)
    follow(browser, press(browser, browser.get(f"/do/resume-topic?topic={TOPIC}"), rate="100"))
    resumed = known(store.topics.get(TOPIC))
    assert (resumed.paused, resumed.resume_rate) == (False, 100)


@pytest.mark.parametrize(
    "act", [act for act in ACTS if act.at in ("tasks", "dead")], ids=lambda act: act.name
)
def test_what_all_that_match_are_is_what_the_page_shows(shared: Gateway, act: Act) -> None:
    filters = BY_NAME[f"GET /v1/{act.at}"].query.model_fields.keys() - {"status", "newest", "limit", "next"}
    assert known(act.http.body).model_fields.keys() >= filters
    browser = Browser(shared, "operate")
    page = browser.get(f"/{act.at}?topic={TOPIC}&error=quota")
    (link,) = [one for one in page.links() if f"/{act.name}?" in one]
    more = {"delay": "4h"} if act.name == "reschedule-all" else {}
    shown = press(browser, browser.get(link.removeprefix("/console")), **more)
    assert f"0 tasks of {TOPIC} match" in shown.text
    assert "Error\nquota" in shown.text
    refused = browser.post(f"/do/{act.name}", {"topic": TOPIC, "eror": "quota", **more})
    assert refused.status == 422, "what it does not know it does not leave out"


@pytest.mark.parametrize(("name", "since"), [("cancel-all", "Due"), ("redrive-all", "Died")])
def test_a_bulk_action_speaks_of_its_own_tasks(shared: Gateway, name: str, since: str) -> None:
    page = Browser(shared, "operate").get(f"/do/{name}?biz_id=4711").text
    assert f"{since} from this time on." in page
    assert "Due, or dead" not in page
    assert "of a topic that match" not in page, "without a topic it is about all of the biz_id"


def test_no_host_is_chosen_for_whoever_drains_one(shared: Gateway) -> None:
    browser = Browser(shared, "operate")
    form = browser.get("/do/drain")
    assert re.search(r'<select id="f-host"[^>]*required[^>]*>\s*<option value="">', form.html)
    assert press(browser, form).status == 422


def test_a_token_is_shown_once_and_revoked(shared: Gateway) -> None:
    browser = Browser(shared)
    form = browser.get("/do/create-token")
    assert '<input type="text" id="f-roles"' in form.html, "it takes several"
    made = press(browser, form, name="of-console", roles="read, values", topics="shop.*, a.*", expires="1h")
    (secret,) = re.findall(r"toc_[\w-]+", made.text)
    assert "read, values" in made.text
    assert made.headers["cache-control"] == "no-store"
    assert until(lambda: shared.call("GET", "/v1/topics", token=secret).status == 200)
    assert "of-console" in browser.get("/tokens").text
    assert secret not in browser.get("/tokens").html + shared.told()
    follow(browser, press(browser, browser.get("/do/revoke-token"), name="of-console"))
    assert until(lambda: shared.call("GET", "/v1/topics", token=secret).status == 401)
    narrow = Browser(shared, "sync-only")
    refused = press(narrow, narrow.get("/do/create-token"), name="wide", roles="admin", topics="*")
    assert (refused.status, "cannot grant topics *" in refused.text) == (403, True)


# --- servers that are away


@pytest.fixture
def through_proxy(new_system: NewSystem, mariadb: MariaDB) -> Iterator[tuple[Gateway, Proxy]]:
    if secured.SECURED:
        pytest.skip("a proxy must be able to hang up")
    with Proxy(mariadb.port) as proxy:
        system = new_system(database_urls=[through(proxy, mariadb.url)])
        system.create_topics()
        with Gateway(system) as gateway:
            yield gateway, proxy
            proxy.accept()


def test_without_a_database_nothing_changes_and_text_stays(through_proxy: tuple[Gateway, Proxy]) -> None:
    gateway, proxy = through_proxy
    browser, job_id = Browser(gateway), gateway.submit(biz_id=1).body["job_id"]
    forms = {
        "cancel-task": browser.get(f"/do/cancel-task?job_id={job_id}"),
        "pause-topic": browser.get(f"/do/pause-topic?topic={TOPIC}"),
        "cancel-all": press(browser, browser.get(f"/do/cancel-all?topic={TOPIC}")),
    }
    proxy.refuse()
    for name, form in forms.items():
        answer = press(browser, form, **({"confirm": TOPIC} if name == "cancel-all" else {}))
        assert answer.status == 503, (name, answer.text)
        assert "the database is out of reach; nothing was acknowledged" in answer.text
        assert f"/console/do/{name}" in answer.html, "its form is there to try again"
        forms[name] = answer
    proxy.accept()
    assert until(lambda: gateway.call("GET", f"/v1/tasks/{job_id}").status == 200)
    assert not known(gateway.system.center.store.topics.get(TOPIC)).paused
    assert gateway.system.row(int(job_id)).status == TaskStatus.PENDING
    assert gateway.system.center.store.bulk.list(1) == []
    assert until(lambda: press(browser, forms["cancel-task"]).status == 200)
    assert gateway.system.row(int(job_id)).status == TaskStatus.CANCELLED


# The console under attack: nobody who may only look holds up others, or learns what is not for him.


class Served(NamedTuple):
    """A console in this process, and a login."""

    service: Service
    port: int
    session: Session
    cookie: str

    def ask(self, path: str, form: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Open a page, or send a form."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = urlencode({"csrf": self.session.csrf, **form}) if form else None
        headers = {"Cookie": self.cookie, "Content-Type": FORM}
        connection.request("POST" if form else "GET", path, body, headers)
        answer = connection.getresponse()
        found = answer.status, answer.read()
        connection.close()
        return found


@asynccontextmanager
async def serving(center: TimeoutCenter, secret: str) -> AsyncIterator[Served]:
    """Serve the console to whoever logs in with an access token."""
    book = TokenBook(center.store.tokens, center.clock)
    book.run_once()
    key = center.store.identity.lease_secret()
    service, sessions = Service(center, book, key), Sessions(book, center.clock, key)
    cookie = f"{COOKIE}={sessions.begin(secret)}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http_server = server(App(service, Console(service, key)), Crowd(), shutdown_deadline=1)
        served = asyncio.create_task(http_server.serve([listener]))
        try:
            yield Served(service, listener.getsockname()[1], known(sessions.find(cookie)), cookie)
        finally:
            http_server.should_exit = True
            await served
            await service.close()


def test_a_page_that_is_long_to_draw_delays_nobody(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    center = system.center
    made = create_token(center, "reads", roles=[Role.READ], topics=["*"], by="test")
    center.put(NewTask("test.sync", 1, 3600))
    drawing, answered, cell = threading.Event(), threading.Event(), Column.cell
    in_time: list[bool] = []

    def slow(self: Column, record: Any) -> Any:
        drawing.set()
        in_time.append(all(in_time) and answered.wait(20))
        return cell(self, record)

    monkeypatch.setattr(Column, "cell", slow)

    async def steps() -> None:
        async with serving(center, made.secret) as console:
            try:
                page = asyncio.create_task(asyncio.to_thread(console.ask, "/console/tasks"))
                assert await asyncio.to_thread(drawing.wait, 60), "no page is drawn"
                assert (await asyncio.to_thread(console.ask, "/healthz"))[0] == 200
                answered.set()
                status, html = await page
                assert status == 200
                assert b"test.sync" in html
            finally:
                answered.set()

    asyncio.run(steps())
    assert all(in_time), "nothing else was answered while the page was drawn"


def test_what_a_form_has_done_is_told_however_many_pages_wait(system: System) -> None:
    center = system.center
    boss = create_token(center, "boss", roles=[Role.ADMIN], topics=["*"], by="test")

    async def steps() -> None:
        async with serving(center, boss.secret) as console:
            console.service._lines["pages"] = Line("pages", most=0)
            assert (await asyncio.to_thread(console.ask, "/console/tasks"))[0] == 503
            form = {"name": "new", "roles": "read", "topics": "*"}
            status, html = await asyncio.to_thread(console.ask, "/console/do/create-token", form)
            assert (status, b"toc_" in html) == (200, True)

    asyncio.run(steps())


def test_minutes_beyond_what_workers_have_started_stand_out(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    center = system.center
    reads = create_token(center, "reads", roles=[Role.READ], topics=["*"], by="test")
    now = center.clock.now_ms()
    first = now // MINUTE_MS + 5
    counts = StoredCount("minutes", 44_000, Counted(first, {OTHERS: [0, 700, 750, 701, 900]}))
    hours = StoredCount("hours", 632_000, Counted(now // 3_600_000, {}))
    table = Answers({0: [counts, hours]}, {})
    monkeypatch.setattr(center.store.due_counts, "kept", lambda _tables: table)
    minute = now // MINUTE_MS * MINUTE_MS
    lateness = [0] * (len(BOUNDS) + 1)
    lateness[3], lateness[BOUNDS.index(5)] = 4, 1
    starts = Minute({TOPIC: [5, 0, 0, 0, *lateness]}, 700)
    did = {minute - 2 * MINUTE_MS: starts, minute: Minute({}, 700)}
    center.store.minutes.keep([MinuteRow(at, "h1.a", write(one)) for at, one in did.items()])

    async def steps() -> None:
        async with serving(center, reads.secret) as console:
            _, html = await asyncio.to_thread(console.ask, "/console/")
            assert re.search(rb'data-limit="700" data-values="[^"]*0,700,750,701,900,0', html), html
            assert b">Counted as scheduled<" in html, "not all that is: within the horizon, or the first rows"
            ages = re.findall(rb"<h2>Due in the next (\w+)</h2>\s*<p[^>]*>Counted up to ([^,]*) ago,", html)
            far = b"10 min 32 s"
            assert ages == [(b"hour", b"44 s"), (b"day", far), (b"week", far)], "each has an age of its own"
            drawn = [values.count(b",") + 1 for values in re.findall(rb'data-values="([^"]*)"', html)]
            assert drawn == [60, 24, 168]
            heat = r'data-start="(\d+)" data-bounds="([^"]*)" data-minutes="([^"]*)"'
            ((began, bounds, rows),) = re.findall(heat, html.decode())
            assert bounds == ",".join(map(str, BOUNDS))
            counted = [[int(count) for count in row.split(",")] for row in rows.split(";")]
            assert len(counted) == KEPT
            at = {int(began) + 60 * n: row for n, row in enumerate(counted) if any(row)}
            assert at == {minute // 1000 - 120: lateness}
            assert b"5 starts, 1 of them more than 1 s late." in html

    asyncio.run(steps())
    found = show.perform(Doing(center, "ann", show.right), {})
    assert [one["due"] for one in found["beyond"]] == [750, 701, 900]
    assert [one["at"] for one in found["beyond"]] == [instant((first + n) * MINUTE_MS) for n in (1, 2, 3)]


def test_of_tables_that_do_not_answer_nobody_says_that_nothing_is_late(
    system: System, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    center = system.center
    reads = create_token(center, "reads", roles=[Role.READ], topics=["*"], by="test")
    away = OverdueRows([], False, {3: StoreUnavailable(f"{SERVER} away")})
    monkeypatch.setattr(Scans, "overdue", lambda *_, **__: away)
    record = late.perform(Doing(center, "ann", late.right), {"limit": 10})
    missing = {"table": center.store.name_of(3), "age": None, "error": f"{SERVER} away"}
    assert (record["missing"], record["more_waiting"]) == ([missing], False)
    print_late(record, as_json=False)
    said = capsys.readouterr().err
    assert f"missing: {missing['table']}: {SERVER} away" in said
    assert "no task was late" not in said
    assert "there was more" not in said
    token = next(one for one in center.store.tokens.list() if one.name == "reads")
    scoped = late.perform(Doing(center, "b", late.right, replace(token, topics=("a.*",))), {"limit": 10})
    assert SERVER not in str(scoped["missing"])

    async def steps() -> None:
        async with serving(center, reads.secret) as console:
            _, html = await asyncio.to_thread(console.ask, "/console/late")
            assert b"1 tables are not, or not fully, in these numbers" in html
            assert b"No task is late now" not in html

    asyncio.run(steps())


SERVER = "db1.internal:3306"
OWN = {
    *(Cause.STORED_LATE, Cause.PAUSED, Cause.CLOCK, Cause.HALTED, Cause.RESUME_RATE, Cause.CONCURRENCY),
    *(Cause.EVENT_LOOP, Cause.BACKLOG, Cause.NO_CONSUMER, Cause.TTR, Cause.TARGET, Cause.BACKOFF),
    *(Cause.MISFIT, Cause.UNKNOWN),
}
"""Causes whose evidence is of the task, its topic and clocks alone."""


def test_who_sees_some_topics_is_told_of_no_server(shared: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    center, now = shared.system.center, shared.system.center.clock.now_ms()
    job_id = int(shared.submit("test.sync", biz_id="late").body["job_id"])
    causes = [cause for cause in Cause if cause not in OWN]
    for n, cause in enumerate(causes, 1):
        episode = Episode(n, "test.sync", cause, "w", now - 9000, now, now, 1, 9000, job_id, f"{SERVER} away")
        center.store.episodes.write(episode)
    spans = [Span(cause, now - 9000 + n, now - 8000 + n, f"{SERVER} away") for n, cause in enumerate(causes)]
    server = center.store._shards.servers[center.store.server_of(job_id)]
    due, ended = server.instant(now - 9000), server.instant(now)
    sets = f"status={TaskStatus.PROCESSED:d},action_time={due},next_time={ended},late=%s"
    change(center.store, job_id, sets, LateStart(0, now - 9000, now, spans, now - 20, now - 10).line())
    shared.make_token("scoped", "read", topics=("test.*",))
    shared.make_token("whole", "read")
    away = Answers[Any]({}, {0: StoreUnavailable(f"{SERVER} away")})
    monkeypatch.setattr(center.store.due_counts, "kept", lambda _tables: away)
    for name, told in (("whole", True), ("scoped", False)):
        for path in (f"/v1/tasks/{job_id}", "/v1/late?topic=test.sync"):
            found = shared.call("GET", path, token=name)
            assert found.body.get("late") or found.body.get("episodes"), (path, found.body)
            assert (SERVER in str(found.body)) is told, (name, path)
        browser = Browser(shared, name)
        for path in (f"/tasks/{job_id}", "/late"):
            assert (SERVER in browser.get(path).html) is told, (name, path)
        life = browser.get(f"/tasks/{job_id}").html.partition("Its life")[2]
        steps = ("stored", "due", "prepared", "row read", "started", "processed")
        assert all(re.search(rf">\s*{step}\s*<", life) for step in steps), life
        token = next(one for one in center.store.tokens.list() if one.name == name)
        missing = show.do(Doing(center, name, show.right, token))["missing"]
        assert len(missing) == 1
        assert (SERVER in str(missing)) is told
