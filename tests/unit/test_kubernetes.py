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
from toc.worker.daemon.state import STILL_SECONDS
from toc.worker.daemon.supervisor import KILL_AFTER_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS: dict[tuple[str, str], Any] = {
    (one["kind"], one["metadata"]["name"]): one
    for path in FILES
    for one in yaml.safe_load_all(path.read_text())
    if one
}
OWNERS = {name: one for (kind, name), one in OBJECTS.items() if kind in ("StatefulSet", "Deployment", "Job")}
PODS = {name: one["spec"]["template"] for name, one in OWNERS.items()}
DAEMONS = ("toc-worker", "toc-webhooks", "toc-gateway")
PRE_STOP_SECONDS = {"toc-gateway": 5}
LEAVING_SECONDS = 10
"""As in test_deploy: what the daemon may need to leave its servers when its workers are gone."""


def container(pod: Any) -> Any:
    (one,) = pod["spec"]["containers"]
    return one


def variables(pod: Any) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(pod)["env"]}


def test_everything_is_there_once_and_no_secret_is() -> None:
    assert sorted(OBJECTS) == sorted(
        [
            ("Job", "toc-db-upgrade"),
            ("StatefulSet", "toc-worker"),
            ("StatefulSet", "toc-webhooks"),
            ("Deployment", "toc-gateway"),
            *(("Service", name) for name in DAEMONS),
            *(("PodDisruptionBudget", name) for name in DAEMONS),
            *(("NetworkPolicy", name) for name in ("toc-webhooks", "toc-gateway")),
        ]
    )
    text = "".join(path.read_text() for path in FILES)
    assert len(re.findall(r"^kind:", text, re.MULTILINE)) == len(OBJECTS)
    assert "password" not in re.sub(r"^\s*#.*", "", text, flags=re.MULTILINE).lower()


