"""Where peers run: each in its own environment, because their dependencies conflict."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.catalog import Entry

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / ".bench"


class CannotRun(Exception):
    """The peer cannot be measured here; the message says why."""


def python_of(entry: Entry) -> Path:
    """Return the interpreter that has the peer installed; install it first if needed. Raises CannotRun."""
    if entry.npm:
        _npm(Path(__file__).parent / "peers" / entry.module)
    if not entry.packages:
        return Path(sys.executable)
    directory = ENVIRONMENTS / entry.module
    python = directory / "bin" / "python"
    installed = directory / "installed"
    wanted = repr((sys.base_prefix, sys.version, entry.packages))
    if not installed.exists() or installed.read_text() != wanted:
        _run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(directory)])
        _run([sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *entry.packages])
        installed.write_text(wanted)
    return python


def _npm(directory: Path) -> None:
    if (directory / "node_modules" / ".package-lock.json").exists():
        return
    npm = shutil.which("npm")
    if npm is None:
        raise CannotRun("npm is not installed")
    quiet = ["--silent", "--no-audit", "--no-fund", "--no-package-lock"]
    _run([npm, "install", *quiet, "--prefix", str(directory)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CannotRun(f"{Path(command[0]).name} failed: {lines[-1] if lines else done.returncode}")


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, memory, kernel, and the time of an fsync."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "fsync_ms": round(_fsync_ms(), 3),
    }


def _fsync_ms(times: int = 50) -> float:
    """Return the median time of an fsync of 4 KiB."""
    taken = []
    with tempfile.TemporaryFile() as file:
        for _ in range(times):
            file.write(b"\0" * 4096)
            file.flush()
            started = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - started)
    return sorted(taken)[times // 2] * 1000
