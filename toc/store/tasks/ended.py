"""Deletes ended rows, with their bodies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from toc.model.task import TaskStatus
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Shards
from toc.store.tasks import bodies
from toc.store.tasks import rows as sql

FINAL = (TaskStatus.PROCESSED, TaskStatus.CANCELLED)


class EndedRows:
    """Deletes ended rows. Thread-safe. Raises StoreUnavailable."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def delete(self, sizes: Mapping[int, int], statuses: Collection[int] = FINAL) -> int:
        """Delete those rows that have one of these statuses, and their bodies. Returns how many were deleted.

        ``sizes`` is job_id -> bytes of its body, -1 without one: a transaction deletes a bounded number of
        them. Raises StoreUnavailable if rows remain because their tables do not answer.
        """
        names, body_names = self._shards.names, self._shards.body_names

        def send(server: DatabaseServer, ids: Mapping[int, Sequence[int]]) -> int:
            statements = [
                Statement(
                    f"DELETE FROM {names[table]} WHERE job_id IN ({sql.numbers(part)}) "
                    f"AND status IN ({sql.numbers(statuses)})"
                )
                for table, part in ids.items()
            ]
            rows = len(statements)
            for table, part in ids.items():
                if with_body := [job_id for job_id in part if sizes[job_id] >= 0]:
                    statements.append(bodies.delete(body_names[table], names[table], with_body))
            results = server.run(statements, transaction=True, outwait=False)
            return sum(result.matched for result in results[:rows])

        return sum(
            sum(self._shards.each(self._shards.group(part), send).whole())
            for part in bodies.bounded(sizes.items())
        )
