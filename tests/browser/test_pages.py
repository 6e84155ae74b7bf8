"""Each page of the console in a real browser: readable, usable by keyboard, harmless whatever users wrote."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest
from browser.conftest import Visit
from harness.chromium import DESK, FOCUSABLE, PHONE, Visitor
from harness.gateway import Gateway
from harness.patience import until
from playwright.sync_api import Browser

from toc.console.pages import PAGES
from toc.console.pages.acts import ACTS
from toc.model.topic import Delivery, Topic

TEXT = (
    "<script>hit=1</script><img src=x onerror=hit=1><b hx-get=/console hx-trigger=load>"
    "\"'><a href=javascript:hit=1>&lt;{{7*7}}{% raw %}\u202egnp\u2066\N{PILE OF POO}\u200d\ufe0f"
)
"""What users may write where a text is free."""
TURNS = re.compile("[\0\x1b\u202a-\u202e\u2066-\u2069]")
"""What must not be on a page as it is: it turns the direction of what follows, or is no text."""
REFUSED = {
    "nothing": {},
    "do/submit?topic=hostile": {"biz_id": TEXT, "delay": TEXT},
    "late?cause=backlog": {"after": TEXT},
}
"""Pages that say why not, and what is typed into their form before it is sent."""
ODD = (
    *("tasks?biz_id={text}", "dead?topic=hostile&error=script", "audit?by={text}", "do/submit?topic={text}"),
    *("tasks/0", "tasks?status={text}", "topics/{text}", "schedules/{text}", "tasks?{text}=1", "do/{text}"),
)
FILES = {"tasks/{job_id}/body"}
"""Pages that are downloaded."""
FORMS = [f"do/{act.name}?topic=hostile&name=nightly&error={{text}}&biz_id={{text}}" for act in ACTS]
READ = [one.path for one in PAGES if one.method == "GET" and one.path not in FILES]
PAGES_SEEN = [
    *("", "tasks/{dead}", *REFUSED, FORMS[0], "what-if?topic=hostile&pause=600"),
    *(pytest.param(one, marks=pytest.mark.slow) for one in (*READ[1:], *FORMS[1:])),
]
DARK = [pytest.param(one, marks=() if one in ("", "dead", *REFUSED) else pytest.mark.slow) for one in READ]


@pytest.fixture(scope="module")
def values(gateway: Gateway) -> dict[str, str]:
    """Makes something of each kind with hostile texts; returns what pages name in their addresses."""
    gateway.system.center.store.topics.create(Topic("hostile", 600, 2, delivery=Delivery.PULL, retries=1))
    deep: Any = TEXT
    for _ in range(62):
        deep = [deep]
    attribute = {TEXT: deep, "n\0": "\0\x1b[2J\r\n"}

    def made(path: str, **body: Any) -> Any:
        answer = gateway.call("POST", f"/v1/{path}", body)
        assert answer.status in (200, 201), answer
        return answer.body

    assert until(lambda: gateway.call("GET", "/v1/topics/hostile").status == 200)
    pending = made(
        "topics/hostile/tasks", biz_id=TEXT, delay=9000, dedup_key=TEXT, attribute=attribute,
        body="<script>" * (1 << 17), content_type=f"text/html;{TEXT[:24]}",
    )["job_id"]  # fmt: skip
    dying = [
        made("topics/hostile/tasks", biz_id=f"{number}{TEXT}", delay=0.01)["job_id"] for number in range(3)
    ]
    while dying:
        for one in made("topics/hostile:pull", max=10, wait=10, ttr=60)["tasks"]:
            made("leases:nack", lease=one["lease"], dead=True, error=f"{TEXT}\0\n\u2028{TEXT * 100}")
            dead = dying.pop()
    gateway.call("POST", "/v1/tokens", {"name": TEXT, "roles": ["read"], "topics": ["*"]})  # into the audit
    made("schedules", name="nightly", topic="hostile", cron="30 2 * * *", zone="Europe/Berlin",
         attribute=attribute)  # fmt: skip
    made("targets", name="shop", url=f"http://127.0.0.1:9/{TEXT[:8]}?{TEXT[:8]}")
    made("topics/hostile/tasks", biz_id=f"bulk {TEXT}", delay=9000)
    job = made("bulk:cancel", topic="hostile", biz_id=f"bulk {TEXT}", tasks=1, confirm="hostile")
    return {
        "do/{act}": "do/alter-topic?topic=hostile", "bulk/{name}": f"bulk/{job['name']}",
        "{topic}": "hostile", "{job_id}": pending, "{dead}": dead, "{text}": quote(TEXT, safe=""),
        "schedules/{name}": "schedules/nightly", "targets/{name}": "targets/shop",
    }  # fmt: skip


def address(page: str, values: Mapping[str, str]) -> str:
    """The address of a page below /console, with something that there is."""
    for name, value in values.items():
        page = page.replace(name, value)
    assert "{" not in page, f"{page}: give it a value above"
    return f"/{page}"


@pytest.fixture(scope="module")
def admin(browser: Browser, gateway: Gateway) -> Iterator[Visitor]:
    """Somebody who may see every page."""
    one = Visitor(browser, gateway)
    yield one
    one.close()


@pytest.mark.parametrize("page", PAGES_SEEN)
def test_a_page_is_harmless_accessible_and_fits_a_phone(
    admin: Visitor, values: Mapping[str, str], page: str
) -> None:
    look(admin, values, page)
    assert admin.violations() == []
    check_harmless(admin)
    check_keyboard(admin)
    admin.page.set_viewport_size(PHONE)
    until(lambda: not admin.overflow())  # pictures are drawn anew
    assert admin.overflow() == []
    admin.page.set_viewport_size(DESK)
    assert admin.complaints == []


@pytest.mark.parametrize("page", DARK)
def test_a_page_can_be_read_in_the_dark(admin: Visitor, values: Mapping[str, str], page: str) -> None:
    admin.page.emulate_media(color_scheme="dark")
    try:
        look(admin, values, page)
        assert admin.violations("color-contrast") == []
    finally:
        admin.page.emulate_media(color_scheme="light")


def look(visitor: Visitor, values: Mapping[str, str], page: str) -> None:
    """Open a page; if it says why something was refused, have it do so."""
    visitor.complaints.clear()
    status = visitor.go(address(page, values))
    if typed := REFUSED.get(page):
        for name, text in typed.items():
            visitor.page.fill(f"[name={name}]", text)
        visitor.press(visitor.page.locator("form.fields button"))
        assert visitor.page.locator("[aria-invalid]").count() == 1
    elif page not in REFUSED:
        assert status == 200
        visitor.wait("!document.getElementById('live') || window.updates > 0")


def test_an_odd_address_is_harmless(admin: Visitor, values: Mapping[str, str]) -> None:
    admin.complaints.clear()
    for page in ODD:
        assert admin.go(address(page, values)) < 500, page
        check_harmless(admin)
    assert admin.complaints == []


def check_harmless(visitor: Visitor) -> None:
    """Nothing that users wrote is more than text."""
    page = visitor.page
    assert page.evaluate("typeof hit") == "undefined"
    alive = "body :is(script, img, b, iframe, object, embed, style, [onerror], [onload], [style], [hx-get])"
    assert page.locator(f"{alive}:not(.picture *)").count() == 0
    links = page.eval_on_selector_all(
        "[href], [src], [action]",
        "all => all.map(one => ['href', 'src', 'action'].map(name => one.getAttribute(name)).find(Boolean))",
    )
    assert [one for one in links if not one.startswith(("/console", "/docs#", "#main"))] == []
    assert not TURNS.search(page.title() + page.inner_text("body"))


INJECTED = """() => {
  const one = document.createElement("b");
  one.setAttribute("hx-get", "/console");
  one.setAttribute("hx-trigger", "load");
  document.querySelector("main").append(one);
  htmx.process(one);
}"""
BLOCKED = "error: htmx: [hx-csp] blocked <b>: no hx-nonce attribute {elt: b, reason: missing-nonce}"


def test_even_as_an_element_an_attribute_without_the_nonce_asks_for_nothing(visit: Visit) -> None:
    reader = visit("read")
    reader.go("")
    reader.wait("window.updates > 0")
    assert reader.complaints == []
    reader.page.evaluate(INJECTED)
    reader.wait("window.updates > 1")
    assert reader.complaints == [BLOCKED]


def check_keyboard(visitor: Visitor) -> None:
    """Tab leads through the page from top to bottom, and what has the focus can be seen.

    Hidden, a page has no stream: an update that brings a link would shift the places of those behind it.
    """
    visitor.hide()
    assert until(lambda: visitor.beat() == 0)
    found = visitor.tab_through()
    count = visitor.page.evaluate("(what) => document.querySelectorAll(what).length", FOCUSABLE)
    visitor.hide(False)
    assert [one["name"] for one in found if not (one["outlined"] and one["seen"])] == []
    assert [one["place"] for one in found] == list(range(count))
    assert "Skip to the content" in found[0]["name"]


def test_what_users_wrote_can_be_read(admin: Visitor, values: Mapping[str, str]) -> None:
    for page, shown in (
        ("tasks/{job_id}", "\"'><a href=javascript"),
        ("tasks/{dead}", "⟨U+202E⟩gnp"),
        ("dead", "<script>hit"),
        ("tasks?biz_id={text}", "<img src=x onerror=hit=1>"),
        ("bulk/{name}", "<script>hit=1"),
        ("audit", "<script>hit=1"),
        ("schedules/nightly", "<script>hit=1"),
    ):
        admin.go(address(page, values))
        assert shown in admin.text, page


def test_the_keyboard_is_enough(visit: Visit) -> None:
    stranger = visit(None)
    stranger.go("/topics")
    assert stranger.violations() == []
    check_keyboard(stranger)
    stranger.page.focus("#token")
    stranger.page.keyboard.type("toc_wrong")
    with stranger.page.expect_navigation():
        stranger.page.keyboard.press("Enter")
    assert "there is no such access token" in stranger.text
    assert stranger.violations() == []
    keys = stranger.page.keyboard
    keys.type(stranger.gateway.tokens["read"])
    with stranger.page.expect_navigation():
        keys.press("Enter")
    assert stranger.page.url.endswith("/console/topics")
    keys.press("Tab")
    keys.press("Enter")
    assert stranger.page.evaluate("document.activeElement.id") == "main"
    keys.press("Tab")
    assert stranger.page.evaluate("document.activeElement.closest('main') !== null")
    stranger.page.focus("text=Log out")
    with stranger.page.expect_navigation():
        keys.press("Space")
    assert stranger.page.url.endswith("/console/login")
    assert stranger.complaints == []


def test_a_browser_without_scripts_is_enough(visit: Visit, values: Mapping[str, str]) -> None:
    plain = visit("read", java_script_enabled=False)
    menu = plain.page.locator("nav a")
    names = menu.all_inner_texts()
    assert "Tasks" in names
    for name in names:
        plain.page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
        assert plain.page.locator("nav a[aria-current=page]").inner_text() == name
    plain.go("/tasks")
    plain.page.get_by_label("job_id").fill(values["{job_id}"])
    plain.page.get_by_role("button", name="Open").click()
    assert plain.page.get_by_role("heading", level=1).inner_text() == f"Task {values['{job_id}']}"
    plain.page.get_by_role("button", name="Log out").click()
    assert plain.go("/tasks") == 200
    assert "/login" in plain.page.url


def test_all_deadlines_of_an_order_are_cancelled_by_keyboard(visit: Visit, gateway: Gateway) -> None:
    topics = ("test.sync", "test.async", "test.sync")
    jobs = [gateway.submit(topic, biz_id="order 4711").body["job_id"] for topic in topics]
    other = gateway.submit("test.sync", biz_id="order 4712").body["job_id"]
    clerk = visit("operate")
    page = clerk.page
    clerk.go("/tasks?biz_id=order%204711")
    clerk.press(page.get_by_role("link", name="Cancel all that match"))
    clerk.press(page.get_by_role("button", name="Show what would change"))
    assert "3 tasks of all topics match" in clerk.text
    page.get_by_label("To confirm").fill("order 4712")
    clerk.press(page.get_by_role("button", name="Cancel all that match"))
    assert page.locator("[aria-invalid]").get_attribute("name") == "confirm"
    assert gateway.call("GET", f"/v1/tasks/{jobs[0]}").body["status"] == "pending"
    page.get_by_label("To confirm").fill("order 4711")
    clerk.press(page.get_by_role("button", name="Cancel all that match"))
    assert "/console/bulk/" in page.url
    clerk.wait("document.body.innerText.includes('no try has started')")  # without a reload
    states = [gateway.call("GET", f"/v1/tasks/{one}").body["status"] for one in (*jobs, other)]
    assert states == [*["cancelled"] * 3, "pending"]
    assert clerk.complaints == []


BUSY = """(limit) => {
  const {dataset} = document.querySelector(".picture:not(.heat)");
  Object.assign(dataset, {limit, values: dataset.values.replace(/^[0-9]+/, "750")});
  document.dispatchEvent(new Event("htmx:after:swap"));
  return document.querySelector(".picture:not(.heat)").innerText.includes("beyond the measured rate");
}"""


def test_a_minute_beyond_the_capacity_is_drawn_when_it_comes_and_goes(visit: Visit) -> None:
    reader = visit("read")
    reader.go("")
    reader.wait("document.querySelector('.picture .u-legend') !== null")
    reader.hide()  # as if the stream had brought these numbers
    for limit in ("", "749", "800", ""):
        assert reader.page.evaluate(BUSY, limit) is bool(limit)
    assert reader.page.locator(".picture:not(.heat)").first.locator("canvas").count() == 1
    assert reader.complaints == []


TWICE = """() => {
  const refused = [], form = document.querySelector("main form[method=post]");
  addEventListener("submit", (event) => refused.push(event.defaultPrevented));
  form.requestSubmit();
  form.requestSubmit();
  return refused;
}"""


def test_a_form_is_sent_once_and_again_by_whoever_comes_back(visit: Visit, gateway: Gateway) -> None:
    clerk = visit("all")
    clerk.go("/do/submit?topic=test.sync&biz_id=4713&delay=3600")
    for number in (1, 2):
        with clerk.page.expect_navigation(url="**/console/tasks/*"):
            assert clerk.page.evaluate(TWICE) == [False, True]
        assert len(gateway.call("GET", "/v1/tasks?biz_id=4713").body["tasks"]) == number
        clerk.page.go_back()
    assert clerk.complaints == []


def test_a_page_tells_its_age_and_has_one_stream_at_most_that_rests_while_it_is_hidden(visit: Visit) -> None:
    reader = visit("read")
    reader.go("/tasks")
    reader.wait("/Read [2-8] s ago\\./.test(document.body.innerText)")
    assert len(reader.streams) == 0
    reader.go("")
    reader.wait("window.updates > 1")
    assert len(reader.streams) == 1
    reader.go("/running")
    reader.wait("window.updates > 0")
    assert len(reader.streams) == 1  # that of the page before has ended
    reader.hide()
    assert until(lambda: reader.beat() == 0)
    reader.hide(False)
    assert until(lambda: reader.beat() == 1)
    reader.wait("window.updates > 1")
    assert reader.complaints == []
    reader.page.evaluate("window.stop()")
    reader.context.set_offline(True)
    reader.wait("/Read 1. s ago, and not brought up to date since/.test(document.body.innerText)")
