"""Scripts that move an entry of the PrepareQueue whoever has it by now."""

from __future__ import annotations

import hashlib
import re

from harness.app import center

from toc.queue import queues

__all__ = ["center"]

_FENCE = re.compile(
    r" and (tonumber\(scores\[n\]\) % 1000 == fence|\(score % 1000 == fence or score == fence\)) then"
)

for script in (queues._EXTEND, queues._COMMIT, queues._ROLLBACK, queues._BURY):
    script.source, found = _FENCE.subn(" then", script.source)
    assert found == 1, script.name
    script.sha = hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()
