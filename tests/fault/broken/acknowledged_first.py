"""An SDK that acknowledges and leaves the row to a thread; its process dies at its twentieth submit."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from fault.kit import producer
from harness.rows import insert

from toc import NewTask, TimeoutCenter
from toc.model.clock import Clock
from toc.model.task import TaskRow
from toc.sdk.submission import RowMaker

_number = count(1)
_rows = RowMaker(Clock(), max_delay=3600, max_body=0)
_behind = ThreadPoolExecutor(1)


def _write(center: TimeoutCenter, row: TaskRow) -> None:
    time.sleep(0.02)
    insert(center.store, row)


def _submit(self: TimeoutCenter, topic: str, *, biz_id: int | str, **how: Any) -> int:
    row = _rows.submission(NewTask(topic, biz_id, **how), self.catalog.get).row
    _behind.submit(_write, self, row)
    if next(_number) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return row.job_id


TimeoutCenter.submit = _submit  # type: ignore[method-assign]

if __name__ == "__main__":
    producer.main()
