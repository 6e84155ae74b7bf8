"""Programs that tests run beside the servers."""

from __future__ import annotations

import os
import shutil

import pytest


def need(program: str) -> str:
    """Where the program is. Skips the test if it is not installed, and fails it where CI is set."""
    found = shutil.which(program)
    if found is None:
        reason = f"{program} is not installed: make servers"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
