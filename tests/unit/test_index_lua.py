"""The contract at the head of each Lua file is what the file does and what queues.py passes."""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis.crc import key_slot

from toc.index import messages, queues
from toc.index.calls import Call, Calls, Script
from toc.index.keys import owner_key, permits_key
from toc.model.errors import IndexUnavailable
from toc.model.topic import Slot

LUA = sorted(p for p in (Path(queues.__file__).parent / "lua").glob("*.lua") if p.stem != "shared")
ADDING = {"add", "restore_dead", "reschedule"}
"""What may add to the index: it must fail when memory is full."""
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


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.stem)
def test_a_batch_is_refused_before_it_does_anything_if_it_is_too_long(path: Path) -> None:
    text = path.read_text()
    stated, code = contract(text), body(text)
    if stated.each:
        assert code.lstrip().startswith(f"bounded(#KEYS, {stated.each})")
    if stated.group and path.stem != "held":  # what lists the ids of a call refuses it if there are too many
        first_call = code[: code.index("redis.call")] if "redis.call" in code else code
        assert re.search(r"(ids_from|fenced|unprepared)\(", first_call)


class Recorder(Calls):
    """Keeps what it should send."""

    seen: list[Call]

    def run(self, calls: Sequence[Call], late: object = None) -> None:  # noqa: ARG002 - its signature
        for call in calls:
            call.result = IndexUnavailable("kept, not sent")
        self.seen = [*getattr(self, "seen", []), *calls]


SLOT = Slot("order.close", 3)
USES: dict[str, Callable[[queues.Queues], object]] = {
    "add": lambda q: q.add({SLOT: [(1, 2.0), (3, 4.0)]}),
    "reach": lambda q: q.generations([SLOT]),
    "prepare": lambda q: q.prepare([messages.PrepareRequest(SLOT, 1, 2, 3)]),
    "extend": lambda q: q.extend({SLOT: [(1, 2.0), (3, 4.0)]}),
    "commit": lambda q: q.commit({SLOT: [(1, 2.0), (3, 4.0)]}),
    "rollback": lambda q: q.rollback({SLOT: [(1, 2.0, 3.0), (4, 5.0, 6.0)]}),
    "bury": lambda q: q.bury({SLOT: [(1, 2.0, 3), (4, 5.0, 6)]}),
    "restore_dead": lambda q: q.restore_dead({SLOT: [(1, 2), (3, 4)]}),
    "redrive": lambda q: q.redrive({SLOT: [(1, 2.0), (3, 4.0)]}),
    "cancel": lambda q: q.cancel({1: SLOT}),
    "reschedule": lambda q: q.reschedule(SLOT, 1, 2.0),
    "expired": lambda q: q.expired([messages.ExpiredRequest(SLOT, 30)]),
    "held": lambda q: q.expired([messages.ExpiredRequest(SLOT, 30, (1, 2))]),
    "peek": lambda q: q.peek([SLOT]),
    "trim": lambda q: q.trim([SLOT], 1),
    "claim": lambda q: q.claim([SLOT], "worker"),
    "own": lambda q: q.own("identity", "name"),
    "permits": lambda q: q.permits({"shop": messages.PermitRequest("worker", 1, 2, 3, 4, 5.0, 6.0, 7)}),
}


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.stem)
def test_queues_passes_the_keys_and_arguments_of_the_header(path: Path) -> None:
    stated = contract(path.read_text())
    subject = queues.Queues("redis://127.0.0.1:1")
    recorder = subject._calls = Recorder(subject.nodes, subject.keys)
    with contextlib.suppress(IndexUnavailable):
        USES[path.stem](subject)
    (call,) = (call for call in recorder.seen if call.script and call.script.name == path.stem)
    keys = subject.keys(SLOT)._asdict() | {"owner": owner_key(), "permits": permits_key("shop")}
    for single in {"owner", "permits"}.intersection(stated.keys):
        keys["hash_slot"] = key_slot(keys[single].encode())
    head = ("EVALSHA", Script(path.stem).sha, len(stated.keys), *(keys[name] for name in stated.keys))
    words = call.command[len(head) :]
    assert tuple(call.command[: len(head)]) == head
    assert call.hash_slot == keys["hash_slot"]
    assert len(words) == len(stated.fixed) + 2 * len(stated.group)
    if "channel" in stated.fixed:
        assert words[stated.fixed.index("channel")] == keys["channel"]
    assert call.again == (path.stem != "prepare")


def test_every_script_has_a_file_and_every_file_is_used() -> None:
    used = {value.name for value in vars(queues).values() if isinstance(value, Script)}
    assert used == {path.stem for path in LUA}
