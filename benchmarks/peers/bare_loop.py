"""The floor: the cost of Redis and a sleeping loop by themselves. It promises nothing.

Tasks lie in a few sorted sets, each taken by one process. A Lua call removes what is due and returns when the
next is due. The loop sleeps until then, at most LOOK seconds, because nothing tells it of new tasks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from itertools import islice

import redis

from benchmarks.peer import NS, Peer
from benchmarks.record import started

SETS, LOOK, TAKE = 4, 0.05, 1000
TAKE_DUE = """
local now = redis.call('TIME')
now = now[1] * 1000000 + now[2]
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
if #due > 0 then redis.call('ZREM', KEYS[1], unpack(due)) end
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return {due, first or false}
"""


class BareLoop(Peer):
    def __init__(self) -> None:
        self._redis = redis.Redis.from_url(os.environ["BENCH_REDIS"])

    def version(self) -> str:
        return "no version"

    def commands(self, processes: int) -> list[list[str]]:
        loop = [sys.executable, "-m", "benchmarks.peers.bare_loop"]
        return [[*loop, str(number), str(processes)] for number in range(processes)]

    def submit(self, number: int, due: int) -> None:
        self._redis.zadd(_key(number % SETS), {str(number): due // 1000})

    def submit_many(self, numbers: Sequence[int], dues: Sequence[int]) -> None:
        pairs = iter(zip(numbers, dues, strict=True))
        while chunk := list(islice(pairs, 1000)):
            pipeline = self._redis.pipeline(transaction=False)
            for one in range(SETS):
                part = {str(number): due // 1000 for number, due in chunk if number % SETS == one}
                if part:
                    pipeline.zadd(_key(one), part)
            pipeline.execute()

    def pending(self) -> int:
        return sum(int(self._redis.zcard(_key(number))) for number in range(SETS))

    def close(self) -> None:
        self._redis.close()


def _key(number: int) -> str:
    return f"bare_{number}"


def loop(number: int, processes: int) -> None:
    """Run for ever: take what is due, record its start, sleep until the next is due."""
    client = redis.Redis.from_url(os.environ["BENCH_REDIS"])
    take = client.register_script(TAKE_DUE)
    keys = [_key(one) for one in range(SETS) if one % processes == number]
    while True:
        until = time.time() + LOOK
        for key in keys:
            due, first = take(keys=[key], args=[TAKE])
            for one in due:
                started(int(one))
            if first is not None:
                until = min(until, float(first) * 1000 / NS)
        time.sleep(max(0.0, until - time.time()))


PEER = BareLoop

if __name__ == "__main__":
    loop(int(sys.argv[1]), int(sys.argv[2]))
