"""When a process reports that it does not reach a server."""

from __future__ import annotations

from toc.worker.beat import OUT_SECONDS, Reach


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_server_is_reported_after_a_while_and_taken_back_at_once() -> None:
    time = Time()
    reach = Reach(time)
    assert reach.look({"database 0"}) == []
    time.now += OUT_SECONDS - 0.1
    assert reach.look({"database 0"}) == []
    time.now += 0.2
    assert reach.look({"database 0", "redis r:1"}) == ["database 0"]
    assert reach.look(()) == []
    assert reach.look({"database 0"}) == [], "it begins anew"
