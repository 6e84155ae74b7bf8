"""Many processes and many servers: each process keeps connections to the servers of its own slots alone."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from harness.system import NewSystem
from harness.tables import raw

from benchmarks import processes
from benchmarks.local import MariaDB, ZooKeeper
from toc import NewTask
from toc.coordination.assignment import Spread
from toc.operate import cluster

SERVERS, DATABASES, SLOTS = 4, 8, 64
HOSTS, PROCESSES = 2, 4
PER_SERVER = 8
"""Most connections of a process to one server."""
AT_DAEMONS = 2
"""Of a host's daemon to a server, as docs/scale.md has it."""
TASKS = 2_000


def connections(mariadb: MariaDB, users: Mapping[str, int], pids: Iterable[int]) -> dict[int, Counter[int]]:
    """How many connections each of these processes has to each server, by the server's own list."""
    with raw(mariadb.url) as stranger:
        rows = stranger.exec_driver_sql("SELECT user, host FROM information_schema.processlist").all()
    server = {int(host.rpartition(":")[2]): users[user] for user, host in rows if user in users}
    fields = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = {int(each[1].rpartition(":")[2], 16): each[9] for each in fields}
    found: dict[int, Counter[int]] = defaultdict(Counter)
    for pid in pids:
        own = set(processes.sockets(pid))
        for port, number in server.items():
            found[pid][number] += inode.get(port) in own
    return found


@pytest.mark.chaos  # what nobody uses is closed after a minute
def test_a_process_keeps_connections_to_the_servers_of_its_slots_alone(
    new_system: NewSystem, mariadb: MariaDB, database_prefix: str, zookeeper: ZooKeeper, zookeeper_root: str
) -> None:
    users = {f"server_{number}": number for number in range(SERVERS)}
    with raw(mariadb.url) as root:
        for user in users:
            root.exec_driver_sql(f"CREATE OR REPLACE USER {user} IDENTIFIED BY 'pw'")
            root.exec_driver_sql(f"GRANT ALL ON `{database_prefix}%%`.* TO {user}")
    place = urlsplit(mariadb.url).netloc.rpartition("@")[2]
    system = new_system(
        database_urls=[f"mysql+pymysql://{user}:pw@{place}" for user in users],
        databases=DATABASES,
        tables=SLOTS,
        zookeeper=zookeeper.url,
        cluster=zookeeper_root,
    )
    system.create_topics(slots=SLOTS)
    daemons = [system.start(f"host-{number}", processes=PROCESSES) for number in range(HOSTS)]
    job_ids = system.client.submit_many([NewTask("test.sync", n, 5.0) for n in range(TASKS)])
    system.wait(lambda: not system.pending(job_ids), "every task has run", 60)

    spread = Spread(DATABASES, SERVERS)
    workers = {row.member.worker_id: row.member.pid for row in cluster.living_workers(system.center)}
    own: dict[int, set[int | None]] = {pid: {0} for pid in workers.values()}  # the first has the records
    for slot in cluster.slot_owners(system.center):
        assert slot.owner is not None
        own[workers[slot.owner]].add(spread.server(SLOTS, slot.number))
    assert all(len(servers) <= 2 for servers in own.values()), "the first server, and one of its own"

    def by_process() -> dict[int, Counter[int]]:
        return connections(mariadb, users, {*own, *(daemon.process.pid for daemon in daemons)})

    def settled() -> bool:
        found = by_process()
        others = [pid for pid, servers in own.items() if not set(+found[pid]) <= servers]
        return len(others) <= 1  # it reads all counts, for the horizon

    system.wait(settled, "each process has connections to the servers of its slots alone", 300)
    found = by_process()
    for number in range(SERVERS):
        there = sum(found[pid][number] > 0 for pid in own)
        total = sum(counts[number] for counts in found.values())
        print(f"server {number}: {there} of {len(own)} processes, {total} connections")
        assert there, "some process works for each server"
        assert total <= PER_SERVER * there + AT_DAEMONS * HOSTS
