"""deploy/kubernetes against the code: settings, commands, deadlines, the image, and what belongs together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from toc import Settings
from toc.cli.main import app
from toc.worker.daemon.http import STILL_SECONDS
from toc.worker.daemon.supervisor import KILL_AFTER_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS: dict[str, Any] = {
    one["kind"]: one for path in FILES for one in yaml.safe_load_all(path.read_text()) if one
}
WORKERS = OBJECTS["StatefulSet"]
PODS = {kind: OBJECTS[kind]["spec"]["template"] for kind in ("StatefulSet", "Job")}
LEAVING_SECONDS = 10
"""As in test_deploy: what the daemon may need to leave its servers when its workers are gone."""


def container(pod: Any) -> Any:
    (one,) = pod["spec"]["containers"]
    return one


def variables(pod: Any) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(pod)["env"]}


def test_each_kind_is_there_once_and_no_secret_is() -> None:
    assert sorted(OBJECTS) == ["Job", "PodDisruptionBudget", "Service", "StatefulSet"]
    text = "".join(path.read_text() for path in FILES)
    assert len(re.findall(r"^kind:", text, re.MULTILINE)) == len(OBJECTS)
    assert "password" not in re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE).lower()


@pytest.mark.parametrize("kind", PODS)
def test_the_command_is_one_and_every_variable_is_a_setting(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = PODS[kind]
    words = list(container(pod)["args"])
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("toc", words)  # refuses an option that it does not know
    given = variables(pod)
    assert set(given) - {"TOC_CONFIG"} <= {f"TOC_{name.upper()}" for name in Settings.model_fields}
    for name, value in (given | {"TOC_CONFIG": str(DEPLOY / "toc.toml")}).items():
        monkeypatch.setenv(name, value)
    assert Settings().cluster == "main"  # nothing is out of its range


@pytest.mark.parametrize("kind", PODS)
def test_passwords_and_certificates_come_as_files_of_a_secret(kind: str) -> None:
    pod = PODS[kind]
    mounted = {entry["name"]: entry["mountPath"] for entry in container(pod)["volumeMounts"]}
    (settings,) = [volume for volume in pod["spec"]["volumes"] if "secret" in volume]
    assert settings["secret"]["secretName"] == {"StatefulSet": "toc-settings", "Job": "toc-migrate"}[kind]
    # read by the group, which fsGroup makes that of the image's user
    assert settings["secret"]["defaultMode"] == 0o440
    assert variables(pod)["TOC_CONFIG"] == f"{mounted[settings['name']]}/toc.toml"
    named = set(re.findall(r"=(/[^\"&?\s]*\.pem)", (DEPLOY / "toc.toml").read_text()))
    assert named == {f"{mounted[settings['name']]}/ca.pem"}


@pytest.mark.parametrize("kind", PODS)
def test_a_pod_is_the_images_user_gains_no_rights_and_writes_to_tmp_alone(kind: str) -> None:
    pod = PODS[kind]["spec"]
    (user,) = re.findall(r"^USER (\d+):\1$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    who = pod["securityContext"]
    assert who["runAsNonRoot"]
    assert {who["runAsUser"], who["runAsGroup"], who["fsGroup"]} == {int(user)}
    assert container(PODS[kind])["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {
        entry["mountPath"]
        for entry in container(PODS[kind])["volumeMounts"]
        if not entry.get("readOnly", False)
    }
    assert writable == {"/tmp"}
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"]  # they would be variables that begin with TOC_


def test_a_pod_has_the_time_that_its_daemon_takes_to_stop() -> None:
    deadline = Settings.model_fields["shutdown_deadline"].default
    grace = PODS["StatefulSet"]["spec"]["terminationGracePeriodSeconds"]
    assert grace == deadline + KILL_AFTER_SECONDS + LEAVING_SECONDS


PROBES = {
    name: container(WORKERS["spec"]["template"])[f"{name}Probe"]
    for name in ("startup", "liveness", "readiness")
}


def test_the_probes_ask_the_port_at_which_the_daemon_answers() -> None:
    (port,) = container(PODS["StatefulSet"])["ports"]
    assert variables(PODS["StatefulSet"])["TOC_METRICS_ADDRESS"] == f":{port['containerPort']}"
    assert {probe["httpGet"]["port"] for probe in PROBES.values()} == {port["name"]}
    (of_service,) = OBJECTS["Service"]["spec"]["ports"]
    assert (of_service["port"], of_service["targetPort"]) == (port["containerPort"], port["name"])
    assert OBJECTS["Service"]["spec"][
        "publishNotReadyAddresses"
    ]  # else `toc top` finds no daemon that lacks something


def test_only_readiness_asks_for_servers_and_nobody_is_restarted_in_a_hurry() -> None:
    paths = {name: probe["httpGet"]["path"] for name, probe in PROBES.items()}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    for probe in PROBES.values():
        assert probe["timeoutSeconds"] > 1  # Kubernetes's own default is too short for a machine that is busy
    # What /livez complains of has hung for so long already; look for as long again whether it goes on.
    liveness = PROBES["liveness"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= STILL_SECONDS
    # Long enough for every server to time out, and for an application that is slow to import.
    assert PROBES["startup"]["periodSeconds"] * PROBES["startup"]["failureThreshold"] >= 120


def test_prometheus_finds_the_workers_and_not_the_job() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/kubernetes.yml").read_text())
    (job,) = config["scrape_configs"]
    (discovery,) = job["kubernetes_sd_configs"]
    (selector,) = discovery["selectors"]
    wanted = dict(part.split("=") for part in selector["label"].split(","))
    assert wanted.items() <= PODS["StatefulSet"]["metadata"]["labels"].items()
    assert not wanted.items() <= PODS["Job"]["metadata"]["labels"].items()
    names = [
        rule for rule in job["relabel_configs"] if rule["source_labels"][0].endswith("container_port_name")
    ]
    assert [rule["regex"] for rule in names] == [container(PODS["StatefulSet"])["ports"][0]["name"]]


def test_service_and_disruption_budget_mean_the_workers_and_not_the_job() -> None:
    labels = PODS["StatefulSet"]["metadata"]["labels"]
    selectors = [
        OBJECTS["Service"]["spec"]["selector"],
        OBJECTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        WORKERS["spec"]["selector"]["matchLabels"],
        PODS["StatefulSet"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    job = PODS["Job"]["metadata"]["labels"]
    assert not any(selector.items() <= job.items() for selector in selectors)
    assert WORKERS["spec"]["serviceName"] == OBJECTS["Service"]["metadata"]["name"]
    assert OBJECTS["PodDisruptionBudget"]["spec"]["maxUnavailable"] < WORKERS["spec"]["replicas"]


def test_as_many_processes_as_the_pod_may_use_cores() -> None:
    resources = container(PODS["StatefulSet"])["resources"]
    assert variables(PODS["StatefulSet"])["TOC_PROCESSES"] == resources["requests"]["cpu"]
    assert "cpu" not in resources["limits"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
