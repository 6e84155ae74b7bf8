"""Operations, a module for each subject."""

from __future__ import annotations

from toc.operate.operation import Operation
from toc.operate.operations import (
    audit,
    bulk,
    cluster,
    dead,
    due,
    index,
    late,
    pending,
    schedules,
    targets,
    tasks,
    templates,
    tokens,
    topics,
)

SUBJECTS = (
    tasks, late, topics, pending, dead, due, bulk, cluster, index, tokens, templates, audit, targets,
    schedules,
)  # fmt: skip
OPERATIONS = tuple(
    one for subject in SUBJECTS for one in vars(subject).values() if isinstance(one, Operation)
)
"""All that operators can do."""
