"""``toc worker``: checks whether the application can run here, then starts the daemon."""

from __future__ import annotations

from toc.config import Settings
from toc.index.preflight import require_fit
from toc.loop import watch_threads
from toc.model.errors import ConfigError
from toc.model.topic import Delivery
from toc.observe.log import get_logger
from toc.sdk.client import TimeoutCenter
from toc.sdk.parts import open_queues
from toc.worker.app import NO_HANDLERS, check_drift, check_topics, load_app
from toc.worker.daemon.monitor import LOOK_TIMEOUT_SECONDS, Monitor
from toc.worker.daemon.processes import SideProcesses
from toc.worker.daemon.supervisor import Daemon

log = get_logger(__name__)

_PLACES = ("database_urls", "databases", "tables", "database_prefix", "redis_url", "namespace")
"""The settings that say where tasks are stored."""


def run_daemon(
    app: str,
    settings: Settings,
    beside: SideProcesses | None = None,
    *,
    webhooks: bool = False,
    tell: bool = False,
) -> int:
    """Run the daemon for ``app`` until it is told to stop. Returns the exit code.

    ``beside``: further processes that it keeps running. ``webhooks``: its workers also send webhooks.
    ``tell``: they tell a developer what becomes of each task.

    Raises, before it starts anything: AppNotFound, UnknownTopic, SchemaBehind, UnfitServer, Unavailable, or
    ConfigError, also for an address at which it cannot listen.
    """
    center = load_app(app)
    try:
        _check_settings(app, center.settings, settings)
        check_servers(center, handlers=app != NO_HANDLERS)
        if webhooks and not settings.secret_key:
            log.warning("webhooks_without_key")
        monitor = Monitor(
            settings.metrics_address,
            host=settings.host,
            # its own connections, with short timeouts, to detect a server that hangs
            queues=open_queues(settings, LOOK_TIMEOUT_SECONDS),
            store=center.store,
            catalog=center.catalog,
            handled=center.handlers,
        )
        daemon = Daemon(app, center, settings, monitor=monitor, beside=beside, webhooks=webhooks, tell=tell)
        watch_threads()
        return daemon.run()
    finally:
        center.close()


def _check_settings(app: str, theirs: Settings, ours: Settings) -> None:
    """Raise ConfigError unless the application's TimeoutCenter and this daemon use the same servers."""
    other = [name for name in _PLACES if getattr(theirs, name) != getattr(ours, name)]
    if other:
        raise ConfigError(
            f"--app {app!r}: its TimeoutCenter and this command differ in {', '.join(other)}; give both "
            f"the same, best with TOC_* variables or toc.toml, which TimeoutCenter() reads"
        )


def check_servers(center: TimeoutCenter, *, handlers: bool) -> None:
    """Raise a TocError unless a worker can run here: SchemaBehind, ConfigError, UnknownTopic, TopicDrift,
    UnfitServer, Unavailable; and AppNotFound if there are no ``handlers`` although there should be."""
    center.store.check()
    if center.queues.present and not center.store.identity.indexed():
        raise ConfigError(
            f"TOC_REDIS_URL is set, and the tasks on {center.store.identity.place} are not indexed: "
            "unset it, or run `toc index on`"
        )
    if handlers:
        check_topics(center)
        check_drift(center)
    else:
        center.catalog.refresh()
    for name, topic in center.catalog.known().items():
        if name in center.handlers and topic.delivery is not Delivery.HANDLER:
            log.warning("handler_not_used", topic=name, delivery=topic.delivery.value)
    for finding in require_fit(center.queues) if center.queues.present else ():
        log.warning("redis_setting", server=finding.server, what=finding.what, do=finding.do)
