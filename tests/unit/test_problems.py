"""How the gateway answers errors."""

from __future__ import annotations

from collections.abc import Iterator

from toc.gateway.problems import _OF
from toc.model.errors import TocError


def below(cls: type[TocError]) -> Iterator[type[TocError]]:
    for one in cls.__subclasses__():
        yield one
        yield from below(one)


def test_every_error_has_an_answer() -> None:
    assert not [one for one in below(TocError) if not any(cls in _OF for cls in one.__mro__)]
