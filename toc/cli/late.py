"""toc late"""

from __future__ import annotations

from toc.cli.operations import made
from toc.cli.output import say, show, show_one
from toc.operate.operation import Record
from toc.operate.operations.late import late as operation


@made(operation, arguments=0)
def late(record: Record, *, as_json: bool) -> None:
    """`toc get JOB_ID` says it of one task.

    Example: toc late --topic order.close --after 1d
    """
    if as_json:
        show_one(record, as_json=True)
        return
    causes = [{name: one[name] for name in one if name != "worker"} for one in record["causes"]]
    show(causes, as_json=False, empty="no task was late")
    if record["more"]:
        say("there was more: give --limit, or a later --after")
