"""Programs that tests run beside the servers."""

import os
import shutil
from typing import NoReturn

import pytest


def missing(reason: str) -> NoReturn:
    """Skip the test, for something is not here that it needs; where CI is set, fail it."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def need(program: str) -> str:
    """Where the program is."""
    return shutil.which(program) or missing(f"{program} is not installed: make servers")
