"""Presence: a process holds a name that the kernel frees when it ends, so others on the host know it is gone.

The name is that of a Unix socket without a file (the abstract namespace). It is free once the process has
ended, however it ended, and not a moment before; no later process can be taken for it, as with pids. Such
names are known within one network namespace of one running kernel, for which the name carries a mark: of
processes on other machines, in containers with a network of their own, or before a restart of the machine
nothing is concluded.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Self

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_MARKED = re.compile(r"[0-9a-f]{8}\.([0-9a-f]{8})")


class Presence:
    """The name, held by this process until ``close`` or its end. One without a mark is not held.

    Raises OSError when the kernel does not let it.
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

    def close(self) -> None:
        """Free the name; twice is fine."""
        if self._socket is not None:
            self._socket.close()


class Neighbourhood:
    """The processes of whose names this one can tell whether they are held: those of its host.

    ``mark`` stands for the running kernel, the network namespace and the name of the host; None where nothing
    can be told.
    """

    def __init__(self, mark: str | None) -> None:
        self._mark = mark

    @classmethod
    def of(cls, host: str) -> Self:
        """That of this process on a host of this name. It is tried whether names are held here and freed."""
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
        """A name that nobody has had: ``prefix-1f3a9c2e.5b0d7742``; without the mark where there is none."""
        own = f"{prefix}-{secrets.token_hex(4)}"
        return own if self._mark is None else f"{own}.{self._mark}"

    def knows(self, name: str) -> bool:
        """Whether the name is of this neighbourhood, so that ``proves_gone`` can tell."""
        return self._mark is not None and _mark(name) == self._mark

    def proves_gone(self, name: str) -> bool:
        """Whether the process of that name has certainly ended. It held the name before it told anybody."""
        if not self.knows(name):
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as caller:
                caller.connect(_address(name))
        except ConnectionRefusedError:
            return True  # nobody holds it
        except OSError:  # nobody can tell: there may be no descriptor left
            return False
        return False


def _mark(name: str) -> str | None:
    found = _MARKED.fullmatch(name.rpartition("-")[2])
    return found[1] if found else None


def _address(name: str) -> bytes:
    """At most 107 bytes, however long the name is."""
    return b"\0toc-" + hashlib.sha256(os.fsencode(name)).hexdigest().encode()
