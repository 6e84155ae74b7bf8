"""An application in a process of its own: ``python -m fault.kit.producer`` makes the calls on its stdin.

{"do": "submit", "count": 50, "first": 0, "ahead": [1, 3]}        one by one
{"do": "submit_many", "count": 500, "first": 0, "ahead": [1, 3]}  in one call
{"do": "cancel", "job_ids": [...]}
{"do": "reschedule", "job_ids": [...], "ahead": 2.0}
"""

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fault.kit.load import tasks
from harness.history import Client, History

from toc import TimeoutCenter


def make(client: Client, call: dict[str, Any]) -> None:
    """One call."""
    match call["do"]:
        case "submit":
            for task in tasks(call["count"], ahead=call["ahead"], first=call.get("first", 0)):
                client.submit(task.topic, biz_id=task.biz_id, delay=task.delay, attribute=task.attribute)
        case "submit_many":
            client.submit_many(tasks(call["count"], ahead=call["ahead"], first=call.get("first", 0)))
        case "cancel":
            for job_id in call["job_ids"]:
                client.cancel(job_id)
        case "reschedule":
            for job_id in call["job_ids"]:
                client.reschedule(job_id, action_time=datetime.now(UTC) + timedelta(seconds=call["ahead"]))
        case other:
            raise ValueError(other)


def main() -> None:
    """Make all of them."""
    history = History(Path(os.environ["TOC_TEST_HISTORY"]))
    with TimeoutCenter() as center:
        for call in json.load(sys.stdin):
            make(Client(center, history), call)
    history.close()


if __name__ == "__main__":
    main()
