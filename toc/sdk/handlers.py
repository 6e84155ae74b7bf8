"""What applications register: handlers with their topics and payloads; middleware and ``sdk.hooks``.

The decorated function becomes a ``Handled``: it can be called as before, and submits tasks to itself. What a
worker calls (``model.handler.Handler``) reads the payload, enters the middleware, calls the function, and
raises an exception that it returns.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import update_wrapper
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from typing_extensions import TypedDict, Unpack

from toc.model.clock import Duration, seconds_of
from toc.model.errors import DuplicateHandler, InvalidHandler, InvalidPayload, InvalidTopic
from toc.model.handler import Handler
from toc.model.payload import Payload, is_payload
from toc.model.raised import Misfit
from toc.model.task import Dead, NewTask, Retry, Task
from toc.model.topic import Declaration, Policies, check_topic_name
from toc.observe.log import get_logger
from toc.sdk.hooks import Hooks, Middleware, OnCall, OnDead, OnLate, checked_hook, hook_name
from toc.sdk.parts import Within

log = get_logger(__name__)


T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
S_co = TypeVar("S_co", covariant=True)
M = TypeVar("M", bound=Middleware)
D = TypeVar("D", bound=OnDead)
L = TypeVar("L", bound=OnLate)
C = TypeVar("C", bound=OnCall)
CARRY = {"attribute", "body", "content_type"}
"""Options that carry the data of a task without a payload."""
_A_TASK = re.compile(r"\bTask\b")


class TaskOptions(TypedDict, total=False):
    """What ``new`` of a handler passes on to NewTask."""

    delay: Duration | None
    action_time: datetime | None
    dedup_key: str | None
    slot_basis: str | None
    tries: int
    expires_at: datetime | None
    expires_in: Duration | None
    on_conflict: str
    past: str
    target: str | None
    url: str | None


class SubmitOptions(TaskOptions, Within, total=False):
    """What ``submit`` of a handler passes on to that of its center."""


class TaskFields(TaskOptions, total=False):
    """A NewTask beside its topic and biz_id: what ``new`` takes where there is no payload."""

    attribute: Mapping[str, Any] | None
    body: bytes | None
    content_type: str | None


class SubmitFields(TaskFields, Within, total=False):
    """What ``submit`` takes where there is no payload."""


class Handled(Generic[T, P, R, S_co]):
    """A function that is the handler of ``topic``, and can be called as it was."""

    __name__: str

    def __init__(
        self, topic: str, function: Callable[P, R], payload: Payload[T] | None, submit: Callable[..., S_co]
    ) -> None:
        self.topic = topic
        self.function = function
        self._payload = payload
        self._submit = submit
        update_wrapper(self, function, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function."""
        return self.function(*args, **kwargs)

    @overload
    def submit(
        self: Handled[Task, P, R, S_co], *, biz_id: int | str, **options: Unpack[SubmitFields]
    ) -> S_co: ...
    @overload
    def submit(self, payload: T, *, biz_id: int | str, **options: Unpack[SubmitOptions]) -> S_co: ...
    def submit(self, *payload: Any, biz_id: int | str, **options: Any) -> S_co:
        """Store a task for this handler and return its job_id; ``options`` are those of ``center.submit``.

        Raises what that raises, and InvalidPayload before anything is written.
        """
        return self._submit(self.topic, biz_id=biz_id, **self.fields(*payload, **options))

    @overload
    def new(
        self: Handled[Task, P, R, S_co], *, biz_id: int | str, **options: Unpack[TaskFields]
    ) -> NewTask: ...
    @overload
    def new(self, payload: T, *, biz_id: int | str, **options: Unpack[TaskOptions]) -> NewTask: ...
    def new(self, *payload: Any, biz_id: int | str, **options: Any) -> NewTask:
        """Return what ``submit`` would store, for ``submit_many`` of a center. Raises InvalidPayload."""
        return NewTask(self.topic, biz_id, **self.fields(*payload, **options))

    def __repr__(self) -> str:
        return f"<handler of {self.topic!r}: {hook_name(self.function)}>"

    def fields(self, *payload: Any, **options: Any) -> dict[str, Any]:
        """Return these options of ``center.submit`` with those that carry a payload. Raises
        InvalidPayload."""
        if len(payload) != (self._payload is not None):
            takes = "an attribute=, no payload" if self._payload is None else "one payload"
            first = next(iter(inspect.signature(self.function).parameters.values()), None)
            if payload and first is not None and first.annotation is first.empty:
                takes += f": the function's parameter {first.name!r} has no type, which a payload needs"
            raise InvalidPayload(f"submit of the handler of {self.topic!r} takes {takes}")
        if self._payload is None:
            return options
        if twice := sorted(options.keys() & CARRY):
            raise InvalidPayload(f"the payload of {self.topic!r} is its data: leave out {twice[0]}=")
        return options | self._payload.fields(payload[0])

    @property
    def typed(self) -> bool:
        """Whether it takes a payload of its own type."""
        return self._payload is not None

    def payload(self, task: Task | NewTask) -> T:
        """Return the payload of a task of this topic. Raises InvalidPayload."""
        if self._payload is None:
            raise InvalidPayload(f"the handler of {self.topic!r} takes the task itself")
        return self._payload.read(task)


