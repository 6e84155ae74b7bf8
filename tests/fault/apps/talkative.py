"""The test application, which says something in every way that Python has: a line with each handler, and from
a thread of each process more than any log takes in, while the file named by TOC_TEST_TALK exists."""

import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path

from harness import app

from toc import Task
from toc.observe.log import get_logger

center = app.center
log = get_logger(__name__)


def say(text: str) -> None:
    log.info("said", text=text)
    logging.getLogger("talkative").warning(text)
    warnings.warn(text, stacklevel=1)
    print(text)
    print(text, file=sys.stderr)


def _talk() -> None:
    wanted = Path(os.environ["TOC_TEST_TALK"])
    while True:
        if wanted.exists():
            say("x" * 4000)
        time.sleep(0.01)


def _after_sleep(task: Task, then: object = app.after_sleep) -> None:
    say(f"task {task.job_id}")
    assert callable(then)
    then(task)


app.after_sleep = _after_sleep
if "TOC_TEST_TALK" in os.environ:  # else a test imports it
    logging.basicConfig()
    warnings.simplefilter("always")
    threading.Thread(target=_talk, daemon=True).start()
