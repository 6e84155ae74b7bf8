"""Failures that are written on a pending row although another try has begun since."""

import re
from collections.abc import Sequence
from typing import Any

from harness.app import center

from toc.store.servers.mysql import MySqlServer
from toc.store.servers.server import Result, Statement

__all__ = ["center"]

_GUARD = re.compile(
    r"(last_error=%s WHERE job_id=\d+ AND status=0) AND version=\d+ AND attempts=\d+ AND crashes=\d+ AND .*$"
)
_right = MySqlServer.run


def _run(self: MySqlServer, statements: Sequence[Statement], **how: Any) -> list[Result]:
    unguarded = [statement._replace(sql=_GUARD.sub(r"\1", statement.sql)) for statement in statements]
    return _right(self, unguarded, **how)


MySqlServer.run = _run  # type: ignore[assignment, method-assign]
