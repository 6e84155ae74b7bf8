"""Copies of a worker process: what os.fork creates in a handler."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, time
from toc.worker import copies

signal.signal(signal.SIGTERM, lambda *_: None)  # as a worker process, which ends in its own time
copies.keep_apart()
for pause in [0.0] * 20 + [n / 20_000 for n in range(100)]:
    pid = os.fork()
    if not pid:
        time.sleep(20)
        os._exit(9)
    time.sleep(pause)
    os.kill(pid, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == -signal.SIGTERM, (pause, code)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


def test_a_copy_that_is_terminated_as_it_begins_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert not ended.returncode, ended.stderr
