"""All that operators can do, of every subject."""

from __future__ import annotations

from toc.operate import (
    admin,
    audit,
    bulk,
    cluster,
    dead,
    due,
    late,
    schedules,
    targets,
    tasks,
    templates,
    tokens,
    topics,
)
from toc.operate.operation import Operation

SUBJECTS = (
    tasks, late, topics, dead, due, bulk, cluster, admin, tokens, templates, audit, targets, schedules,
)  # fmt: skip
OPERATIONS = tuple(
    one for subject in SUBJECTS for one in vars(subject).values() if isinstance(one, Operation)
)
"""All that operators can do."""
