"""What several unit tests start from."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Nothing is asserted of how long an example takes, or its making: on a busy machine either takes long. Each
# run has the same examples, so that what it finds is of the change that it tests.
settings.register_profile(
    "toc", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("toc")


@pytest.fixture
def nothing_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No TOC_ variable is set, and the working directory, an empty one, holds no toc.toml."""
    for name in list(os.environ):
        if name.startswith("TOC_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
