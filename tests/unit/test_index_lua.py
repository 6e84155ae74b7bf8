"""The contract at the head of each Lua file is what the file does."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from toc.index import queues
from toc.index.calls import Script

LUA = sorted(p for p in (Path(queues.__file__).parent / "lua").glob("*.lua") if p.stem != "shared")
ADDING = {"add", "restore_dead", "reschedule", "reach"}
"""What may add to the index, or tells whether that works: it must fail when memory is full."""
LOOKING = {"peek", "held"}


@dataclass
class Contract:
    """``fixed`` ARGV by name, then groups of the names in ``group``; ``each``: groups of so many ``keys``."""

    keys: list[str]
    each: int
    fixed: list[str]
    group: list[str]
    sections: set[str]


def contract(text: str) -> Contract:
    found = Contract([], 0, [], [], set())
    section = ""
    for line in text.splitlines():
        if not line.startswith("--"):
            continue
        if match := re.match(r"-- ([A-Z]+) ", line):
            section = match[1]
            found.sections.add(section)
        if entry := re.match(r"-- (?:KEYS|ARGV|    ) {1,2}(\d+)(\+?)\s+(.+)", line):
            number, many, names = int(entry[1]), entry[2], entry[3]
            if many and section == "KEYS":
                found.keys = re.split(r"\s{2,}", names)[0].split(", ")
                found.each = len(found.keys)
                assert number == 1
            elif many:
                found.group = re.split(r"\s{2,}", names)[0].split(", ")
                assert number == len(found.fixed) + 1
            else:
                names_so_far = found.keys if section == "KEYS" else found.fixed
                names_so_far.append(names.split()[0])
                assert number == len(names_so_far)
    return found


def body(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(("--", "#!")))


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.stem)
def test_the_header_names_exactly_the_keys_and_arguments_that_the_script_uses(path: Path) -> None:
    text = path.read_text()
    stated, code = contract(text), body(text)
    assert {"KEYS", "ARGV", "RETURNS", "BOUNDS"} <= stated.sections
    if stated.each:
        assert re.findall(r"for i = 1, #KEYS, (\d+)", code) == [str(stated.each)]
        used = {int(n or 0) + 1 for n in re.findall(r"KEYS\[i(?: \+ (\d+))?\]", code)}
    else:
        used = {int(n) for n in re.findall(r"KEYS\[(\d+)\]", code)}
    assert used == set(range(1, len(stated.keys) + 1))
    assert {int(n) for n in re.findall(r"ARGV\[(\d+)\]", code)} == set(range(1, len(stated.fixed) + 1))
    loops = {(int(first), int(step)) for first, step in re.findall(r"for i = (\d+), #ARGV, (\d+)", code)}
    groups = re.findall(r"(?:ids_from|fenced|unprepared)\((?:KEYS\[\d\], )?(\d+), (\d+)\)", code)
    loops |= {(int(first), int(step)) for first, step in groups}
    assert loops == ({(len(stated.fixed) + 1, len(stated.group))} if stated.group else set())
    assert ("WAKES" in stated.sections) == ("put(" in code)
    assert "PUBLISH" not in code, "put does it"


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.stem)
def test_what_only_removes_or_moves_runs_at_full_memory_and_what_adds_does_not(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    if path.stem in ADDING:
        assert first == "#!lua"
    elif path.stem in LOOKING:
        assert first == "#!lua flags=no-writes"
    else:
        assert first == "#!lua flags=allow-oom"


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.stem)
def test_no_number_is_joined_to_a_text_but_through_format(path: Path) -> None:
    code = body(path.read_text())
    assert "tostring" not in code
    for joined in re.findall(r"\.\.\s*(\S+)", code):
        assert joined.startswith("string.format('%.17g'")


def test_every_script_has_a_file_and_every_file_is_used() -> None:
    used = {value.name for value in vars(queues).values() if isinstance(value, Script)}
    assert used == {path.stem for path in LUA}
