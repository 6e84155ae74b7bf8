"""Tables on terminals of any width and height."""

from __future__ import annotations

import pytest

from toc.cli.output import show, show_one
from toc.coordination.assignment import Member
from toc.operate.daemons import addresses


@pytest.mark.parametrize(
    ("metrics", "machine", "address"),
    [
        ("0.0.0.0:9464", "here", "127.0.0.1:9464"),
        ("0.0.0.0:9464", "there", "host7:9464"),
        ("[::]:9464", "there", "host7:9464"),
        ("127.0.0.1:9464", "here", "127.0.0.1:9464"),
        ("127.0.0.1:9464", "there", "host7:9464"),
        ("10.0.0.7:9464", "here", "10.0.0.7:9464"),
        ("10.0.0.7:9464", "there", "10.0.0.7:9464"),
    ],
)
def test_a_daemon_is_asked_where_it_can_be_reached_from_here(
    metrics: str, machine: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    worker = Member("host7-0-1", "host7", 1, metrics=metrics, machine=machine)
    assert addresses([worker]) == [address]


def test_what_others_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = "a\x1b[2Jb\x07c\x9b31md\re\x7f\r\n\tgrün"
    show_one({"last_error": error, "history": [{"error": error}], "list": [error]}, as_json=False)
    show([{"last_error": error}], as_json=False, empty="none")
    said = capsys.readouterr().out
    assert not set(said) & set("\x1b\x07\x9b\x7f"), ascii(said)
    assert "\r" not in said.replace("\r\n", "")
    assert said.count("a\ufffd[2Jb\ufffdc\ufffd31md\ufffde\ufffd") == 3
    assert said.count("\tgrün") == 2, "lines of a text are shown as they are"
