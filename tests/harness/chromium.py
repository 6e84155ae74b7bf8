"""Debian's Chromium at a gateway's console: what a page looks like, does and complains of.

While Playwright runs, its thread has a running event loop: no other test of the module may start one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, ViewportSize, sync_playwright

from harness.gateway import Gateway
from harness.patience import until
from harness.programs import need
from harness.rows import known

PHONE = ViewportSize(width=390, height=844)
DESK = ViewportSize(width=1280, height=800)
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
"""What WCAG 2.2 wants on the levels A and AA, as far as a program can tell."""
FOCUSABLE = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']"
IN_A_PAGE = """
() => {
    const one = document.activeElement
    if (one === null || one === document.body) return null
    const style = getComputedStyle(one), box = one.getBoundingClientRect()
    return {
        place: [...document.querySelectorAll(FOCUSABLE)].indexOf(one),
        name: one.outerHTML.slice(0, 200),
        outlined: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
        seen: box.width > 0 && box.right > 0 && box.bottom > 0
            && box.left < innerWidth && box.top < innerHeight,
    }
}
""".replace("FOCUSABLE", f'"{FOCUSABLE}"')


COUNT_UPDATES = (
    "addEventListener('htmx:sse:after:message', () => { window.updates = (window.updates ?? 0) + 1 })"
)
"""How often the stream of a page has brought it up to date since it was loaded."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window; each visitor is a profile of its own."""
    program = need("chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """Somebody with a browser, logged in by one of the gateway's tokens; None leaves a stranger.

    ``complaints``: what the browser has said of the pages: errors of scripts, what the policy forbade; and
    what scripts have asked for, streams apart.
    ``streams``: the requests that keep open pages up to date and have not ended.
    """

    def __init__(self, browser: Browser, gateway: Gateway, token: str | None = "all", **options: Any) -> None:
        self.gateway = gateway
        self.complaints: list[str] = []
        self.streams: list[Request] = []
        base = f"http://127.0.0.1:{gateway.port}"  # where browsers keep a cookie for https only
        given = {"viewport": DESK, "base_url": base, "reduced_motion": "reduce", **options}
        self.context = browser.new_context(**given)
        self.context.set_default_timeout(60_000)
        self.context.add_init_script(COUNT_UPDATES)
        self.page = self.open()
        if token is not None:
            self.log_in(gateway.tokens.get(token, token))

    def open(self) -> Page:
        """Open one more tab."""
        page = self.context.new_page()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._began)
        page.on("requestfinished", self._ended)
        page.on("requestfailed", self._ended)
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        return page

    def _began(self, request: Request) -> None:
        if "/console/live?" in request.url:
            self.streams.append(request)
        elif request.resource_type in ("fetch", "xhr"):
            self.complaints.append(f"asked for {request.url}")

    def _ended(self, request: Request) -> None:
        if request in self.streams:
            self.streams.remove(request)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "the server responded with a status" not in message.text:
            self.complaints.append(f"{message.type}: {message.text}")

    def log_in(self, secret: str) -> None:
        """Log in as a person does who has no mouse."""
        self.go("/login")
        self.wait("document.activeElement.id === 'token'")
        self.page.keyboard.type(secret)
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")
        assert not self.page.url.endswith("/login"), self.text

    def go(self, path: str) -> int:
        """Open a page of the console; returns its status."""
        return known(self.page.goto(f"/console{path}")).status

    def press(self, what: Locator) -> None:
        """Follow a link, or send a form, by the keyboard."""
        what.focus()
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")

    @property
    def text(self) -> str:
        """What is to be read on the page."""
        return self.page.inner_text("body")

    def wait(self, condition: str, argument: Any = None) -> None:
        """Wait until an expression of JavaScript holds in the page."""
        # Not wait_for_function, whose own script the policy of our pages forbids.
        held = until(lambda: bool(self.page.evaluate(condition, argument)))
        assert held, f"{condition}\n{self.text}"

    def violations(self, *rules: str) -> list[str]:
        """What axe-core finds wrong on the page: by these rules, or all of WCAG A and AA."""
        if not self.page.evaluate("typeof axe === 'object'"):
            self.page.evaluate(_axe())
        only = {"type": "rule", "values": list(rules)} if rules else {"type": "tag", "values": RULES}
        options = {"runOnly": only, "resultTypes": ["violations"], "elementRef": False}
        found = self.page.evaluate("(options) => axe.run(document, options)", options)
        return [
            f"{one['id']}: {node['html'][:200]}: {node['failureSummary']}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    def overflow(self) -> list[str]:
        """The elements that stand out of the page at the right, if it can be scrolled there."""
        found: list[str] = self.page.evaluate(
            """() => document.scrollingElement.scrollWidth <= innerWidth ? [] : [
                `${document.scrollingElement.scrollWidth} px`,
                ...[...document.body.querySelectorAll("*")]
                    .filter(one => one.getBoundingClientRect().right > innerWidth)
                    .map(one => one.outerHTML.slice(0, 120))]"""
        )
        return found

    def tab_through(self, most: int = 200) -> list[dict[str, Any]]:
        """Press Tab from the top until the focus has left the page; returns what had it, in order."""
        self.page.evaluate(
            """() => {
                const start = document.createElement("i")
                start.tabIndex = -1
                start.onblur = () => start.remove()
                document.body.prepend(start)
                start.focus()
            }"""
        )
        found: list[dict[str, Any]] = []
        for _ in range(most):
            self.page.keyboard.press("Tab")
            one = self.page.evaluate(IN_A_PAGE)
            if one is None or (found and one["place"] <= found[0]["place"]):
                return found
            found.append(one)
        return found

    def hide(self, hidden: bool = True) -> None:
        """Have the page see that it is hidden, as behind another tab, or that it is not."""
        self.page.evaluate(
            """(hidden) => {
                Object.defineProperty(document, "hidden", { value: hidden, configurable: true })
                Object.defineProperty(document, "visibilityState", {
                    value: hidden ? "hidden" : "visible", configurable: true })
                document.dispatchEvent(new Event("visibilitychange"))
            }""",
            hidden,
        )

    def beat(self) -> int:
        """How many streams are open, once the browser has told what it has to tell."""
        self.page.wait_for_timeout(50)
        return len(self.streams)

    def close(self) -> None:
        """Close the browser's profile."""
        self.context.close()


def _axe() -> str:
    return (files("axe_playwright_python") / "axe.min.js").read_text()
