"""The task table: the only importer of sqlalchemy, pymysql and alembic.

``toc.store.migrate`` is imported separately: programs that do not migrate need no alembic in memory.
"""

from toc.model.verdict import Failure
from toc.store.batch import Finish, Guard
from toc.store.check import ShardStatus
from toc.store.scan import DueRow, Position
from toc.store.select import Selection
from toc.store.store import Store
from toc.store.topics import TopicTable

__all__ = [
    "DueRow",
    "Failure",
    "Finish",
    "Guard",
    "Position",
    "Selection",
    "ShardStatus",
    "Store",
    "TopicTable",
]
