"""The fault kit: what fault tests break things with, and how they report what happened.

load       tasks at a steady pace, from this process or another one
proxy      a TCP relay that cuts, stalls, delays and eats replies
servers    replicas and their promotion, resharding, shifted clocks, full disks, old snapshots
owners     who has which slot
doors      gateways with clients of theirs
stage      a whole cluster in which anything may break, for soaks
table      one line per fault, with its proof and what was promised; ``make faults`` prints them
"""
