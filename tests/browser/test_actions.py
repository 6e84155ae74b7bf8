"""Each action of the console, made in a real browser by the keyboard alone, from the page that offers it."""

import re
from collections import Counter

import pytest
from harness.chromium import Visitor
from harness.gateway import Gateway
from harness.patience import until
from harness.system import System
from playwright.sync_api import Browser

from toc.console.pages.acts import ACTS, BY_ACT
from toc.model.verdict import Failure
from toc.store.records.targets import new_key

SYNC, DOOMED = "test.sync", "test.doomed"
HOSTS = {"host-a", "host-b"}
HERE = ""
"""The page that the step before led to."""
OF_TOPIC, DEAD = f"/topics/{SYNC}", f"/dead?topic={DOOMED}&error=luck"
NIGHTLY, SHOP, HOST = "/schedules/nightly", "/targets/shop", {"host": "host-b"}
STEPS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("submit", OF_TOPIC, {"biz_id": "order-1", "delay": "2h"}, "order-1"),
    ("reschedule-task", HERE, {"delay": "3h"}, "It has the new deadline; no try has started."),
    ("cancel-task", "/tasks/{pending}", {}, "It is cancelled; no try has started."),
    ("redrive-task", "/tasks/{dead}", {}, "This was done."),
    ("pause-topic", OF_TOPIC, {}, "Paused by"),
    ("alter-topic", HERE, {"retries": "7"}, "Tries\n7"),
    ("resume-topic", HERE, {"rate": "9"}, "Resume rate\n9"),
    ("reschedule-all", f"/tasks?topic={SYNC}&biz_id=order-2", {"delay": "4h"}, "new deadline; no try"),
    ("cancel-all", f"/tasks?topic={SYNC}&biz_id=order-2", {}, "It is cancelled; no try has started."),
    ("redrive-all", DEAD, {"rate": "1"}, "Asked to redrive: 199"),
    ("stop-job", HERE, {}, "It can go on where it stopped."),
    ("resume-job", HERE, {}, "A gateway works on it."),
    ("purge-all", f"/dead?topic={DOOMED}&error=bad", {}, "It is gone."),
    ("drain", "/workers", HOST, "drain\thost-b"),
    ("undrain", HERE, HOST, "Drains, weights and pins\n\nNone."),
    ("weigh", HERE, {**HOST, "weight": "2"}, "weight\thost-b"),
    ("unweigh", HERE, HOST, "Drains, weights and pins\n\nNone."),
    ("pin", HERE, {"slot": f"{SYNC}_0", "target": "host-a"}, "pin\ttest.sync_0"),
    ("unpin", HERE, {"slot": f"{SYNC}_0"}, "Drains, weights and pins\n\nNone."),
    ("rebalance", HERE, {}, "This was done."),
    ("pause-schedule", NIGHTLY, {}, "Paused\nyes"),
    ("resume-schedule", HERE, {}, "Paused\nno"),
    ("trigger-schedule", HERE, {}, "nightly"),
    ("test-target", SHOP, {}, "This failed."),
    ("pause-target", SHOP, {"why": "it moves"}, "it moves"),
    ("resume-target", HERE, {}, "Paused\nno"),
    ("create-token", "/tokens", {"name": "new", "roles": "read", "topics": "*"}, "Keep it"),
    ("revoke-token", "/tokens", {"name": "new"}, "new"),
)
"""An action, the page that offers it, what is typed, and what is to be read then."""


def make(visitor: Visitor, name: str, typed: dict[str, str]) -> None:
    """Choose an action of the page, fill in its form, and confirm what is shown."""
    page = visitor.page
    visitor.press(page.locator(f"nav.acts a[href*='/do/{name}']").first)
    for field, value in typed.items():
        one = page.locator(f"form.fields [name={field}]:not([type=hidden])")
        if one.evaluate("one => one.tagName") == "SELECT":
            one.select_option(value)
        else:
            one.fill(value)
    send = page.locator("form.fields button")
    visitor.press(send)
    if BY_ACT[name].previews:
        confirm = page.locator("form.fields [name=confirm]")
        if confirm.count():
            topic = re.search(r"name of the topic, ([\w.]+)\.", visitor.text)
            assert topic
            confirm.fill(topic[1])
        visitor.press(send)


def gathered(gateway: Gateway, topic: str) -> dict[str, int]:
    """How many slots of a topic each host's workers have that hold what they are assigned."""
    slots = gateway.call("GET", f"/v1/slots?topic={topic}").body["slots"]
    return Counter(one["owner"][: len("host-a")] for one in slots if one["state"] == "owned")


def gather(gateway: Gateway, topic: str) -> None:
    """Have one host own all slots of a topic, where balance leaves them."""
    slots = [f"/v1/slots/{topic}_{number}" for number in range(8)]
    for slot in slots:
        assert gateway.call("POST", f"{slot}:pin", {"target": "host-a"}).status == 200
    assert until(lambda: gathered(gateway, topic) == {"host-a": 8})
    for slot in slots:
        assert gateway.call("POST", f"{slot}:unpin").status == 200


@pytest.mark.slow
def test_every_action_is_made_by_keyboard_in_a_browser(hosts: System, browser: Browser) -> None:
    assert {name for name, *_ in STEPS} == {act.name for act in ACTS}
    hosts.create_topics(retries=2)
    for host in sorted(HOSTS):
        hosts.start(host, processes=1)
    center = hosts.center
    env = {"TOC_SECRET_KEY": new_key(), "TOC_WEBHOOK_ALLOW": "http://127.0.0.1:9"}
    with Gateway(hosts, env=env) as gateway:
        pending = center.submit(SYNC, biz_id="order-0", delay=7200)
        center.submit(SYNC, biz_id="order-2", delay=7200)
        dead = [center.submit(DOOMED, biz_id=number, delay=7200) for number in range(201)]
        now = center.clock.now_ms()
        told = {job_id: "no luck" if job_id != dead[-1] else "bad" for job_id in dead}
        center.store.die([Failure(job_id, 0, 0, 0, 2, 0, now, why) for job_id, why in told.items()])
        schedule = {"name": "nightly", "topic": SYNC, "cron": "0 3 * * *"}
        assert gateway.call("POST", "/v1/schedules", schedule).status == 201
        target = {"name": "shop", "url": "http://127.0.0.1:9/"}
        assert gateway.call("POST", "/v1/targets", target).status == 201
        workers = "GET", "/v1/workers"
        assert until(lambda: {one["host"] for one in gateway.call(*workers).body["workers"]} >= HOSTS)
        visitor = Visitor(browser, gateway)
        for name, path, typed, said in STEPS:
            if name == "rebalance":
                gather(gateway, SYNC)
            if path:
                visitor.go(path.format(pending=pending, dead=dead[0]))
            make(visitor, name, typed)
            visitor.wait("(said) => document.body.innerText.includes(said)", said)
            print(name, visitor.page.url)
            if name == "rebalance":
                assert until(lambda: gathered(gateway, SYNC) == dict.fromkeys(HOSTS, 4))
        assert visitor.complaints == []
        visitor.close()
