"""An SDK that writes the index before the row; it dies between the two at its twentieth submit."""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import Any

from fault.kit import producer

from toc import NewTask, TimeoutCenter

_number = count(1)


def _submit(self: TimeoutCenter, topic: str, *, biz_id: int | str, **how: Any) -> int:
    row = self._row(NewTask(topic, biz_id, **how))
    self._index([row])
    if next(_number) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
    return self.store.insert(row)


TimeoutCenter.submit = _submit  # type: ignore[method-assign]

if __name__ == "__main__":
    producer.main()
