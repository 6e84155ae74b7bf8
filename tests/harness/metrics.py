"""What a process of toc shows at its metrics address."""

import json
import re
import urllib.request

from toc.observe.board import Count

ANY_ADDRESS = {"TOC_METRICS_ADDRESS": "127.0.0.1:0"}
"""The environment of a process that takes a free port for its metrics."""


def address(log: str) -> str:
    """Where a process serves its metrics, by what it has logged."""
    served = re.findall(r"^.*metrics_served.*$", log, re.MULTILINE)
    return str(json.loads(served[-1])["address"])


def samples(log: str) -> dict[str, float]:
    """Every sample now, by its name with its labels as they are written."""
    with urllib.request.urlopen(f"http://{address(log)}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def taken(count: Count) -> float:
    """What this process has counted since the last call for the same."""
    found, count._cells[0] = count._cells[0], 0.0
    return found
