"""The test application as it was before it learned two of its topics."""

from harness import app

from toc import TimeoutCenter

center = TimeoutCenter()
for topic in ("test.sync", "test.async"):
    center.handlers[topic] = app.center.handlers[topic]
