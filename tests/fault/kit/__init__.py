"""The fault kit: what fault tests break things with, and how they report what happened.

proxy      a TCP relay that cuts, stalls, delays and eats replies
servers    replicas and their promotion, resharding, shifted clocks, full disks, old snapshots
failpoint  processes that end at a named line
table      one line per fault, with its proof; ``make faults`` prints them
"""
