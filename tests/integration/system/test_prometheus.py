"""A real Prometheus with the configuration of deploy/ collects from a daemon and evaluates every rule."""

from __future__ import annotations

import json
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.system import System

from toc.local.process import free_port
from toc.local.server import Server

DEPLOY = Path(__file__).parents[3] / "deploy" / "prometheus"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY.parent / "grafana" / "toc.json").read_text())
NEVER_HERE = {
    "toc_zookeeper_up",
    "toc_drained",
    "toc_index_losses_total",
    "toc_stale_entries_total",
    "toc_orphans_total",
    "toc_fences_lost_total",
    "toc_reclaimed_tasks_total",
    "toc_quarantined_tasks_total",
    "toc_worker_exits_total",
    "toc_purged_rows_total",
}
"""What is shown only once it has happened, or where there is ZooKeeper."""


class Prometheus(Server):
    """With the configuration of deploy/, other targets, and no patience."""

    name = "prometheus"

    def __init__(self, directory: Path, targets: list[str]) -> None:
        super().__init__(directory)
        self._targets = targets

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API answers."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}", timeout=5
        ) as answer:
            return json.load(answer)["data"]

    def values(self, query: str, label: str) -> dict[str, float]:
        """What a query finds, by a label."""
        found = self.ask("query", query=query)["result"]
        return {one["metric"][label]: float(one["value"][1]) for one in found}

    def _prepare(self) -> list[str | Path]:
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": self._targets}]
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        for name in config["rule_files"]:
            shutil.copy(DEPLOY / name, self.directory)
        return [
            shutil.which("prometheus") or "",
            f"--config.file={self.directory}/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def _ready(self, _log_start: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=2):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


def dashboard_queries() -> list[str]:
    """What its panels ask, with what Grafana puts in for its variables."""
    written = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", "5s").replace("$topic", ".*") for query in written]


def test_prometheus_collects_from_the_daemons_and_no_rule_or_panel_fails(
    system: System, tmp_path: Path
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    system.create_topics()
    daemon = system.start(processes=1, env={"TOC_METRICS_ADDRESS": "127.0.0.1:0"})
    (served,) = re.findall(r"^.*metrics_served.*$", daemon.log.read_text(), re.MULTILINE)
    address, away = json.loads(served)["address"], f"127.0.0.1:{free_port()}"
    with Prometheus(tmp_path / "prometheus", [address, away]) as prometheus:
        system.wait(
            lambda: prometheus.values('up{job="toc"}', "instance") == {address: 1.0, away: 0.0},
            "it asks both, and one answers",
            30,
        )
        system.wait(
            lambda: prometheus.values("toc_workers == 1", "state") == {"ready": 1.0},
            "it knows that a worker is ready",
            30,
        )

        def rules() -> list[Any]:
            return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

        system.wait(lambda: all(rule["health"] != "unknown" for rule in rules()), "each has been tried", 30)
        assert rules()
        assert {rule["health"] for rule in rules()} == {"ok"}, rules()

        def down() -> set[str]:
            alerts = [one["labels"] for one in prometheus.ask("alerts")["alerts"]]
            return {one["instance"] for one in alerts if one["alertname"] == "TocDaemonDown"}

        system.wait(lambda: down() == {away}, "it has noticed which one is away", 30)

        for fails in (0, 1):
            system.center.submit("test.sync", biz_id=1, delay=0.2, attribute={"fail": fails})
        asked = {name for query in dashboard_queries() for name in re.findall(r"\btoc_\w+", query)}

        def unseen() -> set[str]:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
                types = re.findall(r"^# TYPE (\w+) (\w+)", answer.read().decode(), re.MULTILINE)
            histograms = {name for name, kind in types if kind == "histogram"}
            parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
            return asked - {name for name, _ in types} - parts

        # What has never happened is not shown; that its name is right, test_alerts sees.
        system.wait(lambda: unseen() <= NEVER_HERE, "the daemon shows whatever the panels ask for", 30)
        # A rate wants something that goes on, and no slot moves; all else has an answer.
        for query in dashboard_queries():
            found = prometheus.ask("query", query=query)["result"]
            if not re.search(r"rate\(|increase\(|moving", query):
                assert found or set(re.findall(r"\btoc_\w+", query)) <= NEVER_HERE, query
