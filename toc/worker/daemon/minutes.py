"""Writes what a member did in each minute: the growth of its counters, a row a minute.

While the first database is away the last minutes wait in memory, and are written when it is back.
"""

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from toc.loop import Loop
from toc.model import minute as minutes
from toc.model.clock import Clock, RateLimit
from toc.model.errors import SchemaBehind, StoreUnavailable
from toc.model.minute import MINUTE_MS, Minute, Tally
from toc.observe import metrics
from toc.observe.board import Key
from toc.observe.log import get_logger
from toc.store.records.cluster import MinuteRow, MinuteTable

log = get_logger(__name__)

RETRY_SECONDS = 5.0
LAST_SECONDS = 3.0
"""How long who stops waits for the last minute to be written: the first database may hang."""
COMPLAIN_SECONDS = 600.0


_PLACES = {"processed": minutes.PROCESSED, "failed": minutes.FAILED, "dead": minutes.DEAD}


def tallies(values: Mapping[Key, Sequence[float]]) -> dict[str, Tally]:
    """Return what a member has done by topic, by its counters, since it began."""
    found: dict[str, list[int]] = {}
    for (name, *labels), cells in values.items():
        added = [0] * minutes.LATENESS
        if name == metrics.LATENESS.metric.name:
            added += map(int, cells[:-1])
            added[minutes.STARTS] = sum(added)
        elif name == metrics.HANDED_OUT.metric.name:
            added[minutes.STARTS] = int(cells[0])
        elif name == metrics.TRIES.metric.name and labels[1] in _PLACES:
            added[_PLACES[labels[1]]] = int(cells[0])
        if any(added):
            found[labels[0]] = minutes.plus(found.get(labels[0], ()), added)
    return dict(found)


class Minutes:
    """The minutes of a member of this host, written on a thread. ``values`` returns its counters."""

    def __init__(
        self, table: MinuteTable, host: str, values: Callable[[], Mapping[Key, Sequence[float]]], clock: Clock
    ) -> None:
        self._table = table
        self._member = f"{host}.{secrets.token_hex(4)}"
        self._values = values
        self._clock = clock
        self._before: Mapping[str, Tally] = tallies(values())
        self._minute = clock.now_ms() // MINUTE_MS
        self._most = 0
        self._unwritten: deque[MinuteRow] = deque(maxlen=minutes.KEPT)
        self._complains = RateLimit(clock, COMPLAIN_SECONDS)
        self._over = False
        self._loop = Loop("minutes", self._turn, last=True)

    def start(self) -> None:
        """Begin to write each minute."""
        self._loop.start()

    def stop(self) -> None:
        """Have the last one written, within LAST_SECONDS. May be called twice, or without start."""
        self._over = True
        self._loop.stop(LAST_SECONDS)

    def _turn(self) -> float:
        try:
            return self.run_once(last=self._over)
        except Exception:  # numbers that cannot be told must not end what does the work
            log.warning("minutes_not_written", exc_info=True)
            return MINUTE_MS / 1000

    def run_once(self, *, last: bool = False) -> float:
        """Write the minute that is over, if one is or it is the ``last``. Returns the seconds until the next
        call."""
        minute = self._clock.now_ms() // MINUTE_MS
        if last or minute != self._minute:
            self._note()
            if minute < self._minute:  # the clock was set back: these minutes have a row already
                self._member = self._member[:-8] + secrets.token_hex(4)
            self._minute = minute
        left = (minute + 1) * MINUTE_MS - self._clock.now_ms()
        return left / 1000 if self._write() else min(left / 1000, RETRY_SECONDS)

    def _note(self) -> None:
        """Note what was done in the minute that ends now."""
        now = tallies(self._values())
        gained = {topic: minutes.minus(tally, self._before.get(topic, ())) for topic, tally in now.items()}
        self._before = now
        gained = {topic: tally for topic, tally in gained.items() if any(tally)}
        self._most = max(self._most, sum(tally[minutes.STARTS] for tally in gained.values()))
        text = minutes.write(Minute(gained, self._most))
        self._unwritten.append(MinuteRow(self._minute * MINUTE_MS, self._member, text))

    def _write(self) -> bool:
        """Write what is not written yet. Returns whether all is."""
        if not self._unwritten:
            return True
        try:
            self._table.keep(self._unwritten)
        except (StoreUnavailable, SchemaBehind) as exc:
            if self._complains():
                log.warning("minutes_not_written", error=str(exc))
            return False
        self._unwritten.clear()
        return True
