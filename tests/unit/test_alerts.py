"""The alert rules and the dashboard name what there is, and each alert says what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml
from harness.programs import need

from toc.observe.board import MetricKind
from toc.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
RULES = (PROMETHEUS / "alerts.yml").read_text()
ALERTS = re.findall(r"^      - alert: (\w+)$", RULES, re.MULTILINE)
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/toc.json").read_text())
QUERIES = [
    target["expr"].replace("$__rate_interval", "5s")  # as Grafana puts in
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]

OUTSIDE = {"cluster", "instance", "job", "le"}
"""Labels that Prometheus gives."""


def samples() -> dict[str, set[str]]:
    """Every sample that a daemon shows, with the labels that it may have."""
    found: dict[str, set[str]] = {}
    for metric in METRICS.values():
        endings = {MetricKind.COUNTER: ("_total",), MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count")}
        for ending in endings.get(metric.kind, ("",)):
            found[metric.name + ending] = {*metric.labels, *OUTSIDE}
    return found


def test_every_metric_and_label_that_is_asked_for_exists() -> None:
    known = samples()
    text = "\n".join([RULES, *QUERIES, (PROMETHEUS / "alerts_test.yml").read_text()])
    for name, _, labels in re.findall(r"\b(toc_\w+)(\{([^}]*)\})?", text):
        assert name in known, name
        assert set(re.findall(r"(\w+)=~?\"", labels)) <= known[name], (name, labels)
    for name in re.findall(r"\bby \(([^)]*)\)", text):
        labels = {label.strip() for label in name.split(",")} - {"alertname"}
        assert labels <= set().union(*known.values()), labels


def test_each_alert_leads_to_its_place_in_the_runbook() -> None:
    linked = re.findall(r"^          runbook_url: docs/run.md#(\w+)$", RULES, re.MULTILINE)
    assert linked == [alert.lower() for alert in ALERTS]
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/run.md").read_text(), re.MULTILINE)
    assert set(ALERTS) <= set(headings)


def test_each_alert_is_tried() -> None:
    tried = re.findall(r"labels: '{alertname=\"(\w+)\"", (PROMETHEUS / "alerts_test.yml").read_text())
    assert set(tried) == set(ALERTS)


def test_promtool_finds_nothing_wrong_and_every_alert_is_raised(tmp_path: Path) -> None:
    promtool = need("promtool")
    # Not every build of Prometheus knows Kubernetes. How the targets are found aside, it is as it is.
    kubernetes: dict[str, Any] = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())
    (job,) = kubernetes["scrape_configs"]
    del job["kubernetes_sd_configs"]
    (tmp_path / "kubernetes.yml").write_text(yaml.safe_dump(kubernetes))
    panels = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(QUERIES)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": panels}]}))
    env = {**os.environ, "GOGC": "400"}  # a fifth of its time is garbage collection else
    for command in (
        ["check", "config", "prometheus.yml"],
        ["check", "config", "--syntax-only", str(tmp_path / "kubernetes.yml")],
        ["check", "rules", str(tmp_path / "panels.yml")],
        ["test", "rules", "alerts_test.yml", "alerts_minute_test.yml"],
    ):
        done = subprocess.run(
            [promtool, *command],
            cwd=PROMETHEUS,
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
