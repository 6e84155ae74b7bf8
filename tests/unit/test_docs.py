"""What the documentation says about the code is compared with the code."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from reference_page import commands, written

import toc
from toc import CancelOutcome, RescheduleOutcome, TaskStatus, TimeoutCenter
from toc.gateway.app import CALLS
from toc.index.keys import SlotKeys, owner_key, permits_key
from toc.model import errors
from toc.model.topic import Slot
from toc.store.schema import database_metadata

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")])
REFERENCE = (ROOT / "docs/reference.md").read_text()
RUN = (ROOT / "docs/run.md").read_text()

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the tables under a heading, up to the next heading, without the tables' heads."""
    section = re.split(rf"^#+ {re.escape(heading)}$", page, flags=re.MULTILINE)[1]
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    found: list[list[str]] = []
    for line in section.splitlines():
        if line.startswith("| ---"):
            found.pop()  # the head
        elif line.startswith("|"):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def items(heading: str) -> list[str]:
    """The items of the lists under a heading of the reference, each as one line."""
    section = re.split(rf"^#+ {heading}$", REFERENCE, flags=re.MULTILINE)[1]
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    return [" ".join(item.split()) for item in re.findall(r"^- ((?:.+\n)(?:  .+\n)*)", section, re.MULTILINE)]


def code(cell: str) -> str:
    """What stands in backticks first."""
    return cell.split("`")[1]


def blocks(language: str) -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for kind, text in _FENCE.findall(page.read_text()):
            if kind == language:
                yield page, text


COMMANDS = dict(commands())


def test_the_reference_is_what_the_code_says() -> None:
    assert written(REFERENCE) == REFERENCE, "run: make reference"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_internal_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = _FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in _anchors(path), f"{target}: no such heading"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "line",
    sorted(
        {
            match
            for page in PAGES
            for match in [
                *re.findall(r"`(toc [^`]+)`", _FENCE.sub("", page.read_text())),
                *(
                    found
                    for kind, text in _FENCE.findall(page.read_text())
                    if kind  # else it is what a command prints
                    for found in re.findall(r"(?:^|\$\()(toc [^\n)]+)", text, re.MULTILINE)
                ),
            ]
        }
    ),
)
def test_commands_in_the_documentation_are_commands_with_such_options(line: str) -> None:
    words = shlex.split(line, comments=True)
    # Words in capitals stand for the reader's own; a lone COMMAND stands for any.
    if "COMMAND" in words or words[1].startswith("-") or line == "toc doctor":
        return
    name = max(
        (name for name in [*COMMANDS, *_groups()] if words[: len(name.split())] == name.split()),
        key=len,
        default=None,
    )
    assert name is not None, "no such command"
    if name in COMMANDS:
        options = {option for param in COMMANDS[name].params for option in param.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize(
    "line",
    sorted(
        {
            line
            for page in PAGES
            for line in re.findall(r"(?:^|`|\$\()(api [^`\n|]+)", page.read_text(), re.MULTILINE)
        }
    ),
)
def test_requests_in_the_documentation_are_calls_with_such_fields(line: str) -> None:
    """``api`` is curl: perhaps a method, POST if none; a path, perhaps with a query; perhaps a body."""
    words = shlex.split(line.rstrip(" )").replace("JOB_ID", "7"))[1:]
    method = words.pop(0) if words[0].isupper() else "POST"
    path, _, query = words[0].partition("?")
    call = next(
        call
        for call in CALLS
        if call.method == method and re.fullmatch(re.sub(r"{\w+}", "[^/:]+", call.path), f"/v1/{path}")
    )
    given = call.query.model_validate(dict(parse_qsl(query)))
    if len(words) > 1 and not getattr(given, "raw", False):
        assert call.body is not None, "it has no body"
        call.body.model_validate_json(words[1])


def _groups() -> set[str]:
    return {name.rpartition(" ")[0] for name in COMMANDS} - {"toc"}


def test_exit_codes_of_errors_are_in_the_table_of_exit_codes() -> None:
    documented = {int(item.split(":")[0]) for item in items("Exit codes")}
    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.TocError)
    }
    assert documented == codes | {0, 130, 141}  # 128 + SIGINT, 128 + SIGPIPE


