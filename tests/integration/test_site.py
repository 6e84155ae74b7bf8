"""The site that `make docs` builds: every link leads somewhere, and reading it needs no other host."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import toc
import toc.testing

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/docs"


class Page(HTMLParser):
    """What a page names, and what it can be named by."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src", "srcset", "poster") and value:
                (self.links if tag == "a" else self.loaded).append(value)


@pytest.mark.slow
def test_the_site_has_every_page_and_interface_and_stands_alone() -> None:
    built = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path: Page(path) for path in SITE.rglob("*.html")}
    wrong = defaultdict(list)
    for path, page in pages.items():
        near = [link for link in page.links if not re.match(r"(https?|mailto):", link)]
        for link in [*near, *page.loaded]:
            name, anchor = map(unquote, urldefrag(link))
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            known = not anchor or target not in pages or anchor in pages[target].ids
            if not (target.exists() and target.is_relative_to(SITE) and known):
                wrong[path.relative_to(SITE).as_posix()].append(link)
    assert wrong == {}
    styles = "".join(path.read_text() for path in SITE.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", styles) == []
    index = (SITE / "searchindex.js").read_text()
    assert {"docs/howto", "docs/api", "CHANGELOG"} <= set(re.findall(r'"([\w/-]+)"', index))

    names = {f"toc.{name}" for name in toc.__all__} | {f"toc.testing.{name}" for name in toc.testing.__all__}
    names |= {f"toc.{kind}.cancel_by_biz" for kind in ("TimeoutCenter", "AsyncTimeoutCenter")}
    assert names | {"toc.outbox.submit", "toc.outbox.drain"} <= pages[SITE / "docs/api.html"].ids

    listed = dict(re.findall(r"^- \[.+?\]\((.+?)\): (.+)$", (SITE / "llms.txt").read_text(), re.MULTILINE))
    assert all((SITE / path).exists() for path in listed)
    own = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))]
    assert {f"_sources/{path}" for path in own} < set(listed)
