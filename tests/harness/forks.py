"""Programs in processes that are forked from one which has imported all of ``toc``.

A new interpreter takes half a second of a processor to import what a command or a daemon needs, and a run of
the tests has a thousand of them. What a forked one does is ``toc.cli.main.run``, up to the end of the
interpreter, with streams, variables, directory and session of its own. A variable that tells the interpreter
or the loader something has no effect on it: who sets one gets a new interpreter (see ``forkable``).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

FULL, CLOSED, GONE = "full", "closed", "gone"
"""What a stream can be instead of a file: a full disk, closed, or a pipe whose reader has left."""
STREAMS = ("stdin", "stdout", "stderr")
OBEYED = ("PYTHONPATH", "PYTHONWARNINGS")
"""Variables of the interpreter that a forked process does obey."""
TOC = [sys.executable, "-c", "from toc.cli.main import run; run()"]
"""How users start the program, in a new interpreter."""
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
HELPER, HTTP = b"toc-helper", b"toc-http"


class Forked:
    """A process as ``subprocess.Popen`` has it, of which the one that forks is the parent."""

    def __init__(self, forks: _Forks, pid: int) -> None:
        self._forks = forks
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)  # nobody has waited for it yet, so the number is its own

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None and self._has_ended(0):
            self.returncode = self._forks.ask({"wait": self.pid})
            os.close(self._ended)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        watched = select.poll()  # its descriptor may be above the 1,023 that select knows
        watched.register(self._ended, select.POLLIN)
        return bool(watched.poll(None if timeout is None else timeout * 1000))

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._has_ended(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("toc", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Forks:
    """The process that forks; it ends with the one that made it. ``tree``: where its toc is, unless it is the
    installed one."""

    def __init__(self, tree: str) -> None:
        self._lock = threading.Lock()
        self.place = f"toc-forks-{secrets.token_hex(8)}"
        """The name, which is no file's, of the socket where it hears scripts."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as scripts:
            scripts.bind(f"\0{self.place}")
            scripts.listen()
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(scripts.fileno())],
                env={**os.environ, **({"PYTHONPATH": tree} if tree else {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                pass_fds=[scripts.fileno()],
            )
        atexit.register(self._leave)

    def _leave(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        assert self._server.stdout is not None
        self._server.stdout.close()

    def ask(self, job: Mapping[str, Any]) -> int:
        with self._lock:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
            return int(self._server.stdout.readline())


@functools.cache
def _forks(tree: str) -> _Forks:
    return _Forks(tree)


def _tree(env: Mapping[str, str]) -> str:
    """The directory on PYTHONPATH that has a toc of its own, if any."""
    places = env.get("PYTHONPATH", "").split(os.pathsep)
    return next((place for place in places if place and Path(place, "toc", "__init__.py").exists()), "")


def forkable(env: Mapping[str, str]) -> bool:
    """Whether a forked process does with these variables what a new interpreter would."""
    return not any(
        name.startswith(("LD_", "PYTHON")) and name not in OBEYED and os.environ.get(name) != value
        for name, value in env.items()
    )


def start(
    words: Sequence[str], *, env: Mapping[str, str], module: str | None = None,
    directory: Path | str | None = None, session: bool = False, seconds: int = 0, streams: Mapping[str, str],
    whole: bool = False,
) -> Forked:  # fmt: skip
    """Start ``toc WORDS``, or ``python -m MODULE WORDS``. ``streams``: files, of which those of output are
    appended to, or FULL, CLOSED, GONE; /dev/null else.

    ``session``: with a session of its own. ``seconds``: after so many SIGALRM ends it. ``whole``: worker
    processes get new interpreters.
    """
    assert forkable(env), "start a new interpreter"
    place = {"cwd": str(directory or Path.cwd()), "env": dict(env), "module": module}
    job = {"words": list(words), "session": session, "seconds": seconds, "whole": whole, **streams, **place}
    forks = _forks(_tree(env))
    return Forked(forks, forks.ask(job))


def start_daemon(
    words: Sequence[str], *, env: Mapping[str, str], log: Path, output: str | None = None, whole: bool = False
) -> Forked | subprocess.Popen[bytes]:
    """Start ``toc WORDS`` in a session of its own, with a new interpreter where the variables want one.

    ``output``: what takes the place of its log, as a stream. ``whole``: as in ``start``.
    """
    log.touch()
    if forkable(env):
        streams = dict.fromkeys(("stdout", "stderr"), output or str(log))
        return start(words, env=env, session=True, streams=streams, whole=whole)
    assert output is None
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "toc", *words],
            env=env,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def run(
    words: Sequence[str], *, env: Mapping[str, str], module: str | None = None,
    directory: Path | str | None = None, given: str = "", timeout: float = 240, encoding: str = "utf-8",
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run ``toc WORDS``, or ``python -m MODULE WORDS``, to its end; ``given`` is what it reads.

    ``encoding``: latin-1 where bytes are meant. Raises subprocess.TimeoutExpired.
    """
    sent = given.encode(encoding)
    if not forkable(env):
        command = [sys.executable, "-m", module or "toc", *words]
        done = subprocess.run(
            command, env=env, cwd=directory, input=sent, capture_output=True, timeout=timeout, check=False
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        with tempfile.TemporaryDirectory(prefix="toc-") as name:
            streams = {stream: str(Path(name, stream)) for stream in STREAMS}
            Path(streams["stdin"]).write_bytes(sent)
            process = start(words, env=env, module=module, directory=directory, streams=streams)
            try:
                process.wait(timeout)
            finally:
                process.kill()
                code = process.wait()
            out, err = (Path(streams[stream]).read_bytes() for stream in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, code, out.decode(encoding), err.decode(encoding))


def put_on_path(directory: Path) -> None:
    """Write a ``toc`` there that scripts find on PATH, and whose processes are forked as well."""
    client = Path(__file__).with_name("forked_toc.py")
    words = shlex.join([sys.executable, "-I", "-S", str(client), _forks("").place])
    program = directory / "toc"
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)


def keep_commands() -> None:
    """Have this process build the tree of commands once: that takes a tenth of a second for each command."""
    import typer.main

    if not hasattr(typer.main.get_command, "cache_info"):
        typer.main.get_command = functools.cache(typer.main.get_command)


# --- the process that forks


def _serve(scripts: socket.socket) -> None:
    # whatever commands import when they are run, for all of them at once
    import encodings.idna  # noqa: F401

    import rich._emoji_codes
    import rich.live
    import rich.progress  # noqa: F401
    import typer._adapters
    import typer._click.decorators
    import typer.main
    import uvicorn.lifespan.off  # noqa: F401

    import toc.cli.main
    import toc.console.console
    import toc.coordination.operator
    import toc.coordination.zookeeper
    import toc.dev.demo
    import toc.dev.local
    import toc.dialects.process
    import toc.gateway.app
    import toc.gateway.process
    import toc.operate.admin
    import toc.operate.bulk_jobs
    import toc.operate.doctor
    import toc.operate.top
    import toc.store.migrate
    import toc.store.servers.mysql
    import toc.webhooks.handlers
    import toc.worker.daemon.supervisor
    import toc.worker.embedded
    import toc.worker.process

    keep_commands()
    typer.main.get_command(toc.cli.main.app)
    # And the patterns of the gateway's paths, which the module re remembers for each process.
    toc.gateway.app.App(cast("Any", None))

    ours = set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) | {str(Path(__file__).parent)}
    paths = [path for path in sys.path if path not in ours]
    gc.collect()
    gc.freeze()  # else every child, at its end, looks through all that was imported
    while True:
        asking, _, _ = select.select([sys.stdin, scripts], [], [])
        if scripts in asking:
            _attend(scripts.accept()[0], paths)
        if sys.stdin in asking:  # one line: who has asked waits for the answer
            line = sys.stdin.readline()
            if not line:
                return
            job = json.loads(line)
            if "wait" in job:
                answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
            elif not (answer := os.fork()):
                _become(job, paths)
            print(answer, flush=True)


def _attend(line: socket.socket, paths: list[str]) -> None:
    """Run what a script asks for. Its parent, a child of this process, waits for it and tells the script."""
    between = os.fork()
    if between:
        line.close()
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    data, descriptors, _, _ = socket.recv_fds(line, 1 << 20, len(STREAMS))
    streams = {name: f"/dev/fd/{one}" for name, one in zip(STREAMS, descriptors, strict=True)}
    job = {"session": False, "seconds": 0, "whole": False, "module": None, **streams, **json.loads(data)}
    pid = os.fork()
    if not pid:
        line.close()
        _become(job, paths)
    line.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _become(job: dict[str, Any], paths: list[str]) -> NoReturn:
    from toc.cli.main import run

    if job["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(job["env"])
    time.tzset()
    os.chdir(job["cwd"])
    sys.path[:] = [job["cwd"], *filter(None, job["env"].get("PYTHONPATH", "").split(os.pathsep)), *paths]
    importlib.invalidate_caches()
    for descriptor, name in enumerate(STREAMS):
        _open(descriptor, job.get(name, os.devnull))
    _make_streams({descriptor for descriptor, name in enumerate(STREAMS) if job.get(name) == CLOSED})
    reloads = job["words"][:1] == ["dev"] and "--app" in job["words"]  # its daemon is a child of its own
    if job["words"][:1] in (["worker"], ["gateway"], ["dev"]) and not (reloads or job["whole"]):
        Helper().install()
    module = job["module"]
    _customize(module or "toc", job["words"])
    sys.argv = [module or "toc", *job["words"]]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever nohup has made of it for the tests
    signal.alarm(job["seconds"])
    _end(functools.partial(runpy.run_module, module, run_name="__main__", alter_sys=True) if module else run)


def _end(run: Callable[[], object]) -> NoReturn:
    """Run the program, and end as an interpreter does, but for what it takes apart at the very end.

    That would copy most of the memory that is shared with the process which forked: a tenth of a second.
    """
    code = 1
    try:
        run()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _customize(program: str, words: Sequence[str]) -> None:
    """What a new interpreter does with these variables: it runs a sitecustomize on PYTHONPATH, and its
    modules arm failpoints when they are imported.
    """
    from toc import failpoint

    sys.orig_argv[:] = [sys.executable, "-m", program, *words]
    if wanted := os.environ.get("PYTHONWARNINGS"):
        sys.warnoptions[:] = wanted.split(",")
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
    for place in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if (custom := Path(place, "sitecustomize.py")).exists():
            runpy.run_path(str(custom))
            break
    if where := os.environ.get("TOC_FAILPOINT"):
        armed = failpoint.arm(where, os.environ.get("TOC_FAILPOINT_ONCE"))
        for name, module in list(sys.modules.items()):
            if name.startswith("toc.") and vars(module).get("failpoint") is failpoint.unarmed:
                vars(module)["failpoint"] = armed


def _make_streams(closed: Collection[int] = ()) -> None:
    """What the interpreter makes at its start of the first three descriptors."""
    files: list[Any] = [
        None if number in closed else open(number, mode, lines, errors=errors, closefd=False)  # noqa: SIM115
        for number, mode, lines, errors in (
            (0, "r", -1, None),
            (1, "w", -1, None),
            (2, "w", 1, "backslashreplace"),
        )
    ]
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = files  # type: ignore[misc]


class Helper:
    """A process beside a daemon, or a worker process, that forks its processes: it has one thread and has
    imported all."""

    NAMES: ClassVar = {
        "toc.worker.process": b"python",
        "toc.gateway.process": HTTP,
        "toc.dialects.process": HTTP,
    }
    """What it forks, and the name by which the kernel knows each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            _prctl(PR_SET_NAME, HELPER)
            os.setpgid(0, 0)  # what is sent to the daemon's group is not meant for it
            self._line.close()
            self._serve(theirs)
        theirs.close()

    def install(self) -> None:
        """Have this daemon start worker and HTTP processes so."""
        right = subprocess.Popen

        def start(args: Any, **options: Any) -> Any:
            if args[1] != "-m" or args[2] not in self.NAMES:
                return right(args, **options)
            return self._start(args, **options)

        subprocess.Popen = start  # type: ignore[assignment, misc]

    def _start(self, args: list[str], **options: Any) -> Child:
        descriptors = options["pass_fds"]
        job = {"module": args[2], "words": args[3:], "as": list(descriptors), "env": dict(os.environ)}
        return Child(self._ask(job, descriptors))

    def _ask(self, job: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int:
        """A child of this process that the helper has forked; returns its pid."""
        with self._lock:
            _prctl(PR_SET_CHILD_SUBREAPER, 1)  # the child of a descendant that ends becomes ours
            try:
                socket.send_fds(self._line, [json.dumps(job).encode()], descriptors)
                return int(self._line.recv(100))
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0)

    def _serve(self, line: socket.socket) -> NoReturn:
        while True:
            data, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 16)
            if not data:
                os._exit(0)  # the daemon has ended
            job = json.loads(data)
            told, tell = os.pipe()
            gate, held = os.pipe()
            between = os.fork()
            if not between:
                child = os.fork()
                if not child:
                    os.close(held)
                    os.read(gate, 1)  # until its parent has ended, and the daemon has it
                    self._become(job, descriptors)
                os.setpgid(child, child)
                os.write(tell, str(child).encode())
                os._exit(0)
            os.waitpid(between, 0)
            line.send(os.read(told, 20))
            for one in (told, tell, gate, held, *descriptors):
                os.close(one)

    def _become(self, job: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
        module = job["module"]
        _prctl(PR_SET_NAME, self.NAMES[module])
        os.environ.clear()
        os.environ.update(job["env"])
        above = [fcntl.fcntl(one, fcntl.F_DUPFD, 200) for one in descriptors]
        os.closerange(3, 200)
        for one, number in zip(above, job["as"], strict=True):
            os.dup2(one, number)
            os.close(one)
        _open(0, os.devnull)
        _make_streams()
        sys.argv = [module, *job["words"]]
        del sys.modules[module]  # it is the main module now
        _customize(module, job["words"])
        code = 0
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as exc:
            code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            os._exit(code)


class Child:
    """A child of this process, as ``subprocess.Popen`` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait for its end, and return its exit code, or minus the signal that ended it."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        """SIGKILL. It has not been waited for, so the number is its own."""
        os.kill(self.pid, signal.SIGKILL)


def helps(pid: int) -> bool:
    """Whether a child of a daemon is its helper."""
    return _name(pid) == HELPER


def serves_http(pid: int) -> bool:
    """Whether a child of a daemon is one of its HTTP processes."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    # one that has ended, and whose end nobody has seen yet, has no command any more
    ours = (b"toc.gateway.process", b"toc.dialects.process")
    return any(name in command for name in ours) or (bool(command) and _name(pid) == HTTP)


def _name(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        return b""


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _open(descriptor: int, kind: str) -> None:
    if kind == CLOSED:
        os.close(descriptor)
        return
    if kind == GONE:
        reader, source = os.pipe()
        os.close(reader)
    elif descriptor == 0:
        source = os.open(kind, os.O_RDONLY)
    elif kind == FULL:
        source = os.open("/dev/full", os.O_WRONLY)
    else:
        source = os.open(kind, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(source, descriptor)
    os.close(source)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
