"""How long a process has been silent, and how long it may be."""

from toc.model.topic import Topic
from toc.worker.daemon.processes import SILENT_SECONDS, Silence


def test_only_time_that_the_listener_was_awake_for_is_silence() -> None:
    now = 100.0
    silence = Silence(lambda: now)
    for _ in range(5):
        now += 1
        silence.look()
    assert silence.seconds == 5
    now += 3600  # it stood still, perhaps with everybody else
    assert silence.look() == 7
    now += 0.5
    silence.broken()
    assert silence.seconds == 0
    now += 1
    assert silence.look() == 1


def test_a_process_is_ended_before_anything_that_it_holds_times_out() -> None:
    topic = Topic("t", 1, 1)
    # It was kept alive last up to a third of prepare_timeout before the silence began.
    assert topic.prepare_timeout * 2 / 3 >= SILENT_SECONDS
