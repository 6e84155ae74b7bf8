"""Bodies: what a try needs beside its row, read just before it starts.

One thread per database server reads what is wanted at that moment, in round trips of bounded bytes. So only
running tries hold bodies, and a server that hangs holds up no thread but this one for long.

The reader names the version that the row check saw. If that body is gone, the row has changed since: the try
ends before its handler is called, its failure is refused, and the row is checked again. Nothing is charged.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from toc.loop import Loop
from toc.model.errors import UnreadableTask
from toc.model.raised import raised
from toc.model.task import Body, Content
from toc.observe.log import get_logger
from toc.store.servers.shards import Trouble
from toc.store.tasks.bodies import BODY_BYTES
from toc.worker.entry import Entry, State
from toc.worker.settle.finish import IDLE_SECONDS, RETRY_SECONDS, Finisher
from toc.worker.tools import Tools

log = get_logger(__name__)

SILENT_SECONDS = 0.1
"""How long a handler's thread waits for one of several servers that sends no body. Tasks of the others must
not wait for it."""
SILENT_ALONE_SECONDS = 2.0
"""How long it waits for the only server."""

Fetched = tuple[list[Entry], dict[int, Body]]
"""The entries that may run, and the bodies of those that have one."""


class _Request:
    """The bodies that a batch needs. ``then`` is called once with what has come of them."""

    def __init__(self, entries: Sequence[Entry], then: Callable[[Fetched], None]) -> None:
        self.entries = entries
        self.wanted = [entry for entry in entries if entry.row.body_length >= 0]
        self.then = deque([then])
        """Empty once it is called: then nobody waits for further answers."""
        self.found: dict[int, Content | Trouble | None] = {}
        """What was read, is gone (None), or why it cannot be read."""


class BodyReader:
    """Reads the bodies of tries that start. Thread-safe."""

    def __init__(self, tools: Tools, finisher: Finisher) -> None:
        self._tools = tools
        self._finisher = finisher
        self._wanted: list[deque[tuple[Entry, _Request]]] = [deque() for _ in tools.store.tables_of_server()]
        self.loops = [
            Loop(f"bodies-{number}", partial(self._read, wanted))
            for number, wanted in enumerate(self._wanted)
        ]
        self.patience = SILENT_SECONDS if len(self.loops) > 1 else SILENT_ALONE_SECONDS
        """How long a try waits for a server that sends no body, in seconds."""

    def fetch(self, entries: Sequence[Entry]) -> Fetched:
        """Return those of these entries that may start, and their bodies. The others are settled."""
        answer: SimpleQueue[Fetched] = SimpleQueue()
        end = self.fetch_async(entries, answer.put)
        try:
            return answer.get(timeout=self.patience)
        except Empty:
            end()
            return answer.get()

    def fetch_async(self, entries: Sequence[Entry], then: Callable[[Fetched], None]) -> Callable[[], None]:
        """Call ``then`` once with what ``fetch`` returns, on another thread.

        Returns a function that ends the waiting: to be called after ``patience``, on any thread.
        """
        request = _Request(entries, then)
        numbers = set()
        for entry in request.wanted:
            number = self._tools.store.server_of(entry.job_id) if len(self.loops) > 1 else 0
            self._wanted[number].append((entry, request))
            numbers.add(number)
        for number in numbers:
            self.loops[number].wake()
        return partial(self._end, request)

    def _read(self, wanted: deque[tuple[Entry, _Request]]) -> float:
        """Read what is wanted of one server, within the bound. Returns the seconds until the next call."""
        part: list[tuple[Entry, _Request]] = []
        size = 0
        while wanted and (not part or size + wanted[0][0].row.body_length <= BODY_BYTES):
            one = wanted.popleft()
            if one[1].then:
                part.append(one)
                size += one[0].row.body_length
        if not part:
            return IDLE_SECONDS
        rows = {entry.job_id: entry.row.version for entry, _ in part}
        answers = self._tools.store.bodies.read(rows)
        for entry, request in part:
            content = answers.get(entry.job_id)
            request.found[entry.job_id] = answers.unanswered.get(entry.job_id) if content is None else content
        for request in {id(request): request for _, request in part}.values():
            if len(request.found) == len(request.wanted):
                self._end(request)
        return 0.0 if wanted else IDLE_SECONDS

    def _end(self, request: _Request) -> None:
        """Answer a request, unless another thread has. Later answers to it do not count any more."""
        try:
            then = request.then.pop()
        except IndexError:
            return
        then(self._fetched(request))

    def _fetched(self, request: _Request) -> Fetched:
        """Sort the entries of a request. Waits for no server."""
        found, request.found = request.found, {}  # what ends the waiting is kept for as long as it may last
        ready: list[Entry] = []
        bodies: dict[int, Body] = {}
        unread: list[Entry] = []
        for entry in request.entries:
            content = found.get(entry.job_id)
            if entry.state is not State.WAITS:  # given back meanwhile
                continue
            if entry.row.body_length < 0:
                ready.append(entry)
            elif isinstance(content, Content):
                bodies[entry.job_id] = Body(len(content.data), content)
                ready.append(entry)
            elif self._tools.inflight.settle(entry):
                if content is None and entry.job_id in found:  # a row that has changed refuses the failure
                    missing = UnreadableTask(entry.job_id, "its body is missing")
                    self._finisher.ended(entry, raised(missing))
                else:
                    unread.append(entry)
        if unread:
            log.warning("bodies_not_read", tasks=len(unread))
            at = self._tools.clock.now_ms() + int(RETRY_SECONDS * 1000)
            self._finisher.give_back_until((entry, at) for entry in unread)
        return ready, bodies
