"""Coordinators that are driven as the supervisor of a daemon does."""

from toc.coordination.rows import RowsCoordinator
from toc.coordination.zookeeper import ZooKeeperCoordinator
from toc.model.topic import Slot


class Driven:
    """A daemon's coordinator, and its workers: ``held`` is what they consume. With ``reluctant`` they do not
    let go of what they should, as if handlers were still running."""

    def __init__(self, coordinator: RowsCoordinator | ZooKeeperCoordinator, host: str) -> None:
        self.coordinator = coordinator
        self.host = host
        self.reluctant = False
        self.held: dict[str, set[Slot]] = {}

    def align(self) -> None:
        """Drop and take what the assignment says."""
        desired, claimed = self.coordinator.desired(), self.coordinator.claimed()
        for worker_id, held in self.held.items():
            held &= claimed[worker_id]
            dropped = set() if self.reluctant else held - desired[worker_id]
            held -= dropped
            self.coordinator.release(worker_id, dropped)
        for worker_id, held in self.held.items():
            held |= self.coordinator.claim(worker_id, desired[worker_id] - held)

    @property
    def slots(self) -> set[Slot]:
        return set().union(*self.held.values())
