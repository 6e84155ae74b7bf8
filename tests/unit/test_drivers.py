"""What toc uses of its drivers' insides: a version without it fails here first, not in production.

``pyproject.toml`` bounds these drivers from above. Raise a bound when this passes with the new version.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import aiohttp
import pytest

ROOT = Path(__file__).parents[2]


def used(file: str, receivers: set[str]) -> set[str]:
    """The private members that a file takes of objects of these names."""
    tree = ast.parse((ROOT / "toc" / file).read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and ast.unparse(node.value).split(".")[-1] in receivers
    }


def members(file: str | None) -> set[str]:
    """What a module defines, or sets on its objects."""
    assert file is not None
    tree = ast.parse(Path(file).read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return defined | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def test_no_others_are_used() -> None:
    assert not used("store/servers/mysql.py", {"driver", "connection"}), "pymysql's"
    assert not used("gateway/connections.py", {"_inner"}), "uvicorn's"


def test_aiohttp_has_it() -> None:
    assert "_factory" in members(aiohttp.connector.__file__), "else nothing bounds what a receiver answers"


@pytest.mark.parametrize("driver", ["pymysql", "hiredis", "uvicorn", "aiohttp"])
def test_their_versions_are_bounded_from_above(driver: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(one for some in project["optional-dependencies"].values() for one in some),
    ]
    (bounds,) = {line for line in wanted if line.partition("[")[0].partition(">")[0] == driver}
    assert "<" in bounds
