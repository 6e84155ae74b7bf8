"""What operators can do is declared once: a call and a command follow from it."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from toc.cli.operations import made
from toc.gateway.calls import call_of
from toc.model.access import Action as Right
from toc.operate.operation import REQUIRED, Doing, Param, Record, Value, operation
from toc.operate.operations import OPERATIONS

pytestmark = pytest.mark.usefixtures("nothing_outside")


@operation(
    "host.greet", "POST /v1/hosts/{host}:greet", Right.CHANGE_CLUSTER, "Greet a host",
    Param("host", Value.TEXT, "Whom.", REQUIRED),
    Param("wait", Value.SECONDS, "How long.", REQUIRED),
    Param("times", Value.WHOLE, "How often.", 1, least=1, most=3),
    Param("words", Value.TEXT, "Which.", many=True),
    Param("loudly", Value.FLAG, "How.", default=False),
    takes="Greeting", changes=False,
)  # fmt: skip
def greet(_doing: Doing, host: str, **values: Any) -> Record:
    """Greet a host."""
    return {"host": host, **values}


def test_an_operation_is_a_call_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    call = call_of(greet)
    assert (call.name, call.access, call.summary) == (
        "POST /v1/hosts/{host}:greet", Right.CHANGE_CLUSTER, "Greet a host",
    )  # fmt: skip
    assert call.body is not None
    assert call.body.__name__ == "Greeting"
    assert call.body.model_json_schema()["required"] == ["wait"]
    sent = call.body.model_validate_json('{"wait": 90, "words": ["a"]}')
    assert sent.model_dump() == {"wait": 90.0, "times": 1, "words": ["a"], "loudly": False}

    app = typer.Typer()
    app.command("greet")(made(greet)(lambda record, *, as_json: print(record, as_json)))
    command: Any = typer.main.get_command(app)
    command(["h1", "--wait", "1.5m", "--words", "a", "--loudly", "--json"], standalone_mode=False)
    shown = {"host": "h1", "wait": 90.0, "times": 1, "words": ["a"], "loudly": True}
    assert capsys.readouterr().out == f"{shown} True\n"


def test_every_name_is_of_one_subject_and_what_changes_is_named_once() -> None:
    names = [one.name for one in OPERATIONS if one.changes]
    assert sorted(set(names)) == sorted(names)
    assert {name.count(".") for name in names} == {1}
    routes = [one.route for one in OPERATIONS if one.route]
    assert sorted(set(routes)) == sorted(routes)
