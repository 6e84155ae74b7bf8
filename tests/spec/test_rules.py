"""Each rule stands in the model, in the code that keeps it, and in the list of the model's README."""

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TAG = re.compile(r"\[rule: ([a-z-]+)\]")


def tags(files: Iterable[Path]) -> set[str]:
    return {tag for file in files for tag in TAG.findall(file.read_text())}


def test_model_and_code_carry_the_same_rules() -> None:
    modelled = tags((ROOT / "spec").glob("*.pml"))
    kept = tags([*(ROOT / "toc").rglob("*.py"), *(ROOT / "toc").rglob("*.lua")])
    assert modelled - kept == set(), "in the model alone"
    assert kept - modelled == set(), "in the code alone"


def test_the_readme_lists_every_rule_once() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "spec" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(tags((ROOT / "spec").glob("*.pml")))
