"""Runs commands of ``toc`` with any stdin, stdout and stderr: full, closed, or without a reader."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.forks import Forked, start

SECONDS = 30
"""A command that runs longer is killed; its code is -14 then."""
AT_ONCE = 4
"""So many commands run at the same time."""


@dataclass(frozen=True)
class Ended:
    """What a command ended with; "" where its stream was not a file."""

    words: Sequence[str]
    code: int
    out: str
    err: str

    @property
    def trace(self) -> bool:
        """Whether Python has shown its inside."""
        return any(sign in self.err for sign in ("Traceback", "Exception ignored", 'File "'))


class Commands:
    """Runs commands in ``directory`` with the settings ``env`` alone."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        plain = {name: value for name, value in os.environ.items() if not name.startswith("TOC_")}
        self._env = {**plain, **env}
        self._count = 0

    def __call__(self, *words: object, env: Mapping[str, str] | None = None, **streams: str) -> Ended:
        [ended] = self.all([[str(word) for word in words]], env=env, **streams)
        return ended

    def all(
        self, commands: Sequence[Sequence[str]], *, env: Mapping[str, str] | None = None, **streams: str
    ) -> list[Ended]:
        """Run several, some at the same time. ``streams``: ``stdout=FULL``."""
        running: list[tuple[Forked, dict[str, str]]] = []
        for number, words in enumerate(commands):
            if number >= AT_ONCE:
                running[number - AT_ONCE][0].wait()
            self._count += 1
            files = {name: str(self._directory / f"{self._count}.{name}") for name in ("stdout", "stderr")}
            files |= streams
            process = start(
                words,
                env={**self._env, **(env or {})},
                directory=self._directory,
                seconds=SECONDS,
                streams=files,
            )
            running.append((process, files))
        return [
            Ended(words, process.wait(), _text(files["stdout"]), _text(files["stderr"]))
            for words, (process, files) in zip(commands, running, strict=True)
        ]


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text(errors="backslashreplace") if file.is_file() else ""
