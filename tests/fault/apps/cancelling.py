"""The test application with one topic more, whose handler cancels another task, as ``cancels`` says."""

from harness import app

from toc import Task

center = app.center


@center.handler("test.cancelling")
def on_thread(task: Task) -> None:
    with app.recorded(task):
        center.cancel(task.attribute["cancels"])
