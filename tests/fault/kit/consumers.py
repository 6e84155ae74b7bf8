"""Consumers for soaks: programs of their own that pull over HTTP, and who starts them again.

    python -m fault.kit.consumers SEED PORT,PORT

The token is in TOC_TOKEN. A word on stdin says what becomes of the next answer with tasks: ``leave`` (the
consumer leaves before it, or in the middle of it), ``late`` (acks after ttr), ``elsewhere`` (acks at another
gateway) or ``twice`` (here and there at once). The program ends with its stdin.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from fault.kit.doors import BROKEN, PULLED, reset
from harness.history import History
from harness.order_clients import Native
from harness.system import System

PULL, WANTED = f"/v1/topics/{PULLED}:pull", {"max": 100, "wait": 3, "ttr": 4}
NOTHING = len(b'{"tasks":[]}')
REFUSED = {"cancelled", "dead", "replaced", "not_handed_out"}
"""What an ack may be answered that has not ended its task, nor found it processed."""
INSIST_SECONDS = 30.0


class Consumer:
    """One such program under a supervisor, which starts it again whenever it has ended."""

    def __init__(self, system: System, name: str, words: Sequence[str], env: Mapping[str, str]) -> None:
        self.name = name
        self.held_down = False
        self.surprises: list[str] = []
        """Ends that nobody caused: an answer that no gateway may give ends a consumer."""
        self._log = system.directory / f"{name}.log"
        self._words = [sys.executable, "-m", "fault.kit.consumers", *words]
        self._env = {**system.env, **env}
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._words, env=self._env, stdin=subprocess.PIPE, stdout=log, stderr=log, bufsize=0
            )

    def tell(self, word: str) -> bool:
        """Say what becomes of the next answer. Returns whether anybody has heard it."""
        assert self.process.stdin is not None
        if self.process.stdin.closed:  # it was killed, and is held down
            return False
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n".encode())
            return True
        return False

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.stop()

    def supervise(self) -> None:
        """Start it again if it has ended."""
        if self.held_down or self.process.poll() is None:
            return
        self.stop()
        if self.process.returncode >= 0:
            told = self._log.read_text().splitlines()[-1:]
            self.surprises.append(f"{self.name} ended with {self.process.returncode}: {told}")
        self._start()

    def stop(self) -> None:
        """End it."""
        self.process.communicate()


class Program:
    """What it does."""

    def __init__(self, dice: random.Random, ports: list[int], history: History) -> None:
        self._dice, self._ports, self._history = dice, ports, history
        self._here = Native(ports)

    def run(self, words: SimpleQueue[str]) -> None:
        """Pull and answer, for ever."""
        word = ""
        while True:
            with suppress(Empty):
                word = word or words.get_nowait()
            try:
                if word == "leave":
                    word = "" if self._leave() else word
                    continue
                status, answer = self._here.ask("POST", PULL, WANTED)
            except BROKEN:
                time.sleep(0.1)
                continue
            assert status == 200, (status, answer)
            if answer["tasks"]:
                self._work(word, answer["tasks"])
                word = ""

    def _leave(self) -> bool:
        """Leave a gateway. Returns whether it had tasks to answer with, as far as is known."""
        connection = http.client.HTTPConnection("127.0.0.1", self._here.wire.port, timeout=15)
        headers = {"Authorization": f"Bearer {os.environ['TOC_TOKEN']}", "Content-Type": "application/json"}
        connection.request("POST", PULL, json.dumps(WANTED), headers)
        client = connection.sock
        if self._dice.random() < 0.5:
            with self._history.fault("left", note="before the answer"):
                time.sleep(self._dice.uniform(0.0, 0.5))
                reset(client)
            return True
        with connection.getresponse() as answer:
            length = answer.length or 0
            if answer.status == 200 and length > NOTHING:
                answer.read(self._dice.randrange(length))
                with self._history.fault("left", note="in the middle of the answer"):
                    answer.close()
                    reset(client)
                return True
        connection.close()
        return False

    def _work(self, word: str, tasks: list[dict[str, Any]]) -> None:
        """Do what the tasks ask for, and answer."""
        runs = [run for run in map(_Run, tasks) if run.until > time.time_ns()]
        with self._history.fault("other", note="acks are late") if word == "late" else nullcontext():
            for run in runs:
                self._history.write("start", **run.names, v=run.version, biz=run.biz, until=run.until)
            time.sleep(max((run.sleep for run in runs), default=0.0))
            for run in runs:
                self._history.write("end", **run.names, out=run.outcome)
            if word == "late":
                latest = max((run.until for run in runs), default=0) / 1e9
                time.sleep(max(0.0, latest - time.time()) + self._dice.uniform(0.0, 1.0))
            self._answer(word, runs)

    def _answer(self, word: str, runs: list[_Run]) -> None:
        by_outcome = {what: [run for run in runs if run.outcome == what] for what in ("ok", "raise", "dead")}
        there = Native([port for port in self._ports if port != self._here.wire.port])
        at = {"elsewhere": [there], "twice": [self._here, there]}.get(word, [self._here])
        with ThreadPoolExecutor(len(at)) as threads:
            found = list(threads.map(lambda client: self._end(client, "ack", by_outcome["ok"]), at))
        for outcomes in zip(*found, strict=True):
            assert sum(outcome in ("acked", "late") for outcome in outcomes) <= 1, f"ended twice: {outcomes}"
        self._end(self._here, "nack", by_outcome["raise"])
        self._end(self._here, "nack", by_outcome["dead"], dead=True)

    def _end(self, client: Native, how: str, runs: list[_Run], **more: Any) -> list[str]:
        """Ack or nack until it is answered. Returns what came of each, "" where it was not."""
        outcomes = {run.lease: "" for run in runs}
        end = time.monotonic() + INSIST_SECONDS
        while left := [run for run in runs if not outcomes[run.lease]]:
            asked = {"leases": [run.lease for run in left], **more}
            try:
                status, answer = client.ask("POST", f"/v1/leases:{how}", asked)
            except BROKEN:
                break
            assert status == 200, (status, answer)
            for run, one in zip(left, answer["leases"], strict=True):
                outcome = one["outcome"]
                if outcome == "acked":
                    self._history.write("acked", **run.names)
                allowed = (
                    {"acked", "late", "already", *REFUSED} if how == "ack" else {"nacked", "buried", "gone"}
                )
                assert outcome in {*allowed, "failed"}, (how, one)
                outcomes[run.lease] = "" if outcome == "failed" else outcome
            if all(outcomes.values()) or time.monotonic() > end:
                break
            time.sleep(0.05)
        return list(outcomes.values())


class _Run:
    """One task as it was pulled."""

    def __init__(self, task: dict[str, Any]) -> None:
        attempt, asked = task["attempt"], task["attribute"]
        self.names = {"job": int(task["job_id"]), "try": attempt}
        self.version, self.biz, self.lease = task["version"], task["biz_id"], task["lease"]
        self.until = round(datetime.fromisoformat(task["lease_until"]).timestamp() * 1000) * 1_000_000
        self.sleep = asked.get("sleep", 0.0)
        failed, dead = (attempt <= asked.get(word, 0) for word in ("fail", "dead"))
        self.outcome = "raise" if failed else "dead" if dead else "ok"


def main() -> None:
    """The program."""
    seed, ports = sys.argv[1], [int(port) for port in sys.argv[2].split(",")]
    words: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            words.put(line.strip())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    program = Program(random.Random(seed), ports, History(Path(os.environ["TOC_TEST_HISTORY"])))
    program.run(words)


if __name__ == "__main__":
    main()
