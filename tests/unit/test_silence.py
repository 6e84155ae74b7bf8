"""How long a process has been silent, and how long it may be."""

import socket

from toc.coordination.assignment import Member
from toc.model.topic import Topic
from toc.worker.control import ControlPipe
from toc.worker.daemon.processes import SILENT_SECONDS, Child


def test_only_time_that_the_listener_was_awake_for_is_silence() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = Child(ControlPipe(ours), Member("w", "h"), 0)
    child.look(3600)  # the first look
    assert child.silent == 0
    for _ in range(5):
        child.look(1)
    assert child.silent == 5
    child.look(3600)  # the listener stood still, perhaps with everybody else
    assert child.silent == 7


def test_a_process_is_ended_before_anything_that_it_holds_times_out() -> None:
    topic = Topic("t", 1, 1)
    # It was kept alive last up to a third of prepare_timeout before the silence began.
    assert topic.prepare_timeout * 2 / 3 >= SILENT_SECONDS
