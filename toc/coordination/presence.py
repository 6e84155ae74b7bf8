"""Detects ended processes of this host: each process holds a name, which the kernel frees when it ends.

The name is that of a Unix socket without a file (the abstract namespace). It becomes free when the process
ends, however that happens, and not earlier. Unlike a pid, it never belongs to a later process. Such names are
visible only within one network namespace of one running kernel, which a mark in the name identifies. So
nothing is concluded about processes on other machines, in containers with a network of their own, or from
before a restart of the machine.
"""

import hashlib
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Self

from toc.model.fork import call_in_children

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_MARKED = re.compile(r"[0-9a-f]{8}\.([0-9a-f]{8})")


class Presence:
    """A name that this process holds until ``close`` or its end; a forked child does not. A name without a
    mark is not held.

    Raises OSError if the kernel refuses it.
    """

    def __init__(self, name: str) -> None:
        self._socket: socket.socket | None = None
        if _mark(name):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._socket.bind(_address(name))
            except OSError:
                self._socket.close()
                raise
            call_in_children(self.close)

    def close(self) -> None:
        """Free the name. May be called twice."""
        if self._socket is not None:
            self._socket.close()


class LocalNames:
    """The processes whose names this process can test: those of its host.

    ``mark`` identifies the running kernel, the network namespace and the host name; None if names cannot be
    tested.
    """

    def __init__(self, mark: str | None) -> None:
        self._mark = mark

    @classmethod
    def of(cls, host: str) -> Self:
        """Describe this process's neighbourhood on ``host``. Tests first that names are held and freed
        here."""
        try:
            network = _NETWORK.stat()
            place = f"{_BOOT_ID.read_text().strip()} {network.st_dev} {network.st_ino} {host}"
            here = cls(hashlib.sha256(place.encode()).hexdigest()[:8])
            name = here.name("trial")
            trial = Presence(name)
            held = not here.proves_gone(name)
            trial.close()
        except OSError:
            return cls(None)
        return here if held and here.proves_gone(name) else cls(None)

    def name(self, prefix: str) -> str:
        """Return a new unique name: ``prefix-1f3a9c2e.5b0d7742``, without the suffix if there is no mark."""
        own = f"{prefix}-{secrets.token_hex(4)}"
        return own if self._mark is None else f"{own}.{self._mark}"

    def knows(self, name: str) -> bool:
        """Whether the name belongs to this neighbourhood, so that ``proves_gone`` can test it."""
        return self._mark is not None and _mark(name) == self._mark

    def proves_gone(self, name: str) -> bool:
        """Whether the process with that name has certainly ended. A process holds its name before it
        publishes it."""
        if not self.knows(name):
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller:
                caller.connect(_address(name))
        except OSError as exc:  # refused: no process holds it; else unknown: there may be no descriptor left
            return isinstance(exc, ConnectionRefusedError)
        return False


def _mark(name: str) -> str | None:
    found = _MARKED.fullmatch(name.rpartition("-")[2])
    return found[1] if found else None


def _address(name: str) -> bytes:
    """Map a name of any length to at most 107 bytes."""
    return b"\0toc-" + hashlib.sha256(os.fsencode(name)).hexdigest().encode()
