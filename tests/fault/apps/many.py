"""The test application with more topics, for a cluster with thousands of slots."""

from __future__ import annotations

from harness import app

from toc import Task

center = app.center


def on_thread(task: Task) -> None:
    with app.recorded(task):
        pass


for number in range(6):
    center.handler(f"test.more{number}")(on_thread)
