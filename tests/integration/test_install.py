"""What is built: the package, installed where nothing else is, and the site of `make docs`."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import toc
import toc.testing

# What is built, installed where nothing else is: what it needs, how large that is, and that it works.

ROOT = Path(__file__).parents[2]
MOST_DISTRIBUTIONS = 16
MOST_BYTES = 50 << 20

APPLICATION = """
import asyncio, socket, threading
from toc import AsyncTimeoutCenter, Settings, Task, TimeoutCenter
from toc.testing import Toc

center, closed = AsyncTimeoutCenter(), []

@center.handler("order.close")
async def close(task: Task) -> None:
    closed.append(task.biz_id)

with Toc() as toc:
    asyncio.run(center.submit("order.close", biz_id=1, delay=60))
    toc.advance("1m")
    asyncio.run(center.close())
print("closed", *closed)

def refused(do):
    try:
        do()
    except Exception as exc:
        print(type(exc).__name__, exc)

print(type(center.worker()).__name__)

def packet(number: int, data: bytes) -> bytes:
    return len(data).to_bytes(3, "little") + bytes([number]) + data

def serve(listener: socket.socket) -> None:
    "A MySQL 8 that asks for the whole log-in, without TLS."
    flags = b"\\xff\\xf7\\xff\\x02\\0\\xff\\xdf\\x15" + bytes(10)
    greeting = b"\\x0a8.4.0\\0" + bytes(4) + b"12345678\\0" + flags
    while True:
        connection, _ = listener.accept()
        connection.sendall(packet(0, greeting + b"123456789012\\0caching_sha2_password\\0"))
        connection.recv(4096)
        connection.sendall(packet(2, b"\\x01\\x04"))
        connection.recv(4096)
        connection.sendall(packet(4, b"\\x01a public key"))

with socket.create_server(("127.0.0.1", 0)) as listener:
    threading.Thread(target=serve, args=[listener], daemon=True).start()
    url = f"mysql+pymysql://toc:secret@127.0.0.1:{listener.getsockname()[1]}/"
    refused(lambda: TimeoutCenter(Settings(database_urls=[url])).get(1))
"""


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(python: Path, *words: str | Path) -> str:
    return run(sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *words)


@pytest.mark.slow
def test_the_base_is_small_and_an_application_submits_and_tests_with_it(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-d", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (source,) = (tmp_path / "sdist").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=source)
    (again,) = (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert "toc/migrations/env.py" in one.namelist()

    bare = tmp_path / "bare"
    run(sys.executable, "-m", "venv", "--without-pip", bare)
    python = bare / "bin/python"
    pip(python, "install", wheel)
    distributions = pip(python, "list", "--format", "freeze").split()
    assert len(distributions) <= MOST_DISTRIBUTIONS, distributions
    print(len(distributions), "distributions", *distributions)
    size = sum(file.lstat().st_size for file in bare.rglob("*"))
    print(f"{size:,} bytes")
    assert size <= MOST_BYTES

    (tmp_path / "shop.py").write_text(APPLICATION)
    for built in (wheel, again):
        pip(python, "install", "--force-reinstall", "--no-deps", built)
        closed, worker, log_in = run(python, "shop.py", cwd=tmp_path).splitlines()
        assert closed == "closed 1"
        assert worker == "EmbeddedWorker"
        assert log_in.startswith("NotInstalled")
        assert log_in.endswith("pip install 'timeout-center[rsa]'")
        command = subprocess.run([bare / "bin/toc"], capture_output=True, text=True, check=False)
        assert command.returncode == 2
        assert command.stderr == "the toc command needs rich: pip install 'timeout-center[worker]'\n"
    shutil.rmtree(bare)


# The site that `make docs` builds: every link leads somewhere, and reading it needs no other host.

ELSEWHERE = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*\s(?:src|href)=["']?(?:https?:)?//[^>]*"""
    r"""|(?:\burl\(|@import\s*)["']?(?:https?:)?//[^)]*"""
)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_every_interface() -> None:
    run("make", "docs")
    site = ROOT / "build/docs"
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert [hit for page in pages for hit in ELSEWHERE.findall(page.read_text())] == []
    listed = re.findall(r"^- \[.+?\]\((.+?)\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    assert len(listed) > 20
    assert all((site / path).exists() for path in listed)
    index = (site / "searchindex.js").read_text()
    assert all(f'"{path.removeprefix("_sources/").rpartition(".")[0]}"' in index for path in listed)
    found = set(re.findall(r'\bid="([\w.]+)"', (site / "docs/api.html").read_text()))
    names = {f"toc.{name}" for name in toc.__all__} | {f"toc.testing.{name}" for name in toc.testing.__all__}
    assert names | {"toc.outbox.submit", "toc.outbox.drain", "toc.TimeoutCenter.cancel_by_biz"} <= found
