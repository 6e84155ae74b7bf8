"""Loads the application, ``--app package.module:center``, and checks whether it can run here."""

import importlib
import os
import sys

from toc.index.preflight import require_fit
from toc.model.errors import AppNotFound, ConfigError, TopicDrift, UnknownTopic
from toc.model.raised import raised, where
from toc.model.topic import Delivery, drift
from toc.observe.log import get_logger
from toc.sdk.async_client import AsyncTimeoutCenter
from toc.sdk.client import TimeoutCenter

log = get_logger(__name__)

NO_HANDLERS = "toc.worker.no_handlers:center"
"""The application without handlers: its workers only sweep, purge and reclaim."""
ANY_APP = "module:center"
"""How an application is named whose name is not known here."""


def load_app(path: str) -> TimeoutCenter:
    """Return the TimeoutCenter that ``path`` names; its module may be in the working directory.

    It is that of an AsyncTimeoutCenter, if it names one.
    Raises AppNotFound.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or "/" in module_name or module_name.endswith(".py"):
        like = module_name.removesuffix(".py").replace("/", ".").strip(".") or "package.module"
        do = f"write it as {like}:{attribute or 'center'}".encode("unicode_escape").decode()
        raise AppNotFound(f"--app {path!r} must look like package.module:center: {do}")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - sys.path holds str
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:
        missing = (exc.name or module_name) if isinstance(exc, ModuleNotFoundError) else None
        if missing is not None and (module_name == missing or module_name.startswith(f"{missing}.")):
            what = f"there is no module {missing!r}; run from the directory that holds it, or install it"
        else:
            why = raised(exc).text if missing is None else f"there is no module {missing!r}"
            at = "" if isinstance(exc, SyntaxError) else where(exc)  # whose text tells its own place
            what = f"importing it failed: {why}{at and f' (at {at})'}"
        raise AppNotFound(f"--app {path!r}: {what}") from exc
    center = getattr(module, attribute, None)
    if isinstance(center, AsyncTimeoutCenter):
        center = center.sync
    if not isinstance(center, TimeoutCenter):
        what = f"{attribute!r} is a {type(center).__name__}"
        if center is None:
            what = f"module {module_name!r} has no {attribute!r}"
        raise AppNotFound(f"--app {path!r}: {what}; it must be a toc.TimeoutCenter")
    return center


def skip_breakpoints() -> None:
    """Log a breakpoint() of a handler and go on: its debugger would find no terminal here and fail the try.

    One that PYTHONBREAKPOINT names is started.
    """

    def skip(*_args: object, **_kwargs: object) -> None:
        caller = sys._getframe(1)
        at = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        log.warning("breakpoint_skipped", at=at, do="toc dev --debug")

    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = skip


def tell(center: TimeoutCenter, *, limited: bool = True) -> None:
    """Have the worker of a center, which does not run yet, tell a developer what becomes of each task.

    Unless it is ``limited``, no try exceeds max_runtime.
    """
    # Others who load an application need not have it.
    from toc.worker.run.wrapped import tell_death, told

    center.handlers = {topic: told(handler, limited=limited) for topic, handler in center.handlers.items()}
    center.on_dead(tell_death)


def check_topics(center: TimeoutCenter, app: str = ANY_APP) -> None:
    """Require that the topic of every handler exists. Raises AppNotFound, UnknownTopic, Unavailable."""
    if not center.handlers:
        raise AppNotFound("the app registers no handler; decorate one with @center.handler('topic')")
    if missing := sorted(set(center.handlers) - set(center.catalog.refresh())):
        raise UnknownTopic(
            f"the app handles {', '.join(missing)}, which the topic table does not have; `toc topic sync "
            f"--app {app}` creates them, or `toc topic create NAME --biz-type N --slots N` each"
        )


def check_drift(center: TimeoutCenter, app: str = ANY_APP) -> None:
    """Warn of topics that differ from what the application declares.

    Raises TopicDrift if the settings refuse that.
    """
    found = drift(center.topics.values(), {topic.name: topic for topic in center.store.topics.list()})
    for name, how in found.items():
        log.warning("topic_drift", topic=name, differs=how, do=f"toc topic sync --app {app}")
    if found and center.settings.topic_drift == "refuse":
        told = "; ".join(f"{name} ({how})" for name, how in found.items())
        raise TopicDrift(
            f"topics are not as the app declares them: {told}; `toc topic sync --app {app}` alters them, "
            "and with TOC_TOPIC_DRIFT=warn a worker starts nevertheless"
        )


def check_servers(center: TimeoutCenter, app: str = ANY_APP) -> None:
    """Raise a TocError unless a worker can run here: SchemaBehind, ConfigError, UnknownTopic, TopicDrift,
    UnfitServer, Unavailable; and AppNotFound if an ``app`` that should have handlers has none."""
    center.store.check()
    if center.queues.present and not center.store.identity.indexed():
        raise ConfigError(
            f"TOC_REDIS_URL is set, and the tasks on {center.store.identity.place} are not indexed: "
            "unset it, or run `toc index on`"
        )
    for host, what in center.store.other_rung(center.settings.zookeeper).items():
        do = "correct that, or stop those first (if killed, wait 15 s)"
        raise ConfigError(f"workers or gateways on {host} are {what}: {do}")
    if app != NO_HANDLERS:
        check_topics(center, app)
        check_drift(center, app)
    else:
        center.catalog.refresh()
    for name, topic in center.catalog.known().items():
        if name in center.handlers and topic.delivery is not Delivery.HANDLER:
            log.warning("handler_not_used", topic=name, delivery=topic.delivery.value)
    for finding in require_fit(center.queues) if center.queues.present else ():
        log.warning("redis_setting", server=finding.server, what=finding.what, do=finding.do)
