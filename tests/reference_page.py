"""Writes the lists of docs/reference.md that the code tells: ``make reference``.

Each stands between ``<!-- NAME: make reference -->`` and ``<!-- end -->``. A fact is changed where it is
declared: the docstring of a setting or error, the help of a command, the text of a metric.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import typer

from toc import Settings, Topic
from toc.cli.main import app
from toc.gateway.problems import KIND_OF
from toc.model import errors
from toc.model.access import Action, Role
from toc.observe.board import MetricKind
from toc.observe.metrics import METRICS

_TOC: Any = typer.main.get_command(app)
PAGE = Path(__file__).parents[1] / "docs/reference.md"


def commands(group: Any = None, name: str = "toc") -> Iterator[tuple[str, Any]]:
    """Each command of a group, by its full name; of the whole command line without one."""
    for part, command in (group or _TOC).commands.items():
        full = f"{name} {part}"
        if hasattr(command, "commands"):
            yield from commands(command, full)
        else:
            yield full, command


def written(page: str) -> str:
    """The page with every list as the code tells it."""
    return re.sub(
        r"(<!-- (\w+): make reference -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{''.join(_LISTS[found[2]]())}{found[3]}",
        page,
        flags=re.DOTALL,
    )


def _item(name: str, text: str | None, indent: str = "") -> str:
    line = f"- {name}: {_plain(text)}"
    return (
        textwrap.fill(
            line,
            120,
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
    )


def _plain(text: str | None) -> str:
    """The first paragraph of a docstring as one line of Markdown."""
    assert text, "the code says nothing of it"
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split()).replace("``", "`")


def _first(text: str | None) -> str:
    """Its first sentence."""
    return re.split(r"(?<=\.) ", _plain(text))[0]


def _meanings(kind: type) -> dict[str, str]:
    """The docstrings under the fields of a class."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            target = field.targets[0] if isinstance(field, ast.Assign) else getattr(field, "target", None)
            if isinstance(target, ast.Name):
                found[target.id] = str(text.value.value)
    return found


def _settings() -> Iterator[str]:
    meanings = _meanings(Settings)
    for name, field in Settings.model_fields.items():
        default = "" if field.default_factory or field.default in (None, []) else f"={field.default}"
        form = field.description or ", ".join(get_args(field.annotation))
        yield _item(f"`TOC_{name.upper()}{default}`", f"{_plain(meanings.get(name))} ({form})")


def _commands() -> Iterator[str]:
    plain = [name for name, command in commands() if all("--json" not in one.opts for one in command.params)]
    yield _item("`--json`", f"JSON, of all but `{'`, `'.join(plain)}`.")
    for name, command in commands():
        words = [name]
        for param in command.params:
            if param.param_type_name == "argument":
                words.append(param.metavar or param.name.upper())
            elif "--json" not in param.opts:
                words.append(param.opts[0] + (f"={param.metavar}" if param.metavar else ""))
        yield _item(f"`{' '.join(words)}`", _first(command.help))


def _policies() -> Iterator[str]:
    meanings = _meanings(Topic)
    for field in fields(Topic):
        if field.name not in ("name", "biz_type"):
            default = "" if field.default in (MISSING, "") else f"={_shown(field.default)}"
            yield _item(f"`{field.name}{default}`", meanings.get(field.name))


def _shown(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def _errors() -> Iterator[str]:
    def answer(kind: type[Any]) -> list[str]:
        problem = next((KIND_OF[cls] for cls in kind.__mro__ if cls in KIND_OF), None)
        return [str(getattr(kind, "exit_code", "")), *([str(problem.status)] if problem else [])]

    def tree(kind: type[Any], depth: int) -> Iterator[str]:
        own = answer(kind)
        differs = "" if own == answer(kind.__bases__[0]) else f" ({', '.join(own)})"
        yield _item(f"`{kind.__name__}`{differs}", _first(kind.__doc__), "  " * depth)
        for child in vars(errors).values():
            if inspect.isclass(child) and child.__bases__[0] is kind:
                yield from tree(child, depth + 1)

    return tree(errors.TocError, 0)


def _metrics() -> Iterator[str]:
    for kind in MetricKind:
        highest = kind is MetricKind.HIGHEST
        yield f"{'Gauges of which the highest counts' if highest else f'{kind.capitalize()}s'}:\n\n"
        for metric in METRICS.values():
            if metric.kind is kind:
                name = f"{metric.name}_total" if kind is MetricKind.COUNTER else metric.name
                labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
                yield _item(f"`{name}{labels}`", metric.help)
        yield "\n"


def _roles() -> Iterator[str]:
    for role in Role:
        calls = ", ".join(action for action in Action if role in action.roles)
        yield _item(f"`{role}`", "all" if role is Role.ADMIN else calls)
    needing = ", ".join(action for action in Action if action.cluster)
    yield _item("Only with the pattern `*`", needing)


_LISTS: dict[str, Callable[[], Iterator[str]]] = {
    "settings": _settings, "commands": _commands, "policies": _policies, "errors": _errors,
    "metrics": _metrics, "roles": _roles,
}  # fmt: skip

if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