class Registers(Protocol[S_co]):
    """Makes a handler of a function."""

    def __call__(self, function: Callable[Concatenate[T, P], R], /) -> Handled[T, Concatenate[T, P], R, S_co]:
        """Take one that takes a payload, perhaps with its Task, or a Task."""


class RegistersBatch(Protocol[S_co]):
    """Makes a handler of a function that takes lists."""

    def __call__(
        self, function: Callable[Concatenate[list[T], P], R], /
    ) -> Handled[T, Concatenate[list[T], P], R, S_co]:
        """Take one that takes lists of payloads, perhaps with their Tasks, or of Tasks."""


class Registry(Generic[S_co]):
    """What an application registers with a center: handlers, topics, middleware and hooks."""

    handlers: dict[str, Handler]
    topics: dict[str, Declaration]
    """The topics that code declares, with and without a handler."""
    hooks: Hooks
    handled: list[tuple[str, object]]
    """The topics with their handlers, for what is declared at these."""

    def submit(self, *args: Any, **fields: Any) -> S_co:
        """Store a task."""
        raise NotImplementedError

    @overload
    def handler(self, topic: str, *, batch: None = ..., **policies: Unpack[Policies]) -> Registers[S_co]: ...
    @overload
    def handler(self, topic: str, *, batch: int, **policies: Unpack[Policies]) -> RegistersBatch[S_co]: ...
    def handler(self, topic: str, *, batch: int | None = None, **policies: Any) -> Any:
        """Register the decorated function (``def`` or ``async def``) as the handler of ``topic``.

        Its first parameter is the Task, or a payload: a pydantic model, a dataclass or a TypedDict, which
        ``submit`` of the decorated function takes. Then a second one gets the Task. With ``batch=N`` it takes
        lists of at most N and may return ``{job_id: exception or None}``. A returned exception counts as
        raised. ``policies`` declare the topic: see ``topic``.

        Raises InvalidTopic, InvalidHandler or DuplicateHandler.
        """
        if callable(topic):
            raise InvalidTopic(f'{hook_name(topic)} is not a topic name: write @center.handler("TOPIC")')
        check_topic_name(topic)
        if topic in self.handlers:
            raise DuplicateHandler(f"topic {topic!r} already has a handler; a topic can have only one")
        if policies:
            self.topic(topic, **policies)

        def register(given: Callable[..., Any]) -> Handled[Any, ..., Any, S_co]:
            function = given.function if isinstance(given, Handled) else given  # it has another topic too
            payload = _payload(topic, function, batch)
            one = Handled(topic, function, payload, self.submit)
            arguments = 1 if payload is None or not _takes_task(function) else 2
            if arguments == 2:
                _check_second(topic, function, batch)
            handler = Handler.of(topic, function, batch, arguments)
            call = _call_of(handler, payload, self.hooks, arguments)
            self.handlers[topic] = replace(handler, call=call, made_of=one)
            self.handled += (topic, given), (topic, one)
            return one

        return register

    def _check_payload(self, task: NewTask) -> None:
        """Raise InvalidPayload if the topic's handler, if it is registered here, could not read the task."""
        one = self.handlers.get(task.topic)
        if one is not None and one.made_of is not None and one.made_of._payload is not None:
            one.made_of._payload.read(task)

    def topic(self, name: str, **policies: Unpack[Policies]) -> None:
        """Declare a topic: ``toc topic sync`` creates it, or alters what is named here. Raises InvalidTopic,
        and DuplicateHandler if it is declared already."""
        if name in self.topics:
            raise DuplicateHandler(f"topic {name!r} is declared already, here or by its handler")
        self.topics[name] = Declaration.of(name, policies)

    def declared(self) -> list[Declaration]:
        """Return the declared topics, and those of handlers that say nothing of them."""
        names = sorted({*self.topics, *self.handlers})
        return [self.topics.get(name) or Declaration(name, {}) for name in names]

    def middleware(self, function: M) -> M:
        """Have a generator function surround each try: it takes the list of the call's tasks, and yields
        once, where the handler runs; what that raises is raised there.

        The first that is registered is the outermost. Async generators surround coroutines alone; plain ones
        surround both. Raises InvalidHandler.
        """
        if inspect.isasyncgenfunction(function):
            self.hooks.around.append(contextlib.asynccontextmanager(function))
        elif inspect.isgeneratorfunction(function):
            self.hooks.around.append(contextlib.contextmanager(function))
        else:
            raise InvalidHandler(
                f"middleware {hook_name(function)} must be a generator function of a list of tasks that "
                "yields once, where the handler runs"
            )
        self.hooks.any = True
        return function

    def on_dead(self, function: D) -> D:
        """Have a function called with the task and the reason after its worker has made it dead: at most once
        for each death, in a thread of its own. Its failures are logged. Raises InvalidHandler."""
        self.hooks.on_dead.append(checked_hook(function, "a task and the reason"))
        return function

    def on_late(self, after: Duration) -> Callable[[L], L]:
        """Have a function called with the task and a timedelta if its first try, none of a redrive, starts
        ``after`` its action_time or later; as ``on_dead`` is. Raises InvalidDelay, InvalidHandler."""
        seconds = seconds_of(after)

        def register(function: L) -> L:
            self.hooks.any = True
            self.hooks.on_late.append((seconds, checked_hook(function, "a task and how late it is")))
            return function

        return register

    def on_call(self, function: C) -> C:
        """Have a function called after each ``submit``, ``put``, ``submit_many``, ``index``, ``cancel``,
        ``cancel_by_biz``, ``reschedule``, ``get`` and ``find``, where it was called, with this name, the
        seconds that it took, and what it raised or None. Its failures are logged. Raises InvalidHandler."""
        self.hooks.on_call.append(checked_hook(function, "a name, seconds and an error or None", 3))
        return function


