"""Results for people: tables in the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Peers = Mapping[str, Mapping[str, Any]]


def tables(report: Mapping[str, Any], console: Console) -> None:
    """Print everything that was measured."""
    peers: Peers = report["peers"]
    machine = report["machine"]
    console.print(
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"kernel {machine['kernel']}, Python {machine['python']}, fsync {machine['fsync_ms']} ms; "
        f"load before {report['load']}; medians of {report['repeat']}"
    )
    for rate in _keys(peers, "lateness"):
        title = f"Lateness in ms at {int(rate):,} tasks a second"
        columns = ("p50", "p99", "p99.9", "max", "early", "lost", "doubled")
        _table(console, title, columns, peers, _part("lateness", rate, _late))
    for count in _keys(peers, "burst"):
        title = f"{int(count):,} tasks due at one instant: seconds after it"
        parts = ("first start", "last start", "last finish", "early", "lost", "doubled")
        _table(console, title, parts, peers, _part("burst", count, _at_once))
    _table(
        console,
        "Taken and finished, tasks a second, by processes; stored, tasks a second",
        ("1 process", "2", "4", "one by one", "in batches"),
        peers,
        lambda one: [
            *(_one(one.get("consume", {}).get(count), "rate") for count in ("1", "2", "4")),
            *(_one(one.get("submit"), name) for name in ("one_by_one", "batched")),
        ],
    )
    _table(
        console,
        "At rest with far tasks pending; seconds until a task runs again whose process was killed with -9",
        ("tasks", "workers %", "servers %", "index B/task", "stored B/task", "workers MB", "runs again"),
        peers,
        _rest,
    )
    if (kit := report.get("kit")) is not None:
        console.print(
            f"{kit['tests']:,} tests of an application with toc's kit, pytest's start included: "
            f"{kit['seconds']:.1f} s, {kit['processor_seconds']:.1f} s of a processor"
        )
    _table(console, "Settings", ("version", "settings"), peers, lambda one: [one["version"], one["settings"]])
    for name, one in peers.items():
        if "broke_off" in one:
            console.print(f"{name} broke off: {one['broke_off']}", markup=False, highlight=False)
        if "cannot" in one:
            console.print(f"{name} was not measured: {one['cannot']}", markup=False, highlight=False)


def plot(report: Mapping[str, Any], path: Path) -> bool:
    """Plot lateness and bursts as bars on logarithmic scales; return False when neither was measured.

    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    peers = {name: one for name, one in report["peers"].items() if "cannot" not in one}
    rates, counts = _keys(peers, "lateness"), _keys(peers, "burst")
    panels = [(f"lateness at {int(rate):,}/s, ms", "lateness", rate, ("p50", "p99")) for rate in rates]
    panels += [
        (f"{int(count):,} at one instant, s", "burst", count, ("last_start", "last_finish"))
        for count in counts
    ]
    if not panels:
        return False
    names = list(peers)[::-1]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(3.2 * len(panels) + 1.5, 0.42 * len(names) + 1.4), sharey=True, squeeze=False
    )
    for axis, (title, workload, size, parts) in zip(axes[0], panels, strict=True):
        for offset, (part, colour) in enumerate(zip(parts, ("#4878a8", "#c8d4e0"), strict=True)):
            widths = [_value(peers[name], workload, size, part) or 0 for name in names]
            places = [index + 0.2 - 0.4 * offset for index in range(len(names))]
            axis.barh(places, widths, height=0.4, label=part.replace("_", " "), color=colour)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=7)
    axes[0][0].set_yticks(range(len(names)), names)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _rest(one: Mapping[str, Any]) -> list[str]:
    again = one.get("rerun")
    last = "-"
    if again is not None:
        last = (
            f"not in {again['waited']:.0f} s" if again.get("seconds") is None else _seconds(again["seconds"])
        )
    idle = one.get("idle")
    if idle is None:
        return ["-"] * 6 + [last]
    return [
        f"{idle['tasks']:,.0f}",
        f"{idle['worker_cpu_percent']:.1f}",
        f"{sum(idle['server_cpu_percent'].values()):.1f}",
        f"{idle['index_bytes_per_task']:.0f}",
        f"{idle['stored_bytes_per_task']:.0f}",
        f"{idle['worker_bytes'] / 1e6:.0f}",
        last,
    ]


def _table(
    console: Console,
    title: str,
    columns: Sequence[str],
    peers: Peers,
    cells: Callable[[Mapping[str, Any]], list[str]],
) -> None:
    rows = [(name, cells(one)) for name, one in peers.items() if "cannot" not in one]
    if all(cell == "-" for _, row in rows for cell in row):
        return  # this workload was not asked for
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="left" if column in ("version", "settings") else "right")
    for name, row in rows:
        table.add_row(name, *row)
    console.print(table)


def _part(
    workload: str, size: str, cells: Callable[[Mapping[str, Any]], list[str]]
) -> Callable[[Mapping[str, Any]], list[str]]:
    """Return a function for the cells of one workload of one size, or the reason why there are none."""

    def made(one: Mapping[str, Any]) -> list[str]:
        result = one.get(workload, {}).get(size)
        if result is None:
            return ["-"]
        return [result["left_out"]] if "left_out" in result else cells(result)

    return made


def _late(result: Mapping[str, Any]) -> list[str]:
    times = [_ms(result[name]) for name in ("p50", "p99", "p99.9", "max")]
    return times + [f"{result[name]:.0f}" for name in ("early", "lost", "doubled")]


def _at_once(result: Mapping[str, Any]) -> list[str]:
    times = [_seconds(result[name]) for name in ("first_start", "last_start", "last_finish")]
    return times + [f"{result[name]:.0f}" for name in ("early", "lost", "doubled")]


def _one(result: Mapping[str, Any] | None, name: str) -> str:
    if result is None:
        return "-"
    return f"{result[name]:,.0f}" if name in result else result["left_out"]


def _keys(peers: Peers, workload: str) -> list[str]:
    found = {key for one in peers.values() for key in one.get(workload, {})}
    return sorted(found, key=int)


def _value(one: Mapping[str, Any], *path: str) -> float | None:
    value: Any = one
    for name in path:
        value = value.get(name, {}) if isinstance(value, Mapping) else {}
    return float(value) if isinstance(value, (int, float)) else None


def _ms(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
