"""What the console loads is what others have published, and little."""

from __future__ import annotations

import gzip
import hashlib

import pytest

from toc.console.assets import STATIC

SUMS = [line.split() for line in (STATIC / "SHA256SUMS").read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(("sum_", "name"), SUMS)
def test_a_vendored_file_is_as_it_was_published(sum_: str, name: str) -> None:
    assert hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == sum_


def test_every_file_of_others_has_its_checksum_and_licence() -> None:
    ours = {"console.css", "console.js", "toc.svg", "SHA256SUMS", "LICENSE.htmx", "LICENSE.uplot"}
    assert {file.name for file in STATIC.iterdir()} - ours == {name for _, name in SUMS}
    assert "Zero-Clause BSD" in (STATIC / "LICENSE.htmx").read_text()
    assert "MIT" in (STATIC / "LICENSE.uplot").read_text()


def test_all_files_together_are_small_on_the_wire() -> None:
    packed = sum(len(gzip.compress(file.read_bytes(), 9)) for file in STATIC.iterdir())
    assert packed < 50_000