def _call_of(
    handler: Handler, payload: Payload[Any] | None, hooks: Hooks, arguments: int
) -> Callable[..., Any]:
    """Return the function that a worker calls: of a task or a list of them, a coroutine function if the
    handler is one."""
    function, batch = handler.call, handler.batch is not None

    def begin(given: Any) -> tuple[list[Task], Sequence[Any], dict[int, BaseException]]:
        """Return the tasks that can run, the arguments of the function, and which payloads do not fit.

        Tells of those that begin late. Raises Misfit or Dead if the payload of the only task does not fit.
        """
        tasks: list[Task] = given if batch else [given]
        payloads: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        if payload is None:
            hooks.began(tasks)
            return tasks, (given,), errors
        now = hooks.now_ms()
        for task in tasks:
            try:
                payloads[task.job_id] = payload.read_in_time(task, now)
            except (Misfit, Dead) as exc:
                if not batch:
                    raise
                errors[task.job_id] = exc
        fit = [task for task in tasks if task.job_id in payloads]
        hooks.began(fit)
        found = list(payloads.values())
        return fit, ((found, fit) if batch else (found[0], given))[:arguments], errors

    async def acall(given: Any) -> Any:
        if payload is None and not hooks.any:  # most: microseconds count
            return _returned(await function(given))
        tasks, words, errors = begin(given)
        if not tasks:
            return errors
        outcome = None  # a middleware may swallow what the handler raises
        try:
            async with contextlib.AsyncExitStack() as stack:
                await hooks.enter_async(stack, tasks)
                outcome = _returned(await function(*words))
        except BaseException as exc:
            if not errors:
                raise
            outcome = {task.job_id: exc for task in tasks}
        return {**(outcome or {}), **errors} if errors else outcome

    def call(given: Any) -> Any:
        if payload is None and not hooks.any:
            return _returned(function(given))
        tasks, words, errors = begin(given)
        if not tasks:
            return errors
        outcome = None
        try:
            with contextlib.ExitStack() as stack:
                hooks.enter(stack, tasks)
                outcome = _returned(function(*words))
        except BaseException as exc:
            if not errors:
                raise
            outcome = {task.job_id: exc for task in tasks}
        return {**(outcome or {}), **errors} if errors else outcome

    return acall if handler.is_async else call


