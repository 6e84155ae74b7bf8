"""What several unit tests start from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def nothing_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No TOC_ variable is set, and the working directory, an empty one, holds no toc.toml."""
    for name in list(os.environ):
        if name.startswith("TOC_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
