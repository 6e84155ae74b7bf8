"""Errors leave a process whole: through pickle, as of multiprocessing, and through copies."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import toc
from toc.model.errors import TocError
from toc.model.task import CancelOutcome, Dead, Retry

VALUES: dict[str, Any] = {
    "str": "what",
    "Duration": "30m",
    "str | None": "field",
    "int": 7,
    "int | None": 7,
    "float | None": 1.5,
    "list[int]": [7],
    "list[int | None]": [7, None],
    "dict[int, CancelOutcome]": {7: CancelOutcome.CANCELLED},
    "timedelta | float": timedelta(seconds=1),
}
"""A value of each type that a constructor takes."""


def tree(kind: type[Exception] = TocError) -> Iterator[type[Exception]]:
    for one in kind.__subclasses__():
        yield one
        yield from tree(one)


for module in pkgutil.walk_packages(toc.__path__, "toc."):
    # Django's tasks need Python 3.12.
    if not module.name.startswith(("toc.migrations", "toc.__main__", "toc.django_tasks")):
        importlib.import_module(module.name)
KINDS = sorted({TocError, Retry, Dead, *tree()}, key=lambda kind: f"{kind.__module__}.{kind.__name__}")
WAYS: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy]


def pickled(protocol: int) -> Callable[[Any], Any]:
    return lambda error: pickle.loads(pickle.dumps(error, protocol))


WAYS += map(pickled, range(pickle.HIGHEST_PROTOCOL + 1))


def test_an_error_can_be_pickled_and_copied() -> None:
    for kind in KINDS:
        is_itself_pickled_and_copied(kind)


def is_itself_pickled_and_copied(kind: type[Exception]) -> None:
    values = ["what"]
    if inspect.isfunction(kind.__init__):
        _self, *parameters = inspect.signature(kind.__init__).parameters.values()
        values = [VALUES[p.annotation] for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    error = kind(*values)
    error.add_note("a note")
    for way in WAYS:
        same = way(error)
        assert type(same) is kind
        assert (str(same), same.args, vars(same)) == (str(error), error.args, vars(error))