@pytest.mark.parametrize("name", PODS)
def test_the_command_is_one_and_every_variable_is_a_setting(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = PODS[name]
    words = list(container(pod)["args"])
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context("toc", words)  # refuses an option that it does not know
    given = variables(pod)
    assert set(given) - {"TOC_CONFIG"} <= {f"TOC_{name.upper()}" for name in Settings.model_fields}
    for variable, value in (given | {"TOC_CONFIG": str(DEPLOY / "toc.toml")}).items():
        monkeypatch.setenv(variable, value)
    assert Settings().cluster == "main"  # nothing is out of its range


@pytest.mark.parametrize("name", PODS)
def test_passwords_and_certificates_come_as_files_of_a_secret(name: str) -> None:
    pod = PODS[name]
    mounted = {entry["name"]: entry["mountPath"] for entry in container(pod)["volumeMounts"]}
    files = {volume["name"]: volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume}
    # read by the group, which fsGroup makes that of the image's user
    assert {one["defaultMode"] for one in files.values()} == {0o440}
    own = {"toc-worker": "toc-settings", "toc-db-upgrade": "toc-migrate"}.get(name, name)
    assert files.pop("settings")["secretName"] == own
    assert [one["secretName"] for one in files.values()] == (
        ["toc-gateway-tls"] if name == "toc-gateway" else []
    )
    assert variables(pod)["TOC_CONFIG"] == f"{mounted['settings']}/toc.toml"
    named = set(re.findall(r"=(/[^\"&?\s]*\.pem)", (DEPLOY / "toc.toml").read_text()))
    assert named == {f"{mounted['settings']}/ca.pem"}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_the_images_user_gains_no_rights_and_writes_to_tmp_alone(name: str) -> None:
    pod = PODS[name]["spec"]
    (user,) = re.findall(r"^USER (\d+):\1$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    who = pod["securityContext"]
    assert who["runAsNonRoot"]
    assert {who["runAsUser"], who["runAsGroup"], who["fsGroup"]} == {int(user)}
    assert container(PODS[name])["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {
        entry["mountPath"]
        for entry in container(PODS[name])["volumeMounts"]
        if not entry.get("readOnly", False)
    }
    assert writable == {"/tmp"}
    assert not pod["automountServiceAccountToken"]
    assert not pod["enableServiceLinks"]  # they would be variables that begin with TOC_


@pytest.mark.parametrize("name", DAEMONS)
def test_a_pod_has_the_time_that_its_daemon_takes_to_stop(name: str) -> None:
    deadline = Settings.model_fields["shutdown_deadline"].default
    grace = PODS[name]["spec"]["terminationGracePeriodSeconds"]
    before = PRE_STOP_SECONDS.get(name, 0)
    assert grace == before + deadline + KILL_AFTER_SECONDS + LEAVING_SECONDS
    if before:
        assert container(PODS[name])["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(before)]


def probes(name: str) -> dict[str, Any]:
    return {kind: container(PODS[name])[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}


def port(name: str, which: str = "metrics") -> int:
    (found,) = [one["containerPort"] for one in container(PODS[name])["ports"] if one["name"] == which]
    return int(found)


@pytest.mark.parametrize("name", DAEMONS)
def test_the_probes_ask_the_ports_at_which_the_daemon_answers(name: str) -> None:
    assert variables(PODS[name])["TOC_METRICS_ADDRESS"] == f":{port(name)}"
    asked = {kind: probe["httpGet"]["port"] for kind, probe in probes(name).items()}
    readiness = "https" if name == "toc-gateway" else "metrics"
    assert asked == {"startup": "metrics", "liveness": "metrics", "readiness": readiness}


@pytest.mark.parametrize("name", ["toc-worker", "toc-webhooks"])
def test_toc_top_finds_every_worker_also_one_that_lacks_something(name: str) -> None:
    service = OBJECTS["Service", name]["spec"]
    (of_service,) = service["ports"]
    assert (of_service["port"], of_service["targetPort"]) == (port(name), "metrics")
    assert service["publishNotReadyAddresses"]
    assert OWNERS[name]["spec"]["serviceName"] == name


def test_the_gateway_speaks_tls_where_its_service_leads_and_is_sent_requests_only_if_it_can_serve() -> None:
    pod = PODS["toc-gateway"]
    words = container(pod)["args"]
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert given["--port"] == str(port("toc-gateway", "https"))
    (tls,) = [one["mountPath"] for one in container(pod)["volumeMounts"] if one["name"] == "tls"]
    # as a Secret of the type kubernetes.io/tls has them
    assert (given["--tls-cert"], given["--tls-key"]) == (f"{tls}/tls.crt", f"{tls}/tls.key")
    (of_service,) = OBJECTS["Service", "toc-gateway"]["spec"]["ports"]
    assert (of_service["port"], of_service["targetPort"]) == (port("toc-gateway", "https"), "https")
    assert "publishNotReadyAddresses" not in OBJECTS["Service", "toc-gateway"]["spec"]
    assert probes("toc-gateway")["readiness"]["httpGet"] == {
        "path": "/readyz",
        "port": "https",
        "scheme": "HTTPS",
    }
    strategy = OWNERS["toc-gateway"]["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxUnavailable": 0, "maxSurge": 1}


@pytest.mark.parametrize("name", ["toc-webhooks", "toc-gateway"])
def test_metrics_are_for_those_who_collect_them_and_each_named_port_is_there(name: str) -> None:
    policy = OBJECTS["NetworkPolicy", name]["spec"]
    named = {one["name"] for one in container(PODS[name])["ports"]}
    opened = {rule["ports"][0]["port"]: rule.get("from") for rule in policy["ingress"]}
    assert opened.keys() == named
    assert opened.pop("metrics")
    assert set(opened.values()) <= {None}  # the API asks for tokens


def test_only_readiness_asks_for_servers_and_nobody_is_restarted_in_a_hurry() -> None:
    for name in DAEMONS:
        asked = probes(name)
        paths = {kind: probe["httpGet"]["path"] for kind, probe in asked.items()}
        assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
        for probe in asked.values():
            assert probe["timeoutSeconds"] > 1  # Kubernetes's own default is too short for a busy machine
        # What /livez complains of has hung for so long already; look for as long again whether it goes on.
        liveness, startup = asked["liveness"], asked["startup"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= STILL_SECONDS
        # Long enough for every server to time out, and for an application that is slow to import.
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 120


def test_prometheus_finds_the_daemons_and_not_the_job() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/kubernetes.yml").read_text())
    (job,) = config["scrape_configs"]
    (discovery,) = job["kubernetes_sd_configs"]
    (selector,) = discovery["selectors"]
    label, components = re.fullmatch(
        r"app.kubernetes.io/name=(\w+),app.kubernetes.io/component in \(([\w,]+)\)", selector["label"]
    ).groups()  # type: ignore[union-attr]
    found = {
        name
        for name, pod in PODS.items()
        if pod["metadata"]["labels"]["app.kubernetes.io/name"] == label
        and pod["metadata"]["labels"]["app.kubernetes.io/component"] in components.split(",")
    }
    assert found == set(DAEMONS)
    names = [
        rule for rule in job["relabel_configs"] if rule["source_labels"][0].endswith("container_port_name")
    ]
    assert [rule["regex"] for rule in names] == ["metrics"]


@pytest.mark.parametrize("name", DAEMONS)
def test_service_policy_and_disruption_budget_mean_these_pods_and_no_others(name: str) -> None:
    spec = OWNERS[name]["spec"]
    selectors = [
        OBJECTS["Service", name]["spec"]["selector"],
        OBJECTS["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"],
        spec["selector"]["matchLabels"],
        spec["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    if ("NetworkPolicy", name) in OBJECTS:
        selectors.append(OBJECTS["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"])
    for selector in selectors:
        meant = [
            other for other, pod in PODS.items() if selector.items() <= pod["metadata"]["labels"].items()
        ]
        assert meant == [name]
    assert OBJECTS["PodDisruptionBudget", name]["spec"]["maxUnavailable"] < spec["replicas"]


@pytest.mark.parametrize("name", DAEMONS)
def test_as_many_processes_as_the_pod_may_use_cores(name: str) -> None:
    resources = container(PODS[name])["resources"]
    # a gateway has one HTTP process unless told otherwise
    assert variables(PODS[name]).get("TOC_PROCESSES", "1") == resources["requests"]["cpu"]
    assert "cpu" not in resources["limits"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
