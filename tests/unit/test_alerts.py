"""The alert rules and the dashboard name what there is, and each alert says what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.programs import need

from toc.observe.board import MetricKind
from toc.observe.metrics import METRICS

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
RULES = (PROMETHEUS / "alerts.yml").read_text()
ALERTS = re.findall(r"^      - alert: (\w+)$", RULES, re.MULTILINE)
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/toc.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]

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


@pytest.mark.parametrize("text", [RULES, *QUERIES, (PROMETHEUS / "alerts_test.yml").read_text()])
def test_every_metric_and_label_that_is_asked_for_exists(text: str) -> None:
    known = samples()
    for name, _, labels in re.findall(r"\b(toc_\w+)(\{([^}]*)\})?", text):
        assert name in known, name
        assert set(re.findall(r"(\w+)=~?\"", labels)) <= known[name], (name, labels)
    for name in re.findall(r"\bby \(([^)]*)\)", text):
        labels = {label.strip() for label in name.split(",")} - {"alertname"}
        assert labels <= set().union(*known.values()), labels


def test_every_alert_says_which_cluster_it_is_about() -> None:
    expressions = re.findall(
        r"^        expr: (.+?)\n        (?:for|labels):", RULES, re.MULTILINE | re.DOTALL
    )
    assert len(expressions) == len(ALERTS)
    for expression in expressions:
        for labels in re.findall(r"\b(?:sum|min|max|count)\b *(?:by *\(([^)]*)\))?", expression):
            assert "cluster" in labels.split(", "), expression


def test_each_alert_has_a_runbook() -> None:
    assert len(ALERTS) == len(set(ALERTS)) > 15
    linked = re.findall(r"^          runbook_url: docs/run.md#(\w+)$", RULES, re.MULTILINE)
    assert linked == [alert.lower() for alert in ALERTS]
    section = (ROOT / "docs/run.md").read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    entries = re.findall(r"^### (\w+)\n\n(.+?)(?=\n###|\Z)", section, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in entries] == ALERTS
    assert all(len(text) > 60 for _, text in entries)


def test_each_alert_is_tried() -> None:
    tried = re.findall(r"labels: '{alertname=\"(\w+)\"", (PROMETHEUS / "alerts_test.yml").read_text())
    assert set(tried) == set(ALERTS)


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_promtool_finds_nothing_wrong_and_every_alert_is_raised(tmp_path: Path) -> None:
    promtool = need("promtool")
    # Not every build of Prometheus knows Kubernetes. How the targets are found aside, it is as it is.
    kubernetes: dict[str, Any] = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())
    (job,) = kubernetes["scrape_configs"]
    del job["kubernetes_sd_configs"]
    (tmp_path / "kubernetes.yml").write_text(yaml.safe_dump(kubernetes))
    env = {**os.environ, "GOGC": "400"}  # a fifth of its time is garbage collection else
    for command in (
        ["check", "config", "prometheus.yml"],
        ["check", "config", "--syntax-only", str(tmp_path / "kubernetes.yml")],
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
