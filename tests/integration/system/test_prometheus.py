"""A real Prometheus with the configuration of deploy/ collects from a daemon and evaluates every rule."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

from harness import metrics
from harness.programs import need
from harness.prometheus import DEPLOY, Prometheus
from harness.system import System

from benchmarks.private import free_port

DASHBOARD: dict[str, Any] = json.loads((DEPLOY.parent / "grafana" / "toc.json").read_text())
NEVER_HERE = {
    "toc_zookeeper_up",
    "toc_drained",
    "toc_requests_total",
    "toc_request_duration_seconds_bucket",
    "toc_ready_gateways",
    "toc_webhook_requests_total",
    "toc_webhook_duration_seconds_bucket",
    "toc_webhook_waiting_tasks",
    "toc_webhook_open_breakers",
}
"""What is shown where there is ZooKeeper, by gateways, and by senders of webhooks."""


def dashboard_queries() -> list[str]:
    """What its panels ask, with what Grafana puts in for its variables."""
    written = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", "5s").replace("$topic", ".*") for query in written]


def test_prometheus_collects_from_the_daemons_and_no_rule_or_panel_fails(
    system: System, tmp_path: Path
) -> None:
    need("prometheus")
    system.create_topics()
    daemon = system.start(processes=1, env=metrics.ANY_ADDRESS)
    address, away = metrics.address(daemon.told()), f"127.0.0.1:{free_port()}"
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
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                types = re.findall(r"^# TYPE (\w+) (\w+)", answer.read().decode(), re.MULTILINE)
            histograms = {name for name, kind in types if kind == "histogram"}
            parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
            return asked - {name for name, _ in types} - parts

        system.wait(lambda: unseen() <= NEVER_HERE, "the daemon shows whatever the panels ask for", 30)
        # A rate wants something that goes on, and no slot moves or is nobody's; all else has an answer.
        for query in dashboard_queries():
            found = prometheus.ask("query", query=query)["result"]
            if not re.search(r"rate\(|increase\(|moving|unowned", query):
                assert found or set(re.findall(r"\btoc_\w+", query)) <= NEVER_HERE, query
