"""Who reads the log of a daemon."""

import os
import select
import threading
from contextlib import suppress
from pathlib import Path


class Reader:
    """Reads the log of a daemon through a pipe, and may stop or leave; keeps what it has read in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._receiver, self.sender = os.pipe()
        self.stream = f"/proc/{os.getpid()}/fd/{self.sender}"
        """The end to write to, as a path."""
        self._reads = True
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="log reader")
        self._thread.start()

    def told(self) -> str:
        """What it has read."""
        return self.path.read_text()

    def go_on(self) -> None:
        """Read again."""
        self._reads = True

    def stall(self, *, fill: bool = False) -> None:
        """Read no more; ``fill``: nor has the pipe room for a single byte."""
        with self._lock:
            self._reads = False
        if fill:
            # a description of its own: those who write to the pipe go on waiting
            descriptor = os.open(f"/proc/self/fd/{self.sender}", os.O_WRONLY | os.O_NONBLOCK)
            with suppress(BlockingIOError):
                while True:
                    os.write(descriptor, b"\n")
            os.close(descriptor)

    def leave(self) -> None:
        """Close the pipe's end."""
        self._over.set()
        self._thread.join()

    def _read(self) -> None:
        with self.path.open("ab") as file:
            while not self._over.is_set():
                if not self._reads or not select.select([self._receiver], [], [], 0.05)[0]:
                    self._over.wait(0.01)
                    continue
                with self._lock:
                    if self._reads:
                        file.write(os.read(self._receiver, 1 << 20))
                        file.flush()
        os.close(self._receiver)
