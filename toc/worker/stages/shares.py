"""Shares: how many of a process's threads one topic may occupy, so that the others find some free."""

from __future__ import annotations


def most_threads(threads: int, held: int, free: int) -> int:
    """How many of so many ``threads`` a topic may occupy that holds ``held``, while ``free`` are free.

    Three quarters of what no other topic holds: it takes one more while it holds less than three times what
    is free. So a topic alone gets three quarters, and beside k slow topics 1 in 1 + 3k stays free for whoever
    comes. The rule is that of shared-memory switches (Choudhury and Hahne, "Dynamic queue length thresholds",
    1998); nobody needs to know which topics are slow.

    One that holds none may always take one: where none is free (``free`` is 0, or less while others do the
    same) a spare one serves it. Of two or three threads one stays free; the only one is for everybody.
    """
    pool = held + free if free > 0 else held  # without max and min: it is asked for each task
    most = pool - pool // 4
    limit = threads - (threads // 4 or 1)
    return (most if most < limit else limit) or 1
