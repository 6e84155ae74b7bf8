"""The console as a browser sees it, without running its scripts."""

import http.client
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html.parser import HTMLParser
from typing import NamedTuple
from urllib.parse import urlencode

from harness.gateway import Gateway

FORM = "application/x-www-form-urlencoded"


class Shown(NamedTuple):
    """A page."""

    status: int
    html: str
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        """What a reader sees, a line for each element."""
        seen = _Seen()
        seen.feed(self.html)
        return "\n".join(seen.found)

    def links(self) -> list[str]:
        """Where its links lead."""
        return [one.replace("&amp;", "&") for one in re.findall(r'<a [^>]*href="([^"]+)"', self.html)]


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.found.append(data.strip())


class Browser:
    """One browser at a gateway's console. ``token`` logs it in; None leaves it a stranger."""

    def __init__(self, gateway: Gateway, token: str | None = "all") -> None:
        self.gateway = gateway
        self.cookie = ""
        if token is not None:
            answer = self.log_in(gateway.tokens.get(token, token))
            assert answer.status == 303, answer.text

    def log_in(self, secret: str, following: str = "/console", **headers: str) -> Shown:
        """Send the login form, and keep the cookie."""
        answer = self._send("POST", "/console/login", {"token": secret, "next": following}, headers)
        if cookie := answer.headers.get("set-cookie"):
            self.cookie = cookie.partition(";")[0]
        return answer

    def get(self, path: str, **headers: str) -> Shown:
        """Open a page; ``path`` is that below /console."""
        return self._send("GET", f"/console{path}", None, headers)

    def post(
        self, path: str, form: Mapping[str, str] | None = None, *, csrf: str | None = None, **headers: str
    ) -> Shown:
        """Send a form, with the CSRF token of a page unless another is given."""
        token = self.csrf() if csrf is None else csrf
        return self._send("POST", f"/console{path}", {"csrf": token, **(form or {})}, headers)

    def csrf(self) -> str:
        """The token that forms of this login have."""
        found = re.search(r'name="csrf" value="(\w+)"', self.get("/nothing").html)
        assert found
        return found[1]

    def _send(self, method: str, path: str, form: Mapping[str, str] | None, more: Mapping[str, str]) -> Shown:
        with self.asked(method, path, form, more) as answer:
            html = answer.read().decode()
            return Shown(answer.status, html, {key.lower(): value for key, value in answer.headers.items()})

    @contextmanager
    def asked(
        self, method: str, path: str, form: Mapping[str, str] | None = None,
        more: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:  # fmt: skip
        """An answer that may not have ended."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.port, timeout=60)
        headers = {name.replace("_", "-"): value for name, value in (more or {}).items()}
        if self.cookie:
            headers["Cookie"] = self.cookie
        body = None if form is None else urlencode(form)
        if body is not None:
            headers.setdefault("Content-Type", FORM)
        try:
            connection.request(method, path, body, headers)
            yield connection.getresponse()
        finally:
            connection.close()
