"""The name and meaning of every metric. Their numbers are in memory (toc.observe.board)."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import product

from toc.observe.board import Count, Distribution, Family, Key, Level, Metric, MetricKind, Series, Values

METRICS: dict[str, Metric] = {}
"""Every declared metric, by name."""

LABEL_VALUES = {
    "outcome": ("processed", "failed", "dead", "crashed", "duplicate", "overtaken", "postponed"),
    "step": ("prepare", "read", "finish", "commit"),
    "queue": ("store", "dead"),
    "how": ("left", "recycled", "died"),
    "reason": ("slow", "crowded"),
}
"""The possible values of each label of counters and histograms, except topics."""


SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def add_up(into: Values, values: Mapping[Key, Sequence[float]], *, ended: bool = False) -> None:
    """Add one process's numbers to ``into``. ``ended``: the process is gone, so its gauges do not count.

    Skips metrics that are not declared here: the process runs another version.
    """
    for key, cells in values.items():
        metric = METRICS.get(key[0])
        if metric is None or metric.cells != len(cells) or len(metric.labels) != len(key) - 1:
            continue
        before = into.get(key)
        if metric.kind in (MetricKind.GAUGE, MetricKind.HIGHEST) and ended:
            continue
        if before is None:
            into[key] = list(cells)
        elif metric.kind is MetricKind.HIGHEST:
            into[key] = [max(before[0], cells[0])]
        else:
            into[key] = [a + b for a, b in zip(before, cells, strict=True)]


def quantile(buckets: Sequence[float], cells: Sequence[float], part: float) -> float | None:
    """Return the value below which ``part`` (0 to 1) of a histogram lies; None if it is empty.

    Computed as Prometheus does: values are taken to be evenly spread within a bucket, and those beyond the
    last bound count as that bound.
    """
    counts = cells[:-1]
    wanted = part * sum(counts)
    if not wanted:
        return None
    before, low = 0.0, 0.0
    for bound, count in zip(buckets, counts, strict=False):
        if count and before + count >= wanted:
            return low + (bound - low) * (wanted - before) / count
        before += count
        low = bound
    return buckets[-1]


def beginning(topics: Collection[str], handled: Collection[str]) -> Values:
    """Return every counter and histogram at 0, so that even the first event shows as a change.

    Counters are made for all ``topics``; histograms, which are large, for those ``handled`` here.
    """
    values: Values = {}
    for metric in METRICS.values():
        if metric.kind in (MetricKind.COUNTER, MetricKind.HISTOGRAM):
            if not set(metric.labels) <= {"topic", *LABEL_VALUES}:
                continue  # its values are known where it is counted
            names = topics if metric.kind is MetricKind.COUNTER else handled
            known = [names if label == "topic" else LABEL_VALUES[label] for label in metric.labels]
            values |= {(metric.name, *labels): [0.0] * metric.cells for labels in product(*known)}
    return values


def _declare(
    kind: MetricKind, make: type[Series], name: str, labels: str, text: str, buckets: tuple[float, ...] = ()
) -> Family[Series]:
    metric = METRICS[name] = Metric(name, text, kind, tuple(labels.split()), buckets)
    return Family(metric, make)


_counter = partial(_declare, MetricKind.COUNTER, Count)
_gauge = partial(_declare, MetricKind.GAUGE, Level)
_highest = partial(_declare, MetricKind.HIGHEST, Level)
_histogram = partial(_declare, MetricKind.HISTOGRAM, Distribution, buckets=SECONDS)

# fmt: off
# --- tries; a worker process counts a try when its outcome is written

LATENESS = _histogram("toc_lateness_seconds", "topic",
    "Time from when a try was due to the start of its handler, by the clock of the worker.")
LATE_TASKS = _counter("toc_late_tasks", "topic cause",
    "Tries that started more than a second late, by the cause of most of it.")
RUNTIME = _histogram("toc_handler_duration_seconds", "topic",
    "How long a handler ran; of a batch for each of its tasks.")
TRIES = _counter("toc_tries", "topic outcome",
    "Tries that ended. failed, crashed: will be tried again. duplicate: another try had processed the task. "
    "overtaken: the task was cancelled, rescheduled or dead by then. postponed: it waits for something else, "
    "which uses up no try. Pulled: acks, nacks, and the end of a last ttr.")
EXPIRED_TASKS = _counter("toc_expired_tasks", "topic",
    "Tasks that expired: cancelled if no try had started, else dead.")
ORPHANS = _counter("toc_orphans", "topic", "Entries without a row, or not written by toc: removed, not run.")

# --- the steps of a task's path; each batch is one

STEP = _histogram("toc_step_duration_seconds", "step",
    "Time of a batch. prepare: take due entries. read: read their rows. finish: write results. commit: move "
    "the entries.", buckets=STEP_SECONDS)

# --- the sweep and the refill of the index

SWEEP_ADDED = _counter("toc_sweep_added_entries", "queue",
    "Entries that the sweep found missing or too late, and added.")
SWEEP_FAILURES = _counter("toc_sweep_failures", "", "Steps of the sweep that failed at a database server.")
ROWS_WITHOUT_TOPIC = _counter("toc_rows_without_topic", "",
    "How often no topic had the biz_type of a row; counted once a minute for each.")
INDEX_LOSSES = _counter("toc_index_losses", "", "Losses of data in Redis, as each worker process found them.")
INDEX_REBUILDS = _counter("toc_index_rebuilds", "",
    "Times that a worker process refilled the index from its rows on a database server.")
PENDING = _gauge("toc_pending_tasks", "topic due",
    "Pending tasks by their rows, as last counted. overdue: due before; hour, day, week: due within it; "
    "later: after the week. Topic ?: of no topic that there is, or of one with few tasks.")
PURGED = _counter("toc_purged_rows", "topic", "Finished rows deleted because their retention was over.")

# --- the gateway; each of its HTTP processes counts

HANDED_OUT = _counter("toc_handed_out_tasks", "topic", "Hand-outs to consumers that pull.")
GATEWAYS_READY = _gauge("toc_ready_gateways", "", "HTTP processes of this gateway that can serve.")
REQUESTS = _counter("toc_requests", "call status",
    "Requests that a gateway answered, by class of status (2xx).")
REQUEST_SECONDS = _histogram("toc_request_duration_seconds", "call",
    "Time from the headers of a request to its answer.", buckets=STEP_SECONDS)
CONNECTIONS = _gauge("toc_connections", "", "Open connections of clients of the gateway.")
CONNECTIONS_CLOSED = _counter("toc_closed_connections", "reason",
    "Connections that the gateway closed. slow: the client was. crowded: too many were open.")

# --- webhooks; the worker process that sends counts

WEBHOOK_REQUESTS = _counter("toc_webhook_requests", "target status",
    "Requests that were sent, by class of status (2xx); none: no answer.")
WEBHOOK_SECONDS = _histogram("toc_webhook_duration_seconds", "target",
    "Time from the look-up of the name to the end of the answer.", buckets=STEP_SECONDS)
WEBHOOK_POSTPONED = _counter("toc_webhook_postponed", "target reason",
    "Times that a task was put off, which uses up no try: breaker, rate, concurrency, paused, unknown (no "
    "such target), not-for-topic, no-target (the topic has none), locked (no key), targets-not-read.")
WEBHOOK_WAITING = _gauge("toc_webhook_waiting_tasks", "target reason", "Overdue tasks that were put off.")

# --- schedules; the worker process that moves a schedule on counts

SCHEDULE_FIRED = _counter("toc_schedule_occurrences", "topic", "Occurrences of schedules that became tasks.")
SCHEDULE_SKIPPED = _counter("toc_schedule_skipped", "topic",
    "Occurrences skipped because the one before had not ended.")
SCHEDULE_MISSED = _counter("toc_schedule_missed", "topic", "Occurrences that nobody made within the window.")
SCHEDULES_STUCK = _counter("toc_schedules_stuck", "",
    "Times that a schedule's topic, time zone or row was not understood.")

# --- the log

LOG_LINES_DROPPED = _counter("toc_dropped_log_lines", "",
    "Log lines that the log refused or did not take in time.")

# --- the state of the worker processes, once a second

HANDLERS = _gauge("toc_running_handlers", "topic", "Running handlers; a batch counts as one.")
WAITING = _gauge("toc_waiting_tasks", "topic", "Tasks taken, due and checked, whose handler has not started.")
UNWRITTEN = _gauge("toc_unwritten_results", "", "Tries that have ended, their results not written yet.")
LOOP_BUSY = _highest("toc_loop_busy_seconds", "loop",
    "How long an internal loop's current iteration has lasted; 0: it sleeps.")
WITHOUT_REDIS = _gauge("toc_slots_without_redis", "",
    "Slots served from the task table: their Redis node is out of reach, full, or holds what is not toc's.")
BROKEN_SLOTS = _gauge("toc_broken_slots", "", "Slots with a Redis key that toc did not write.")
INDEX_FOREIGN = _highest("toc_index_foreign", "", "1 while Redis and namespace belong to another cluster.")

# --- the state of the daemon

SLOTS = _gauge("toc_slots", "topic state",
    "Slots of this daemon's workers. moving: being handed over to or from them. unowned: of the whole "
    "cluster, reported by the leading daemon.")
WORKERS = _gauge("toc_workers", "state", "Worker processes of this daemon.")
DRAINED = _highest("toc_drained", "", "1 while the daemon's host is drained.")
WORKER_EXITS = _counter("toc_worker_exits", "how", "Worker processes that ended.")

# --- the state of the servers, which the daemon reads every few seconds for its own slots; the daemon that
# leads also reads the slots without an owner

SCHEDULED = _gauge("toc_scheduled_tasks", "topic",
    "Tasks in the StoreQueues: due, or due within the horizon; without an index those that are due.")
DUE = _gauge("toc_due_tasks", "topic", "Tasks in the StoreQueues that are due and not taken yet.")
PREPARED = _gauge("toc_prepared_tasks", "topic", "Tasks in the PrepareQueues: taken and not finished.")
DEAD = _gauge("toc_dead_tasks", "topic", "Tasks in the DeadQueues.")
OVERDUE = _highest("toc_overdue_seconds", "topic",
    "How long the first task that has not started has been due.")
RESUMED = _highest("toc_resumed_seconds", "topic",
    "Time since the topic was resumed, until what was due before has started; else 0.")
PULLED = _highest("toc_topic_pulled", "topic", "1 while the tasks of the topic are pulled.")
HORIZON = _highest("toc_horizon_seconds", "topic",
    "How far ahead tasks of the topic are in Redis: its own horizon, or less where memory bounds it.")
PAUSED = _highest("toc_topic_paused", "topic", "1 while the topic is paused.")
UNSEEN = _gauge("toc_unseen_slots", "", "Slots of this daemon that could not be read from Redis.")
REDIS_UP = _gauge("toc_redis_up", "server", "1 if this Redis node answers the daemon.")
DATABASE_UP = _gauge("toc_database_up", "server", "1 if this database server answers the daemon.")
ZOOKEEPER_UP = _gauge("toc_zookeeper_up", "", "1 if the daemon has its ZooKeeper session.")
CLOCK_DIFFERENCE = _gauge("toc_clock_difference_seconds", "server",
    "The clock of a Redis node or database server minus that of this host.")
