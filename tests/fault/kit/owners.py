"""Who has which slot: as ZooKeeper tells it, and as the history shows."""

from harness.final import read_final
from harness.system import DaemonProcess, System

from toc.coordination.operator import Operator
from toc.coordination.znodes import host_of


def owners(operator: Operator) -> dict[tuple[str, int], str]:
    """The worker that owns each slot and table; {} while one is on its way to another."""
    rows = operator.slots()
    settled = all(row.owner == row.assigned for row in rows)
    return {(row.topic, row.number): row.owner for row in rows if row.owner} if settled else {}


def shared(operator: Operator) -> set[str]:
    """The hosts that have slots; none while a slot is on its way to another one."""
    return set(map(host_of, owners(operator).values()))


def wait_for_shares(system: System, *hosts: str) -> None:
    """Wait until these hosts, and no others, have slots."""
    with operator_of(system) as operator:
        system.wait(lambda: shared(operator) == set(hosts), f"{', '.join(hosts)} have their slots", 30)


def operator_of(system: System, connect_timeout: float = 30) -> Operator:
    """The operator of a system's cluster; to be entered."""
    settings = system.settings
    return Operator(settings.zookeeper or "", cluster=settings.cluster, connect_timeout=connect_timeout)


def hosts_by_slot(
    system: System, daemons: list[DaemonProcess], since: float, before: float
) -> dict[tuple[int, int], set[str]]:
    """Which hosts started handlers between two instants (seconds since 1970), by biz_type and slot."""
    host_by_pid = {pid: daemon.host for daemon in daemons for pid in daemon.workers()}
    slot_of = {
        row.job_id: (row.biz_type, row.slot_crc % row.slot_amount) for row in read_final(system.center).rows
    }
    found: dict[tuple[int, int], set[str]] = {}
    for event in system.history():
        if event.event == "start" and since <= event.at / 1e9 < before:
            found.setdefault(slot_of[event.job_id], set()).add(host_by_pid[event.pid])
    return found
