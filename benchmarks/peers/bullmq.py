"""BullMQ, which is JavaScript: bullmq/submit.mjs submits, bullmq/worker.mjs works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peer import Peer

HERE = Path(__file__).parent / "bullmq"


class BullMq(Peer):
    def __init__(self) -> None:
        node = shutil.which("node")
        if node is None:
            raise RuntimeError("node is not on PATH")
        self._node = node
        self._submitter = subprocess.Popen(
            [node, HERE / "submit.mjs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def version(self) -> str:
        package = json.loads((HERE / "node_modules/bullmq/package.json").read_text())
        said = subprocess.run([self._node, "--version"], capture_output=True, text=True, check=True).stdout
        return f"BullMQ {package['version']}, node {said.strip()}"

    def commands(self, processes: int) -> list[list[str]]:
        return [[self._node, str(HERE / "worker.mjs"), os.environ["BENCH_STARTS"]] for _ in range(processes)]

    def submit(self, number: int, due: int) -> None:
        self._ask([number], [due])

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        for first in range(0, len(numbers), 1000):
            self._ask(list(numbers[first : first + 1000]), list(dues[first : first + 1000]))

    def pending(self) -> int:
        return self._ask([], [])

    def close(self) -> None:
        assert self._submitter.stdin is not None
        self._submitter.stdin.close()
        self._submitter.wait(10)

    def _ask(self, numbers: list[int], dues: list[int]) -> int:
        assert self._submitter.stdin is not None
        assert self._submitter.stdout is not None
        milliseconds = [due // 1_000_000 for due in dues]
        self._submitter.stdin.write(json.dumps([numbers, milliseconds]) + "\n")
        return int(self._submitter.stdout.readline())


PEER = BullMq