def test_every_log_event_is_documented_with_its_level() -> None:
    tables = {"Errors": "error", "Warnings": "warning", "Information": "info"}
    documented = {
        (event, level[1] if (level := re.search(r"\((\w+)\)", row[0])) else usual)
        for heading, usual in tables.items()
        for row in rows(RUN, heading)
        for event in re.findall(r"`(\w+)`", row[0])
    }
    logged = {
        (event, level)
        for path in (ROOT / "toc").rglob("*.py")
        # not after a backtick: there a docstring shows how to log
        for level, event in re.findall(
            r"(?<!`)\blog\.(debug|info|warning|error|critical)(?:\(|, )\s*\"(\w+)\"", path.read_text()
        )
    }
    assert len(logged) > 30, "the pattern finds what the code logs"
    assert documented == logged


def test_no_event_name_is_computed() -> None:
    for path in (ROOT / "toc").rglob("*.py"):
        calls = re.findall(
            r"\blog\.(?:debug|info|warning|error|critical|exception)\(\s*(.)", path.read_text()
        )
        assert set(calls) <= {'"'}, f"{path}: an event's name is a literal, so that it can be documented"


def test_statuses_and_outcomes_are_documented() -> None:
    statuses = [item.split("`")[:2] for item in items("Task statuses")]
    assert [(int(number), name) for number, name in statuses] == [(s, s.name.lower()) for s in TaskStatus]
    outcomes = [code(item) for item in items("Outcomes")]
    assert outcomes == [member.name for kind in (CancelOutcome, RescheduleOutcome) for member in kind]


def test_every_public_method_is_documented_with_its_parameters() -> None:
    documented = {}
    for item in items("TimeoutCenter"):
        name, _, rest = code(item).partition("(")
        documented[name] = re.findall(r"(\w+)(?=[,=:)]|$)", rest.split(")")[0])
    public = {
        name: [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
        for name, method in vars(TimeoutCenter).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert set(documented) == set(public)
    for name, parameters in public.items():
        assert [word for word in documented[name] if word in parameters] == parameters, name
    named = REFERENCE.split("from toc import")[1].split("`")[0]
    assert {name.strip() for name in named.split(",")} == set(toc.__all__)


def test_columns_and_keys_are_documented() -> None:
    columns = {name for item in items("MySQL") for name in re.findall(r"`(\w+)`", item.split(":")[0])}
    assert columns == set(database_metadata(0, 1, 1).tables["timeout_task_0000"].columns.keys())
    keys = SlotKeys.of(Slot("order.close", 3), None)
    documented = [code(item) for item in items("Redis") if item.startswith("`")]
    assert documented == [*keys[:7], owner_key(), permits_key("shop")]


def test_python_blocks_compile() -> None:
    found = 0
    for page, text in blocks("python"):
        compile(text, str(page), "exec")
        found += 1
    assert found > 10


def test_readme_has_the_two_commands_before_anything_else_to_run() -> None:
    first = _FENCE.findall((ROOT / "README.md").read_text())[0]
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make run", "make test"]


def test_every_test_that_make_test_leaves_out_is_run_by_another_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(
        r"^\t\$\(BIN\)/pytest tests -m chaos ", makefile, re.MULTILINE
    )  # these: wherever they are
    whole = re.findall(r"tests/\w+(?= .*-m \"not chaos\")", makefile)
    marked = "pytest.mark." + "slow"
    slow = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    slow = [path for path in slow if marked in (ROOT / path).read_text()]
    assert len(slow) > 20
    assert [path for path in slow if not path.startswith(tuple(whole)) and path not in makefile] == []
