"""Type checkers understand handlers: pyright here; mypy checks the sample with everything else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SAMPLE = Path(__file__).parents[1] / "typed_sample"


def test_pyright_finds_nothing_in_the_sample_but_its_mistakes(tmp_path: Path) -> None:
    config = {
        "include": [str(SAMPLE)],
        "typeCheckingMode": "strict",
        "enableTypeIgnoreComments": False,
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    checker = [sys.executable, "-m", "basedpyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(checker, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
