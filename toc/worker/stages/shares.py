"""Shares: how many of a process's threads one topic may occupy, so that the others find some free."""

from __future__ import annotations


def most_threads(threads: int, held: int, free: int) -> int:
    """How many of ``threads`` a topic may occupy that holds ``held``, while ``free`` are free.

    Three quarters of what no other topic holds: it takes one more while it holds less than three times what
    is free. So a topic alone gets three quarters, and beside k slow topics 1 in 1 + 3k stays free for new
    arrivals. The rule is that of shared-memory switches (Choudhury and Hahne, "Dynamic queue length
    thresholds", 1998). It need not know which topics are slow.

    A topic that holds none may always take one: if none is free (``free`` is 0, or negative while others do
    so), a spare thread serves it. Of two or three threads one stays free; all share a single one.
    """
    pool = held + free if free > 0 else held  # without max and min: each task calls this
    most = pool - pool // 4
    limit = threads - (threads // 4 or 1)
    return (most if most < limit else limit) or 1
