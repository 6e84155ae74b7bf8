"""The test application with one topic more, whose handler runs on threads like others."""

from harness import app

from toc import Task

center = app.center


@center.handler("test.other")
def on_thread(task: Task) -> None:
    with app.recorded(task):
        pass
