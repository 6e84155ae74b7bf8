"""Runs Spin over spec/*.pml and reads what it says.

As a program it makes the searches that its arguments name, or all, and prints what each covers: the table in
spec/README.md.
"""

import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.programs import need

MODEL = Path(__file__).parents[2] / "spec"
MEMORY_MB = 4000
MAX_DEPTH = 1_000_000
QUICK_TABLE, QUICK_DEPTH = 20, 100_000
"""A quick search begins with room for 2^20 states, and for fewer steps: most end before more is cleared."""
SECONDS = 1500


@dataclass(frozen=True)
class Search:
    """One search: ``flags`` as in searches.toml; ``finds`` is what a mutation's assertion names."""

    kind: str
    name: str
    flags: str
    finds: str = ""
    model: str = "toc"
    slow: bool = False
    compress: bool = False


@dataclass(frozen=True)
class Result:
    """What one search came to; ``seconds`` are those of compiling it, too."""

    errors: int
    error: str
    states: int
    seconds: float
    megabytes: float
    complete: bool
    output: str


def searches(kind: str) -> list[Search]:
    """All searches of spec/searches.toml of one kind: safety, liveness or mutation."""
    with (MODEL / "searches.toml").open("rb") as file:
        return [Search(kind, **entry) for entry in tomllib.load(file)[kind]]


def need_spin() -> None:
    """Skip the test without Spin and its C compilers; where CI is set, fail it."""
    for program in ("spin", "gcc", "tcc"):
        need(program)


@cache
def run(search: Search, directory: Path) -> Result:
    """Make the search, in a directory of its own below this one."""
    place = directory / f"{search.kind}-{re.sub(r'[^a-z0-9]+', '-', search.name.lower())}"
    place.mkdir()
    began = time.monotonic()
    liveness = search.kind == "liveness" or search.finds == "acceptance cycle"
    defines = [f"-D{flag}" for flag in search.flags.split()]
    _call(["spin", "-a", *defines, str(MODEL / f"{search.model}.pml")], place)
    options = ["-DNFAIR=3"] if liveness else ["-DSAFETY", "-DNOCLAIM"]
    if not search.slow and not liveness:
        options += ["-DNOCOMP", "-DSFH"]  # states as they are: a fifth less time for a third more memory
    if search.compress:
        options.append("-DCOLLAPSE")
    # gcc takes longer to compile than most quick searches to run; tcc takes a hundredth of a second.
    compiler = ["gcc", "-O2"] if search.slow else ["tcc"]
    _call([*compiler, "-w", *options, f"-DMEMLIM={MEMORY_MB}", "-o", "pan", "pan.c"], place)
    bounds = [f"-m{MAX_DEPTH}"] if search.slow else [f"-m{QUICK_DEPTH}", f"-w{QUICK_TABLE}"]
    output = _call(["./pan", *bounds, *(["-a", "-f"] if liveness else [])], place)
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"^\s*(\d+) states, stored", output, re.MULTILINE)
    memory = re.search(r"^\s*([\d.]+)\s+total actual memory usage", output, re.MULTILINE)
    assert errors is not None, output
    assert states is not None, output
    said = re.search(r"^pan:1: (.*)$", output, re.MULTILINE)
    return Result(
        errors=int(errors[1]),
        error=said[1] if said else "",
        states=int(states[1]),
        seconds=time.monotonic() - began,
        megabytes=float(memory[1]) if memory else 0.0,
        complete="Search not completed" not in output and "too small" not in output,
        output=output,
    )


def _call(command: list[str], place: Path) -> str:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=SECONDS, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}:\n{output}"
    return output


def _main(wanted: Sequence[str]) -> None:
    """Make the searches that are named, or all, and print what each covers."""
    print("| search | kind | flags | states | seconds | MB |\n| --- | --- | --- | --: | --: | --: |")
    with tempfile.TemporaryDirectory() as directory:
        for kind in ("safety", "liveness", "mutation"):
            for search in searches(kind):
                if wanted and search.name not in wanted:
                    continue
                result = run(search, Path(directory))
                found = f"{result.states:,}" if result.complete else f"{result.states:,} (not complete)"
                if result.errors:
                    found = f"found: `{search.finds or result.error}`"
                slow = " (slow)" if search.slow else ""
                print(
                    f"| {search.name} | {search.model}, {kind}{slow} | `{search.flags}` | {found} "
                    f"| {result.seconds:.1f} | {result.megabytes:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    _main(sys.argv[1:])
