"""An SDK that writes the index before the row; it dies between the two at its twentieth submit."""

import os
import signal
from itertools import count
from typing import Any

from fault.kit import producer
from harness.rows import insert

from toc import NewTask, TimeoutCenter
from toc.model.clock import Clock
from toc.sdk.submission import RowMaker

_number = count(1)
_rows = RowMaker(Clock(), max_delay=3600, max_body=0)


def _submit(self: TimeoutCenter, topic: str, *, biz_id: int | str, **how: Any) -> int:
    row = _rows.submission(NewTask(topic, biz_id, **how), self.catalog.get).row
    slot = self.catalog.get(topic).slot(row.slot_crc, row.slot_amount)
    assert self.queues.add({slot: [(row.job_id, float(row.next_time))]}) == {slot: 1}
    if next(_number) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return insert(self.store, row)


TimeoutCenter.submit = _submit  # type: ignore[method-assign]

if __name__ == "__main__":
    producer.main()
