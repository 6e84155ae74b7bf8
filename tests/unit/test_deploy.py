"""What deploy/ starts, and the alert rules and the dashboard: they name what there is."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from harness.programs import need

from toc import Settings
from toc.cli.main import app
from toc.observe.board import MetricKind
from toc.observe.metrics import METRICS

# What deploy/ starts: commands that there are, settings that can be read, units that systemd knows.

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = {path.name: path.read_text() for path in sorted((DEPLOY / "systemd").glob("*.service"))}
COMPOSE = re.sub(r"\$\{\w+:\?\}", "x", (DEPLOY / "compose.yaml").read_text())  # what its reader must give
COMPOSE = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE)
SERVICES: dict[str, Any] = {
    name: one
    for name, one in yaml.safe_load(COMPOSE)["services"].items()
    if one["image"] == "toc" and name != "toc"  # it stands for any command
}
PODS: dict[str, Any] = {
    one["metadata"]["name"]: one["spec"]["template"]["spec"]
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text())
    if one["kind"] in ("StatefulSet", "Deployment", "Job")
}


def started(text: str) -> list[str]:
    """The words of the last ExecStart that a unit or drop-in gives, without the program."""
    words: list[str] = re.findall(r"^ExecStart=/opt/toc/bin/toc (.*)$", text, re.MULTILINE)[-1].split()
    # The example of what gateway.env may say.
    more = [word for line in re.findall(r"  OPTIONS=(.*)$", text, re.MULTILINE) for word in line.split()]
    return [word for word in words if word != "$OPTIONS"] + more


def commands() -> dict[str, list[str]]:
    """By what starts it: the words of each command of toc."""
    found = {path.name: started(path.read_text()) for path in (DEPLOY / "systemd").iterdir()}
    found |= {f"pod {name}": pod["containers"][0]["args"] for name, pod in PODS.items()}
    return found | {f"service {name}": one["command"] for name, one in SERVICES.items()}


@pytest.mark.parametrize(("name", "words"), commands().items())
def test_what_is_started_is_a_command_with_such_options(name: str, words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    words = list(words)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(name, words)  # refuses an option that it does not know


@pytest.mark.parametrize("name", [*PODS, *SERVICES])
def test_every_variable_is_a_setting_within_its_range(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TOC_CONFIG": str(DEPLOY / "toc.toml")}
    if name in PODS:
        given = {one["name"]: one["value"] for one in PODS[name]["containers"][0]["env"]} | given
    else:
        given |= {key: str(value or "") for key, value in SERVICES[name]["environment"].items()}
        given.pop("TOC_SECRET_KEY", None)  # whoever installs it makes one
    fields = {f"TOC_{field.upper()}" for field in Settings.model_fields} | {"TOC_CONFIG"}
    assert {key for key in given if key.startswith("TOC_")} <= fields
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    settings = Settings()
    assert (settings.databases, settings.tables, settings.database_prefix) == (8, 1024, "toc_")


@pytest.mark.parametrize(
    ("name", "dropped_in"),
    [("toc-worker.service", None), ("toc-worker.service", "webhooks.conf"), ("toc-gateway.service", None)],
)
def test_systemd_knows_every_line_of_a_unit_and_its_sandbox_is_tight(
    name: str, dropped_in: str | None, tmp_path: Path
) -> None:
    systemd_analyze = need("systemd-analyze")
    unit = tmp_path / name
    unit.write_text(UNITS[name].replace("/opt/toc/bin/toc", "/bin/true"))  # whose program must be there
    if dropped_in is not None:
        more = tmp_path / f"{name}.d" / dropped_in
        more.parent.mkdir()
        text = (DEPLOY / "systemd" / dropped_in).read_text()
        more.write_text(text.replace("/opt/toc/bin/toc", "/bin/true"))

    def analyze(*words: str) -> subprocess.CompletedProcess[str]:
        command = [systemd_analyze, *words, str(unit)]
        return subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)

    verified = analyze("verify", "--man=no")
    assert verified.returncode == 0, verified.stderr
    complaints = [line for line in verified.stderr.splitlines() if unit.name in line or ".conf" in line]
    assert not complaints  # of a key or a value that it passes over
    # Exposure times ten: 96 is a unit without any sandbox, 12 was this one's.
    judged = analyze("security", "--offline=true", "--threshold=15")
    assert judged.returncode == 0, judged.stdout + judged.stderr


# The alert rules and the dashboard name what there is.

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
RULES = (PROMETHEUS / "alerts.yml").read_text()
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


def promtool(*command: str) -> None:
    """Raise unless it finds nothing wrong."""
    done = subprocess.run(
        [need("promtool"), *command],
        cwd=PROMETHEUS,
        env={**os.environ, "GOGC": "400"},  # a fifth of its time is garbage collection else
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    # Not every build of Prometheus knows Kubernetes. How the targets are found aside, it is as it is.
    kubernetes: dict[str, Any] = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())
    (job,) = kubernetes["scrape_configs"]
    del job["kubernetes_sd_configs"]
    (tmp_path / "kubernetes.yml").write_text(yaml.safe_dump(kubernetes))
    panels = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(QUERIES)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": panels}]}))
    promtool("check", "config", "prometheus.yml")
    promtool("check", "config", "--syntax-only", str(tmp_path / "kubernetes.yml"))
    promtool("check", "rules", str(tmp_path / "panels.yml"))


@pytest.mark.slow
def test_every_alert_is_raised() -> None:
    promtool("test", "rules", "alerts_test.yml", "alerts_minute_test.yml")