def _returned(outcome: Any) -> Any:
    """Raise what a handler returned as its failure."""
    if isinstance(outcome, BaseException) or outcome is Retry or outcome is Dead:
        raise outcome
    return outcome


def _takes_task(function: Callable[..., Any]) -> bool:
    """Whether its second parameter, if it has one, must be given, or names the Task."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    second = [one for one in inspect.signature(function).parameters.values() if one.kind in kinds][1:2]
    return any(one.default is one.empty or _A_TASK.search(str(one.annotation)) for one in second)


def _payload(topic: str, function: Any, batch: int | None) -> Payload[Any] | None:
    """Return the payload that the first parameter of a function is annotated with; None for a Task.

    Raises InvalidHandler.
    """
    of = f"the handler of {topic!r}"
    told = kind = _annotation(of, function, 0)
    if get_origin(kind) is not None:
        within = get_args(kind)[:1]
        if batch is None and (Task in within or any(map(is_payload, get_args(kind)))):
            raise InvalidHandler(
                f"{of}: its first parameter is {kind}; it can be one type, and lists need batch=N"
            )
        kind = within[0] if within else None
    elif (is_payload(kind) or kind is Task) and batch is not None:
        name = kind.__name__
        raise InvalidHandler(f"{of}: with batch= its first parameter must be list[{name}], not {name}")
    if is_payload(kind):
        return Payload(kind, of)
    if not _can_be_task(kind):
        raise InvalidHandler(
            f"{of}: its first parameter is a {_name_of(told)}; it can be a Task, a pydantic model, a "
            "dataclass or a TypedDict, and with batch= a list of those"
        )
    return None


def _check_second(topic: str, function: Any, batch: int | None) -> None:
    """Raise InvalidHandler unless a function's second parameter can take the Task, or the list of them."""
    of = f"the handler of {topic!r}"
    kind = _annotation(of, function, 1)
    one = (*get_args(kind), kind)[0]
    if not (one is list or _can_be_task(one)) or (kind is Task if batch else get_origin(kind) is list):
        must = f"must be {'list[Task]' if batch else 'Task'}, not {_name_of(kind)}"
        raise InvalidHandler(f"{of}: its second parameter {must}")


def _can_be_task(kind: Any) -> bool:
    return kind is Any or not isinstance(kind, type) or issubclass(Task, kind)


def _name_of(kind: Any) -> str:
    return str(kind) if get_origin(kind) else kind.__name__


def _annotation(of: str, function: Any, place: int) -> Any:
    """Return the type of a function's parameter at a place; None without one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not a function, which is refused later, or a built-in
        return None
    if len(parameters) <= place or parameters[place].annotation is inspect.Parameter.empty:
        return None
    annotation = parameters[place].annotation
    plain = inspect.unwrap(function)
    plain = getattr(plain, "func", plain)  # a partial's
    found = getattr(plain, "__globals__", None) or getattr(type(plain).__call__, "__globals__", {})

    def one() -> None: ...

    one.__annotations__ = {"first": annotation}
    try:
        return get_type_hints(one, globalns=found)["first"]
    except Exception as exc:
        if _A_TASK.search(str(annotation)):
            return None  # its module may import it for types alone
        raise InvalidHandler(
            f"{of}: the type of parameter {parameters[place].name!r}, {annotation}, cannot be found ({exc}); "
            "import it, or define it, at the top of the module"
        ) from exc
