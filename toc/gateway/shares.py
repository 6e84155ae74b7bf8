"""What is scarce in a process, by who takes it: places, bytes. Nobody gets the last of it."""

from toc.model.errors import Busy

MAX_HELD = 128 << 20
"""Most bytes that all requests together hold: of bodies, received or to be handed out, and of long answers
until their clients have read them. One sender uses at most as many as are left free, so that he cannot keep
out others. A sender is a token, or on a port of a dialect the address of a client."""


class Shares:
    """Things that requests take, ``most`` in all, in the names of their senders; too many are ``refused``.

    One name has at most ``times`` times as many as are free, and each further name that many times as many as
    the first can still get. So nobody takes the last ones, and several together do not either: each finds
    fewer free. With ``times`` 1, a lone sender gets half of all, the next a quarter; with 7, seven eighths,
    and a further name seven eighths of these.
    """

    def __init__(self, most: int, refused: str, times: int = 1) -> None:
        self.most = most
        self._refused = f"{refused}; try again in a moment"
        self._times = times
        self._all = 0
        self._taken: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def take(self, first: str, *names: str, size: int = 1) -> None:
        """Take ``size`` in all these names. Raises Busy."""
        taken, times, free = self._taken, self._times, self.most - self._all
        room = (times * free - taken.get(first, 0)) // (times + 1)
        if room < size or any(taken.get(name, 0) + size > times * room for name in names):
            raise Busy(self._refused)
        self._all += size
        for name in (first, *names):
            taken[name] = taken.get(name, 0) + size

    def give(self, *names: str, size: int = 1) -> None:
        """Give them back."""
        self._all -= size
        for name in names:
            left = self._taken[name] - size
            if left:
                self._taken[name] = left
            else:
                del self._taken[name]


def memory(most: int = MAX_HELD) -> Shares:
    """Return the bytes that the requests of a process may hold, by sender. They are taken before they are
    read."""
    return Shares(most, "too many bytes are being received and sent")
