"""The test application with topics whose handlers take as long as a test wants.

A task of them waits for the file that its attribute names with ``until``.
"""

from harness import app

center = app.center

for number in range(3):
    center.handler(f"test.slow{number}")(app.on_thread)
