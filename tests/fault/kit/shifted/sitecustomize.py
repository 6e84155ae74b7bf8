"""Loaded by Python processes whose clock is shifted: mends ``time.sleep``, which libfaketime 0.9.10 breaks.

It hands ``clock_nanosleep`` an instant of a clock that it does not shift, and gets EINVAL. Waiting for
nothing on no socket takes a duration instead.
"""

import select
import time


def _sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


time.sleep = _sleep  # type: ignore[assignment]  # it takes more kinds of numbers, which nobody uses here
