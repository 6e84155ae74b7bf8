"""An error that nobody has thought of, on a thread or in a callback that no caller waits for."""

import subprocess
import sys
import textwrap
import threading

import pytest

from toc.loop import EXIT_THREAD_DIED, Loop

BEGIN = """
    import asyncio, sys, threading, time
    from toc.index.nodes import RedisNode
    from toc.index.url import Address
    from toc.observe.log import configure
    from toc.store.servers.threads import Threads
    from toc.webhooks.limiter import Limiter
    from toc.loop import WatchedEventLoop, watch_threads

    class Unthought(Exception):
        pass

    def fails(*_):
        raise Unthought

    configure("info", "json")
    watch_threads()
"""

SEEN = {
    "a look for a node that is away": (
        "reconnect",
        """
        RedisNode(Address("127.0.0.1", 1), fails, 1.0, on_away=fails).failed("it is away")
        """,
    ),
    "what a thread of the store does for no caller": (
        "store",
        """
        Threads(1, "toc-store").run_detached(fails)
        """,
    ),
    "a callback of webhooks": (
        "async-handlers",
        """
        async def enter():
            limiter = Limiter(fails, "a:1", lambda: 1)
            await limiter.enter(limiter.of("target", 1, None), 1)

        loop = WatchedEventLoop()
        loop.create_task(enter())
        threading.Thread(target=loop.run_forever, daemon=True).start()
        """,
    ),
}

UNSEEN = {
    "a thread of the application": """
        threading.Thread(target=fails, name="mine").start()
        """,
    "a callback of a handler": """
        loop = WatchedEventLoop()
        loop.call_soon(fails)
        loop.call_later(0.01, loop.stop)
        loop.run_forever()
        loop.close()
        """,
}


@pytest.mark.parametrize("where", SEEN)
def test_an_error_that_no_caller_sees_ends_the_process_with_a_message(where: str) -> None:
    thread, code = SEEN[where]
    ended = run(code, "time.sleep(60)")
    assert ended.returncode == EXIT_THREAD_DIED
    assert '"thread_died"' in ended.stderr
    assert f'"thread": "{thread}"' in ended.stderr
    assert "Unthought" in ended.stderr


def test_of_threads_that_die_at_once_one_is_named() -> None:
    ended = run(
        """
        together = threading.Barrier(16)
        def fails_with_others():
            together.wait()
            fails()
        for number in range(16):
            threading.Thread(target=fails_with_others, name=f"toc-{number}").start()
        """,
        "time.sleep(60)",
    )
    assert ended.returncode == EXIT_THREAD_DIED
    assert ended.stderr.count('"thread_died"') == 1


@pytest.mark.parametrize("where", UNSEEN)
def test_errors_of_the_application_do_not(where: str) -> None:
    ended = run(UNSEEN[where], "print('it lives')")
    assert ended.returncode == 0
    assert ended.stdout == "it lives\n"
    assert "Unthought" in ended.stderr, "but they are told"
    assert "thread_died" not in ended.stderr


def run(*code: str) -> subprocess.CompletedProcess[str]:
    program = "\n".join(map(textwrap.dedent, (BEGIN, *code)))
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )


def test_stop_ends_the_sleep_even_after_a_wake_up_that_was_broken_off() -> None:
    turned = threading.Event()

    def turn() -> float:
        turned.set()
        return 3600.0

    loop = Loop("test", turn)
    loop.start()
    assert turned.wait(60)
    # An exception from a signal came between the two lines of a call of ``wake``: the loop was not woken, and
    # no further call does it.
    loop.wake._woken = True
    loop.stop(3600.0)
