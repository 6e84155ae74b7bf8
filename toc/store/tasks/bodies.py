"""The bodies of tasks: a table beside each task table, in the same database.

A body always has the version of its row: the transaction that inserts the row, gives it another
version or deletes it does the same to the body. A reader names the version that it saw in the row.
If that body is gone, the row has changed since.
"""

from collections.abc import Iterable, Mapping
from functools import partial

from toc.model.task import Content, Submission
from toc.store.servers.server import DatabaseServer, Statement
from toc.store.servers.shards import Answers, Shards
from toc.store.tasks import rows as sql

BODY_BYTES = 1_000_000
"""Bytes of bodies that one statement writes, or one answer or transaction holds; more if one alone is
longer."""


class Bodies:
    """Reads bodies. Thread-safe."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def read(self, wanted: Mapping[int, int]) -> Answers[Content]:
        """Return the bodies of tasks, given as job_id -> version: none for a row that has changed since.

        One round trip per server, so the caller bounds their bytes.
        """
        return self._shards.each(self._shards.group(wanted), partial(self._read, wanted)).joined()

    def one(self, job_id: int, version: int) -> Content | None:
        """Return one body, None if its row has changed since; also asks a server that is marked as away."""
        ((server, ids),) = self._shards.group([job_id]).items()
        return self._read({job_id: version}, server, ids).get(job_id)

    def _read(
        self, wanted: Mapping[int, int], server: DatabaseServer, ids: sql.ByTable
    ) -> dict[int, Content]:
        names, found = self._shards.body_names, {}
        selects = sql.select_by_id(server, "job_id,version,content_type,body", names, ids)
        with sql.understood():
            for result in server.run(selects, outwait=False):
                for job_id, version, content_type, data in result.rows:
                    if not isinstance(content_type, str) or not isinstance(data, bytes):
                        raise TypeError
                    if wanted[job_id] == version:
                        found[job_id] = Content(content_type, data)
        return found


def insert(name: str, many: Iterable[Submission]) -> list[Statement]:
    """Return the INSERT of the bodies of those of these tasks that have one, into one table, if any."""
    values: list[str] = []
    params: list[str | bytes] = []
    for one in many:
        if one.content is not None:
            values.append(f"({one.row.job_id:d},{one.row.version:d},%s,%s)")
            params += one.content
    if not values:
        return []
    # Quoted: a reserved word in a caller's session with sql_mode ORACLE.
    into = f"INSERT INTO {name} (job_id,version,content_type,`body`) VALUES "
    return [Statement(into + ",".join(values), params)]


def follow(name: str, task_name: str, job_ids: Iterable[int]) -> Statement:
    """Return the UPDATE that gives bodies their rows' new versions, after these rose by one.

    It belongs into the transaction that changed the rows. A body whose row is not one version ahead stays, so
    it may be sent twice, and for rows that did not change.
    """
    return Statement(
        f"UPDATE {name} SET version=version+1 WHERE job_id IN ({sql.numbers(job_ids)}) "
        f"AND version+1=(SELECT {task_name}.version FROM {task_name} WHERE {task_name}.job_id={name}.job_id)"
    )


def follow_one(name: str, job_id: int, version: int) -> Statement:
    """Return the UPDATE that gives the body of this version the next one. It locks that body alone."""
    where = f"job_id={job_id:d} AND version={version:d}"
    return Statement(f"UPDATE {name} SET version={version + 1:d} WHERE {where}")


def insert_if(name: str, task_name: str, job_id: int, version: int, content: Content) -> Statement:
    """Return the INSERT of one body that takes effect if its row has this version and names it."""
    names_it = f"body_sha256={sql.literal(content.fingerprint())}"
    return Statement(
        f"INSERT INTO {name} (job_id,version,content_type,body) SELECT job_id,version,%s,%s FROM {task_name} "
        f"WHERE job_id={job_id:d} AND version={version:d} AND {names_it}",
        content,
    )


def delete_former(name: str, task_name: str, job_id: int) -> Statement:
    """Return the DELETE of a task's bodies of versions before that of its row."""
    now = f"SELECT {task_name}.version FROM {task_name} WHERE {task_name}.job_id={job_id:d}"
    return Statement(f"DELETE FROM {name} WHERE job_id={job_id:d} AND version<({now})")


def delete(name: str, task_name: str, job_ids: Iterable[int]) -> Statement:
    """Return the DELETE of the bodies whose rows are gone, for the transaction that deleted these."""
    there = f"SELECT 1 FROM {task_name} WHERE {task_name}.job_id={name}.job_id"
    return Statement(f"DELETE FROM {name} WHERE job_id IN ({sql.numbers(job_ids)}) AND NOT EXISTS ({there})")
