"""The pytest plugin: the fixture ``toc``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from toc.testing.kit import Toc


@pytest.fixture
def toc() -> Iterator[Toc]:
    """A timeout center for this test alone: see ``toc.testing``."""
    from toc.testing.kit import Toc

    with Toc() as kit:
        yield kit
