"""Imports point one way; each driver has one importer. The picture is the first of docs/architecture.md."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "toc"

PLAIN = {"model", "observe", "config", "failpoint", "loop", "sockets"}  # what everybody may use
OUTSIDE = {"store", "index", "coordination"}  # one for each outside system: they never import each other

# What a part of toc may import of the others. Those that are not named here are the top: nobody imports them.
MAY_IMPORT: dict[str, set[str]] = {
    "model": set(),
    "failpoint": set(),
    "sockets": set(),
    "loop": {"observe"},
    "observe": {"model"},
    "config": {"model", "observe"},
    **dict.fromkeys(OUTSIDE, PLAIN),
    "sdk": PLAIN | {"store", "index", "webhooks"},
    "maintenance": PLAIN - {"config"} | {"store", "index"},
    "pull": PLAIN - {"config"} | {"store", "index", "sdk"},
    "webhooks": PLAIN - {"config"} | {"store", "index"},
    "worker": PLAIN - {"config"} | OUTSIDE | {"maintenance"},
    "django_tasks": PLAIN - {"config"} | {"sdk"},
    "outbox": PLAIN - {"config"} | {"sdk", "store"},
    "operate": PLAIN | OUTSIDE | {"sdk", "maintenance", "__init__"},
    "gateway": PLAIN | OUTSIDE | {"sdk", "operate", "pull", "worker"},
    "console": PLAIN - {"config"} | {"operate", "gateway"},
    "dialects": PLAIN - {"config"} | {"store", "index", "sdk", "operate", "pull", "gateway"},
    "dev.local": {"model"},
    "dev.reload": set(),
    "testing": PLAIN | {"store", "index", "sdk", "maintenance", "worker"},
}
TOP = {"__main__", "cli", "dev.demo", "pytest_plugin"}
PUBLIC = {"__init__": {"sdk", "config", "model"}}  # the public names

# Of the worker, these put objects together: they build on settings and on what the application has made.
COMPOSERS = {"worker/app.py", "worker/no_handlers.py", "worker/process.py", "worker/worker.py",
             "worker/table_services.py",
             "worker/embedded.py", "worker/daemon/keeper.py", "worker/daemon/slots.py",
             "worker/daemon/monitor.py", "worker/daemon/supervisor.py"}  # fmt: skip

DRIVERS = {
    "sqlalchemy": "store",
    "pymysql": "store",
    "alembic": "store",
    "hiredis": "index",
    "kazoo": "coordination",
    "prometheus_client": "observe",
    "opentelemetry": "observe",
    "uvicorn": "gateway",
    "uvloop": "gateway",
    "aiohttp": "webhooks",
    "cryptography": "store",
    "jinja2": "console",
    "msgpack": "dialects",
    "django": "django_tasks",
}


class Import(NamedTuple):
    file: str  # within the package, for example "store/tasks/scan.py"
    line: int
    part: str  # the importer's, for example "store"
    imported: str  # the full dotted name
    typing_only: bool


def part_of(module: tuple[str, ...]) -> str:
    """The part of toc that has a module: the first part of its name, in toc.dev the first two."""
    return ".".join(module[:2]) if module[0] == "dev" and len(module) > 1 else module[0]


@cache
def imports(package: Path) -> list[Import]:
    """Every import statement of a package, wherever in a file it stands."""
    found = []
    for file in sorted(package.rglob("*.py")):
        within = file.relative_to(package)
        nodes = list(ast.walk(ast.parse(file.read_text())))
        typing_only = {
            node
            for block in nodes
            if isinstance(block, ast.If)
            and isinstance(block.test, ast.Name | ast.Attribute)
            and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            for statement in block.body
            for node in ast.walk(statement)
        }
        for node in nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
                # "from toc import store" imports toc.store: look at every name
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                part = part_of(within.with_suffix("").parts)
                found.append(Import(str(within), node.lineno, part, name, node in typing_only))
    return found


def violations(package: Path) -> list[str]:
    """What breaks the rules, a line each."""
    modules = {file.relative_to(package).with_suffix("").parts[0] for file in package.rglob("*.py")}
    found = []
    for line in imports(package):
        root, *rest = line.imported.split(".")
        where = f"toc/{line.file}:{line.line}"
        owner = DRIVERS.get(root)
        for_types = root == "sqlalchemy" and line.part == "sdk" and line.typing_only
        # The outbox's table and the sessions of a test are the application's.
        theirs = root == "sqlalchemy" and line.part in ("outbox", "testing")
        if owner is not None and line.part != owner and not for_types and not theirs:
            found.append(f"{where}: only toc.{owner} imports {root}")
        if root != "toc":
            continue
        part = part_of(tuple(rest)) if rest and rest[0] in modules else "__init__"
        if part == line.part or line.part in TOP:
            continue
        allowed = MAY_IMPORT.get(line.part, PUBLIC.get(line.part, set()))
        if (line.file, part) == ("sdk/client.py", "worker"):
            continue  # center.worker(), which only those load who call it
        if (line.file, part) == ("gateway/process.py", "console"):
            continue  # it puts a process together, of what is installed
        if line.file in COMPOSERS:
            allowed = allowed | {"sdk", "config", "webhooks"}
        if part not in allowed:
            found.append(f"{where}: toc.{line.part} must not import toc.{part}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(PACKAGE) == []


def test_every_part_is_in_the_rules() -> None:
    parts = {part_of(file.relative_to(PACKAGE).with_suffix("").parts) for file in PACKAGE.rglob("*.py")}
    assert parts - {"dev.__init__"} == {*MAY_IMPORT, *TOP, *PUBLIC}  # toc.dev itself is a docstring
    assert {file for file in COMPOSERS if not (PACKAGE / file).exists()} == set()


def name(distribution: str) -> str:
    """The one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def declared() -> dict[str, set[str]]:
    """The packages that the base and each extra install, by the name of the extra, "" for the base."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {name(re.split(r"[^\w-]", line)[0]) for line in lines} for extra, lines in lists.items()}


def imported_packages() -> set[str]:
    """What the whole of toc imports from outside the standard library."""
    roots = {line.imported.split(".")[0] for line in imports(PACKAGE)}
    return roots - sys.stdlib_module_names - {"toc"}


def test_whatever_is_imported_is_declared() -> None:
    known, installed = set().union(*declared().values()), packages_distributions()
    found = {root: {name(one) for one in installed.get(root, [])} for root in imported_packages()}
    for host in ("pytest", "django"):  # it loads what is for it; nothing else imports that
        del found[host]
    assert {root: of for root, of in found.items() if not known & of} == {}
