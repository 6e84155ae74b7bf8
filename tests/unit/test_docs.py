"""Pages lead where they say, and what they show can be run."""

import re
import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

from reference_page import commands, written

from toc import Task, TimeoutCenter
from toc.gateway.app import CALLS
from toc.store.records.table import NamedTable
from toc.testing import Toc

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
REFERENCE = (ROOT / "docs/reference.md").read_text()
RUN = (ROOT / "docs/run.md").read_text()

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for kind, text in _FENCE.findall(page.read_text()):
            if kind == language:
                yield page, text


COMMANDS = dict(commands())


def test_the_reference_is_what_the_code_says() -> None:
    assert written(REFERENCE) == REFERENCE, "run: make reference"


def test_internal_links_lead_to_files_and_headings_that_exist() -> None:
    links = [(page, re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text()))) for page in PAGES]
    for page, target in ((page, target) for page, targets in links for target in targets):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page}: {target}: no such file"
        if anchor:
            assert anchor in _anchors(path), f"{page}: {target}: no such heading"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_commands_in_the_documentation_are_commands_with_such_options() -> None:
    lines: set[str] = set()
    for page in PAGES:
        lines.update(re.findall(r"`(toc [^`]+)`", _FENCE.sub("", page.read_text())))
        for kind, text in _FENCE.findall(page.read_text()):
            if kind:  # else it is what a command prints
                lines.update(re.findall(r"(?:^|\$\()(toc [^\n)]+)", text, re.MULTILINE))
    assert len(lines) > 100
    names = [*COMMANDS, *({name.rpartition(" ")[0] for name in COMMANDS} - {"toc"})]
    for line in lines:
        words = shlex.split(line, comments=True)
        # Words in capitals stand for the reader's own; a lone COMMAND stands for any.
        if "COMMAND" in words or words[1].startswith("-") or line == "toc doctor":
            continue
        name = max((one for one in names if words[: len(one.split())] == one.split()), key=len, default=None)
        assert name is not None, f"no such command: {line}"
        if name in COMMANDS:
            options = {option for param in COMMANDS[name].params for option in param.opts}
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options, line


def test_requests_in_the_documentation_are_calls_with_such_fields() -> None:
    """``api`` is curl: perhaps a method, POST if none; a path, perhaps with a query; perhaps a body."""
    form = re.compile(r"(?:^|`|\$\()(api [^`\n|]+)", re.MULTILINE)
    lines = {line for page in PAGES for line in form.findall(page.read_text())}
    assert len(lines) > 5
    for line in lines:
        words = shlex.split(line.rstrip(" )").replace("JOB_ID", "7"))[1:]
        method = words.pop(0) if words[0].isupper() else "POST"
        path, _, query = words[0].partition("?")
        ways = [call for call in CALLS if call.method == method]
        (call,) = (one for one in ways if re.fullmatch(re.sub(r"{\w+}", "[^/:]+", one.path), f"/v1/{path}"))
        given = call.query.model_validate(dict(parse_qsl(query)))
        if len(words) > 1 and not getattr(given, "raw", False):
            assert call.body is not None, f"it has no body: {line}"
            call.body.model_validate_json(words[1])


def test_every_log_event_is_documented_with_its_level() -> None:
    documented: set[tuple[str, str]] = set()
    for heading, usual in (("Errors", "error"), ("Warnings", "warning"), ("Information", "info")):
        section = RUN.split(f"\n### {heading}\n")[1].split("\n#")[0]
        for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
            other = re.search(r"\((\w+)\)", cell)
            documented |= {(event, other[1] if other else usual) for event in re.findall(r"`(\w+)`", cell)}
    logged = {
        (event, level.replace("exception", "error"))
        for path in (ROOT / "toc").rglob("*.py")
        # not after a backtick: there a docstring shows how to log
        for level, event in re.findall(
            r"(?<!`)\blog\.(debug|info|warning|error|exception|critical)(?:\(|, )\s*\"(\w+)\"",
            path.read_text(),
        )
    }
    logged |= {(f"{table.noun}_not_understood", "warning") for table in NamedTable.__subclasses__()}
    assert documented == logged


def test_python_blocks_compile() -> None:
    found = 0
    for page, text in blocks("python"):
        compile(text, str(page), "exec")
        found += 1
    assert found > 10


def test_what_stands_for_calls_of_other_schedulers_runs(toc: Toc) -> None:
    text = (ROOT / "docs/from-schedulers.md").read_text()
    center = TimeoutCenter()
    applied: list[tuple[tuple[int], str]] = []
    toc.use(center)
    celery = SimpleNamespace(apply_async=lambda args, task_id: applied.append((args, task_id)))
    names: dict[str, Any] = {"center": center, "Task": Task, "close_order": celery}
    exec(_FENCE.findall(text)[0][1], names)
    names |= {"when": toc.now + timedelta(hours=1), "job_id": center.submit("order.close", biz_id=1, delay=1)}
    codes = re.findall(r"`(@?center\.[^`]+)`", text)
    for code in codes:
        if code.startswith("@"):
            eval(code[1:], {"center": TimeoutCenter()})(lambda _task: None)
        else:
            eval(code, names)
    assert len(codes) == 9
    job_id = center.submit("order.close", biz_id=42, delay="1h")
    toc.advance("1h")
    assert applied == [((42,), f"close-{job_id}")]
