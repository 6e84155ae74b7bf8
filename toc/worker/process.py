"""A worker process: from its start by the daemon to its end.

Started as ``python -m toc.worker.process``, never by hand.
"""

import argparse
import contextlib
import gc
import sys
import threading
from pathlib import Path

from toc.coordination.presence import Presence
from toc.loop import end_process, leave_process, watch_threads
from toc.model.errors import InvalidInput, TocError
from toc.model.topic import Topic
from toc.observe.log import configure
from toc.sdk.client import apart
from toc.worker import guards
from toc.worker.app import load_app, skip_breakpoints, tell
from toc.worker.control import begin
from toc.worker.run.wrapped import tell_ready, traced
from toc.worker.worker import Worker

FLUSH_SECONDS = 2.0
"""How long hooks that are still to be told may take at the end."""
TIMER_SLACK = Path("/proc/self/timerslack_ns")
"""How much later than asked the kernel may end a sleep, to wake up less often: by default 50 us."""


def main() -> None:
    """The entry point of ``python -m toc.worker.process``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--app", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--webhooks", action="store_true")
    parser.add_argument("--tell", action="store_true")
    arguments, link, first = begin(parser)
    presence = Presence(arguments.worker_id)  # before its name is known to others, until the end
    guards.guard_descriptor(link.fileno())
    guards.keep_apart()
    with contextlib.suppress(OSError):  # a kernel without it, or a read-only /proc
        TIMER_SLACK.write_text("1")  # threads inherit it
    skip_breakpoints()
    try:
        center = apart(load_app(arguments.app))
        configure(center.settings.log_level, center.settings.log_format, beside=True)
        center.catalog.learn(map(Topic.of, first["topics"]))
        center.handlers = traced(center.handlers, center.tracing)
        if arguments.tell:
            tell(center)
        webhooks = None
        if arguments.webhooks:
            from toc.webhooks.handlers import Webhooks  # its HTTP client is an extra

            webhooks = Webhooks(
                targets=center.store.targets,
                queues=center.queues,
                catalog=center.catalog,
                clock=center.clock,
                allow=center.settings.allow,
                holder=arguments.worker_id,
                members=center.settings.processes,
            )
        worker = Worker(
            center,
            arguments.worker_id,
            link,
            threads=arguments.threads,
            identity=first["identity"],
            webhooks=webhooks,
        )
    except TocError as exc:
        link.send("unfit", error=str(exc), exit_code=exc.exit_code, wrong=isinstance(exc, InvalidInput))
        print(f"error: {exc}", file=sys.stderr)
        leave_process(exc.exit_code)
    except BaseException as exc:
        end_process("main", exc)  # Python would wait for threads that the application has started
    guards.keep_streams()
    watch_threads()  # after the application was loaded, which may have set a hook of its own
    threading.current_thread().name = "toc-main"
    # Loaded objects stay for good. Scanning them repeatedly would stop all threads for 20 ms or more at a
    # time, most of all in an application that imports much.
    gc.collect()
    gc.freeze()
    if arguments.tell:
        tell_ready(center.handlers)
    try:
        worker.run()
    except BaseException as exc:
        end_process("main", exc)  # Python would wait for threads of the application; ours would continue
    center.hooks.flush(FLUSH_SECONDS)
    if center.tracing is not None:
        center.tracing.flush()
    presence.close()
    leave_process(0)


if __name__ == "__main__":
    main()
