"""All that operators can do, of every subject."""

from importlib import import_module

from toc.operate.operation import Operation

SUBJECTS = (
    "tasks", "late", "topics", "dead", "due", "bulk", "cluster", "running", "admin", "tokens", "templates",
    "audit", "targets", "schedules",
)  # fmt: skip
"""The modules of this package that declare some, in the order of the API's page."""
OPERATIONS = tuple(
    one
    for subject in SUBJECTS
    for one in vars(import_module(f"toc.operate.{subject}")).values()
    if isinstance(one, Operation)
)
"""All that operators can do."""
