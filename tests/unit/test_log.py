"""The log that the processes of a daemon share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from toc.observe.log import Stack, configure, get_logger, stack

MANY = """
from toc.observe.log import configure, get_logger
configure("info", "json")
log = get_logger("toc.test")
for number in range(2000):
    log.info("counted", number=number)
"""


def test_processes_that_share_a_log_leave_each_others_lines_whole(tmp_path: Path) -> None:
    """Unbuffered, as in most images: there a line and its end are two writes if they are printed apart."""
    path = tmp_path / "log"
    with path.open("ab") as file:
        processes = [subprocess.Popen([sys.executable, "-u", "-c", MANY], stderr=file) for _ in range(4)]
        assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 8000


CARD = {"card": "canary-4111"}


def test_a_stack_tells_where_and_what_kind_and_not_what_was_said() -> None:
    def pay(attribute: dict[str, str]) -> None:
        raise ValueError(f"no such card: {attribute['card']}")

    def handle(attribute: dict[str, str]) -> None:
        try:
            pay(attribute)
        except ValueError as exc:
            raise RuntimeError(f"cannot pay with {attribute}") from exc

    with pytest.raises(RuntimeError) as caught:
        handle(CARD)
    text = stack(caught.value)
    assert "canary" not in text
    assert text.index("RuntimeError") < text.index("ValueError")
    assert text.count("in handle") == 2
    assert "in pay" in text


def test_the_stack_of_a_handlers_error_is_made_only_if_its_line_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[BaseException] = []

    def make(error: BaseException) -> str:
        made.append(error)
        return stack(error)

    monkeypatch.setattr("toc.observe.log.stack", make)
    error = ValueError("canary")
    for level, written in (("info", False), ("debug", True)):
        configure(level, "json")
        get_logger("toc.test").debug("handler_raised", stack=Stack(error))
        said = capsys.readouterr().err
        assert ("ValueError" in said, "canary" in said, bool(made)) == (written, False, written)
