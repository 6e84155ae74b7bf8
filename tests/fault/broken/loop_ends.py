"""Internal loops that end without an error, each in a process of its own; TOC_TEST_ENDS is a directory.

Not a wrong build: nobody knows yet why one would.
"""

import os
import sys
import time
from pathlib import Path

from harness.app import center

from toc.loop import Loop, watched_thread

__all__ = ["center"]

VICTIMS = ("poll", "reclaim")

_start = Loop.start


def _first(name: str) -> bool:
    try:
        (Path(os.environ["TOC_TEST_ENDS"]) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _ending(loop: Loop) -> None:
    if loop.name == victim:
        watched_thread(loop.name, lambda: time.sleep(1), lambda: False).start()  # until the process serves
    else:
        _start(loop)


main = getattr(sys.modules["__main__"], "__spec__", None)
if main is not None and main.name == "toc.worker.process":
    victim = next(filter(_first, VICTIMS), "")
    Loop.start = _ending  # type: ignore[method-assign, assignment]
