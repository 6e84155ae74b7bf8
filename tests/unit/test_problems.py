"""How the gateway answers errors, and what is said where packages are missing."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from toc import Settings, TimeoutCenter
from toc.cli import dev
from toc.cli.daemons import check_webhooks, http_processes
from toc.cli.main import ended, main
from toc.cli.output import say
from toc.gateway.app import CALLS, App
from toc.gateway.problems import KIND_OF, Problem, problem_of
from toc.model.errors import NotInstalled, TocError
from toc.store.records.targets import SecretBox, new_key

OF_ONE_PROCESS = {"NotCommitted", "TooManyCalls", "NeedsAwait"}
"""Errors of Python objects, of which no call of the gateway knows."""


def below(cls: type[TocError]) -> Iterator[type[TocError]]:
    for one in cls.__subclasses__():
        yield one
        yield from below(one)


def test_every_error_has_an_answer() -> None:
    without = {one.__name__ for one in below(TocError) if not any(cls in KIND_OF for cls in one.__mro__)}
    assert without <= OF_ONE_PROCESS


def test_a_call_whose_packages_are_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("toc.webhooks.sender", "cryptography.fernet"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    calls: list[Callable[[], object]] = [
        lambda: TimeoutCenter(Settings()).targets.test("shop"),
        lambda: SecretBox(["key"]).seal(""),
        lambda: SecretBox(["key"]).open("", "target 'shop'"),
        new_key,
    ]
    for call in calls:
        with pytest.raises(NotInstalled) as refused:
            call()
        problem = problem_of(refused.value)
        assert (problem.kind.status, "timeout-center[webhooks]" in problem.detail) == (501, True)


def console(_: Path) -> None:
    with pytest.raises(Problem) as refused:
        asyncio.run(App(Mock())._of_console({}, Mock()))
    say(refused.value.detail)


@pytest.mark.parametrize(("package", "importer", "call", "line"), [
    ("uvloop", "toc.gateway.process", lambda _: http_processes("127.0.0.1", 0, 1, None, None, []),
     "error: the gateway needs uvloop, which is not installed: pip install 'timeout-center[gateway]'"),
    ("aiohttp", "toc.webhooks.sender", lambda _: check_webhooks(),
     "error: --webhooks needs aiohttp: pip install 'timeout-center[webhooks]'"),
    ("msgpack", "toc.dialects.originals", lambda _: main(["import", "lmstfy", "--redis", "redis://none"]),
     "error: the dialects need msgpack: pip install 'timeout-center[dialects]'"),
    ("jinja2", "toc.console.console", console,
     "the console needs jinja2: pip install 'timeout-center[console]'"),
    ("uvloop", "toc.gateway.process", lambda _: dev._gateway(Settings()),
     "no gateway: the gateway needs uvloop, which is not installed: pip install 'timeout-center[gateway]'"),
    ("aiohttp", "toc.webhooks.sender", dev._for_webhooks,
     "no webhooks: --webhooks needs aiohttp: pip install 'timeout-center[webhooks]'"),
])  # fmt: skip
def test_who_needs_packages_that_are_not_installed_is_told_in_one_line_what_to_install(
    package: str, importer: str, call: Callable[[Path], object], line: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, importer, raising=False)

    def run() -> None:
        call(tmp_path)

    ended(run)
    assert capsys.readouterr().err.splitlines() == [line]


@pytest.mark.parametrize("value", ['"20300131"', "1893456000", '"1893456000"', '"2030-01-31"', "true"])
def test_no_time_of_any_call_may_be_made_of_digits(value: str) -> None:
    times = []
    for call in CALLS:
        for model in filter(None, (call.query, call.body)):
            for name, schema in model.model_json_schema().get("properties", {}).items():
                if "date-time" in str(schema):
                    times.append((call.name, name))
                    with pytest.raises(ValidationError) as refused:
                        model.model_validate_json(f'{{"{name}": {value}}}')
                    (why,) = [one for one in refused.value.errors() if one["loc"] == (name,)]
                    assert "is not a time: write RFC 3339 with a zone" in why["msg"]
    assert len(times) > 15, times
