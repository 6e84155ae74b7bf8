"""What deploy/ says must agree with what the code does: settings, deadlines, rights, the image."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from harness.programs import need

from toc import Settings
from toc.cli.main import app
from toc.coordination.address import Address
from toc.index.keys import SlotKeys, permits_key
from toc.index.url import Topology, parse
from toc.model.topic import Slot
from toc.store.shards import Layout
from toc.worker.daemon.supervisor import KILL_AFTER_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = (DEPLOY / "compose.yaml").read_text()
COMPOSED: dict[str, Any] = yaml.safe_load(COMPOSE)
UNITS = {path.name: path.read_text() for path in sorted((DEPLOY / "systemd").glob("*.service"))}
LEAVING_SECONDS = 10
"""What the daemon may need to leave ZooKeeper and its servers when its workers are gone."""


@pytest.fixture
def production(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """deploy/toc.toml as a program would read it."""
    monkeypatch.setenv("TOC_CONFIG", str(DEPLOY / "toc.toml"))
    return Settings()


def test_the_production_example_is_the_layout_that_the_contract_names(production: Settings) -> None:
    assert (production.databases, production.tables, production.database_prefix) == (8, 1024, "toc_")
    layout = Layout(
        production.need_database_urls(),
        production.databases,
        production.tables,
        production.database_prefix,
    )
    assert [layout.databases_of(server) for server in (0, 1)] == [range(4), range(4, 8)]


def test_the_production_example_reaches_every_server_over_tls(production: Settings, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"  # each of them refuses one that is not there
    ca.touch()
    redis, zookeeper = (
        url.replace("/etc/toc/ca.pem", str(ca))
        for url in (production.need_redis_url(), production.zookeeper or "")
    )
    assert all("ssl_ca=" in url for url in production.database_urls)
    location, address = parse(redis), Address.parse(zookeeper)
    assert (location.kind, location.tls, len(location.addresses)) == (Topology.CLUSTER, True, 3)
    assert (address.tls, address.ca, address.chroot) == (True, str(ca), "/production")


def test_a_service_has_the_time_that_the_daemon_takes_to_stop(production: Settings) -> None:
    for deadline in (production.shutdown_deadline, Settings.model_fields["shutdown_deadline"].default):
        takes = deadline + KILL_AFTER_SECONDS + LEAVING_SECONDS
        for unit in UNITS.values():
            assert f"\nTimeoutStopSec={takes:.0f}\n" in unit
        assert f"\n  stop_grace_period: {takes:.0f}s\n" in COMPOSE


def test_only_the_daemon_hears_of_a_stop_and_bad_input_is_not_tried_again() -> None:
    for line in ("KillMode=mixed", "KillSignal=SIGTERM", "RestartPreventExitStatus=2", "OOMPolicy=continue"):
        for unit in UNITS.values():
            assert f"\n{line}\n" in unit


def started(text: str) -> list[str]:
    """The words of the last ExecStart that a unit or drop-in gives, without the program."""
    return re.findall(r"^ExecStart=/opt/toc/bin/toc (.*)$", text, re.MULTILINE)[-1].split()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", [*UNITS, "webhooks.conf"])
def test_a_unit_starts_a_command_that_there_is(name: str) -> None:
    text = (DEPLOY / "systemd" / name).read_text()
    words = [word for word in started(text) if word != "$OPTIONS"]
    # The example of what gateway.env may say.
    words += [word for line in re.findall(r"  OPTIONS=(.*)$", text, re.MULTILINE) for word in line.split()]
    command: Any = typer.main.get_command(app)
    command.commands[words[0]].make_context("toc", words[1:])  # refuses an option that it does not know


def test_what_is_secret_comes_to_a_service_as_a_credential_that_it_names() -> None:
    for unit in UNITS.values():
        given = dict(re.findall(r"^LoadCredential=([\w.]+):(/etc/toc/[\w./]+)$", unit, re.MULTILINE))
        assert given["toc.toml"] == "/etc/toc/toc.toml"
        assert "\nEnvironment=TOC_CONFIG=%d/toc.toml\n" in unit
        used = {word.removeprefix("%d/") for word in started(unit) if word.startswith("%d/")}
        assert used == set(given) - {"toc.toml"}
        assert not re.search(r"^Environment=.*(KEY|PASSWORD)", unit, re.MULTILINE)


def test_a_gateway_and_a_worker_on_one_host_have_ports_of_their_own(production: Settings) -> None:
    (address,) = re.findall(
        r"^Environment=TOC_METRICS_ADDRESS=(.*)$", UNITS["toc-gateway.service"], re.MULTILINE
    )
    assert Settings(metrics_address=address).metrics_address != production.metrics_address


def test_the_sandbox_of_a_gateway_is_that_of_a_worker() -> None:
    worker, gateway = (
        {
            line
            for line in unit.splitlines()
            if re.match(r"(Protect|Private|Restrict|System|Capab|NoNew|Lock|Memory)", line)
        }
        for unit in (UNITS["toc-worker.service"], UNITS["toc-gateway.service"])
    )
    assert len(worker) > 15
    assert gateway == worker


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
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    verified = analyze("verify", "--man=no")
    assert verified.returncode == 0, verified.stderr
    complaints = [line for line in verified.stderr.splitlines() if unit.name in line or ".conf" in line]
    assert not complaints  # of a key or a value that it passes over
    # Exposure times ten: 96 is a unit without any sandbox, 12 was this one's.
    judged = analyze("security", "--offline=true", "--threshold=15")
    assert judged.returncode == 0, judged.stdout + judged.stderr


def test_the_redis_account_may_do_what_toc_does_and_nothing_else() -> None:
    (rules,) = re.findall(r"^user toc (.*)$", (DEPLOY / "redis-acl.conf").read_text(), re.MULTILINE)
    granted = set(re.findall(r" \+(\S+)", rules))
    scripts = "".join(path.read_text() for path in (ROOT / "toc/index/lua").glob("*.lua"))
    in_scripts = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", scripts)}
    assert in_scripts <= granted
    code = "".join(path.read_text() for path in (ROOT / "toc/index").glob("*.py"))
    for name in granted - in_scripts:
        called = ", ".join(f'"{word.upper()}"' for word in name.split("|"))
        assert called in code, name


def test_every_key_and_channel_of_a_slot_is_within_the_redis_accounts_patterns() -> None:
    text = (DEPLOY / "redis-acl.conf").read_text()
    assert " ~*_* " in text  # * is any text
    assert '"~staging:*_* ~*_{staging:*_*}"' in text
    for namespace, patterns in ((None, ("*_*",)), ("staging", ("staging:*_*", "*_{staging:*_*}"))):
        keys = SlotKeys.of(Slot("a", 0), namespace)
        mine = (keys.store, keys.prepare, keys.dead, keys.claims, keys.waiting, keys.generation)
        for key in (*mine, permits_key("shop", namespace)):
            assert any(fnmatchcase(key, pattern) for pattern in patterns), key
    keys = SlotKeys.of(Slot("a", 0), None)
    assert " &wake_{* " in text
    assert keys.channel.startswith("wake_{")


def test_the_application_may_change_rows_and_no_table() -> None:
    text = (DEPLOY / "mysql-grants.sql").read_text()
    grants = dict(re.findall(r"^GRANT (.*) ON `toc\\_%`\.\* TO '(\w+)'@'%';$", text, re.MULTILINE))
    assert len(grants) == len(re.findall(r"^GRANT", text, re.MULTILINE))
    assert "SELECT, INSERT, UPDATE, DELETE" in grants
    assert grants["SELECT, INSERT, UPDATE, DELETE"] == "toc"
    made = re.findall(r"CREATE USER '(\w+)'", (DEPLOY / "compose/mysql-accounts.sh").read_text())
    assert sorted(made) == sorted(grants.values())


def test_the_image_is_built_from_all_that_the_package_is_made_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *wheel["packages"], *wheel["force-include"]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == needed


def test_the_image_runs_toc_itself_as_an_ordinary_user() -> None:
    build, final = re.split(
        r"^FROM \$\{BASE_IMAGE\}$", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE
    )
    assert "pip" in build
    assert "pip" not in final
    assert "apt-get" not in final
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (installed,) = re.findall(r'"\$\(echo /wheels/\*\.whl\)\[([\w,]+)\]"', build)
    assert set(installed.split(",")) == {"gateway", "webhooks"} <= set(extras)
    for line in ("USER 10001:10001", "STOPSIGNAL SIGTERM", 'ENTRYPOINT ["toc"]', 'CMD ["worker"]'):
        assert f"\n{line}\n" in final


def test_compose_takes_every_secret_from_the_environment_and_puts_none_in_a_command() -> None:
    example = re.findall(r"^(\w+)=", (DEPLOY / ".env.example").read_text(), re.MULTILINE)
    required = set(re.findall(r"\$\{(\w+):\?\}", COMPOSE)) | set(re.findall(r"environment: (\w+)\}", COMPOSE))
    assert required <= set(example)
    for line in COMPOSE.splitlines():
        if re.match(r"\s*(command|test|entrypoint):", line):
            assert "PASSWORD" not in line.replace("REDISCLI_AUTH=$$(cat", ""), line


def test_what_compose_mounts_is_there_and_its_scripts_can_be_read() -> None:
    mounted = re.findall(r"\{file: ([\w./-]+)\}", COMPOSE)
    assert len(mounted) == len(re.findall(r"^  [\w-]+: \{file:", COMPOSE, re.MULTILINE))
    for name in mounted:
        path = DEPLOY / name
        assert path.is_file()
        # the image of MySQL runs an executable script on its own, where it lacks what it is sourced for
        assert not path.stat().st_mode & 0o111, name
        if path.suffix == ".sh":
            subprocess.run(["/bin/sh", "-n", path], check=True)


def test_compose_has_an_ensemble_whose_members_know_each_other() -> None:
    services = COMPOSED["services"]
    names = [name for name in services if name.startswith("zookeeper-")]
    assert len(names) == 3
    for number, name in enumerate(names, start=1):
        environment = services[name]["environment"]
        assert environment["ZOO_MY_ID"] == number
        assert [part.partition(":")[0] for part in environment["ZOO_SERVERS"].split()] == [
            f"server.{other}={peer}" for other, peer in enumerate(names, start=1)
        ]
        assert services["worker-1"]["depends_on"][name] == {"condition": "service_healthy"}
    place = services["worker-1"]["environment"]["TOC_ZOOKEEPER"].replace("${TOC_ZOOKEEPER_PASSWORD:?}", "x")
    address = Address.parse(place)
    assert address.hosts == ",".join(f"{name}:2181" for name in names)
    assert address.credential == "toc:x"


def test_the_variables_of_compose_are_settings() -> None:
    for name, service in COMPOSED["services"].items():
        given = {key for key in service.get("environment", {}) if key.startswith("TOC_")}
        assert given <= {f"TOC_{field.upper()}" for field in Settings.model_fields}, name
    secrets = {one for service in COMPOSED["services"].values() for one in service.get("secrets", [])}
    assert secrets == set(COMPOSED["secrets"])
    sources = {
        one["source"] for service in COMPOSED["services"].values() for one in service.get("configs", [])
    }
    assert sources == set(COMPOSED["configs"])


def test_compose_publishes_what_one_looks_at_and_to_this_machine_alone() -> None:
    published = {name: one["ports"] for name, one in COMPOSED["services"].items() if "ports" in one}
    assert sorted(published) == ["gateway", "grafana", "prometheus"]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_a_service_of_compose_says_only_what_services_can_say() -> None:
    names = """build cap_drop command configs depends_on environment healthcheck hostname image init networks
        ports profiles read_only restart secrets security_opt stop_grace_period tmpfs volumes"""
    known = set(names.split())
    for name, service in COMPOSED["services"].items():
        assert set(service) <= known, name
        assert set(service.get("depends_on", ())) <= set(COMPOSED["services"]), name
        volumes = {volume.partition(":")[0] for volume in service.get("volumes", ())}
        assert volumes <= set(COMPOSED["volumes"]), name


def test_the_images_of_compose_have_a_version_and_no_registry() -> None:
    images = {one["image"] for one in COMPOSED["services"].values()} - {"toc", "${TOC_IMAGE:-toc}"}
    for image in images:
        assert re.fullmatch(r"\$\{\w+_IMAGE:-[a-z]+(/[a-z]+)?:v?\d+(\.\d+)+\}", image), image


def test_the_gateway_of_compose_is_for_its_own_network_and_its_commands_are_commands() -> None:
    gateway = COMPOSED["services"]["gateway"]
    (network,) = COMPOSED["networks"]["toc"]["ipam"]["config"]
    command: Any = typer.main.get_command(app)
    for service in ("gateway", "webhooks"):
        name, *words = (
            word.replace("${TOC_NET:-172.30.77}", "172.30.77")
            for word in COMPOSED["services"][service]["command"]
        )
        context = command.commands[name].make_context("toc", words)
        if service == "gateway":
            assert gateway["command"][-1] == network["subnet"]
            assert gateway["ports"] == [f"127.0.0.1:{context.params['port']}:{context.params['port']}"]
        assert COMPOSED["services"][service]["environment"]["TOC_SECRET_KEY"] == "${TOC_SECRET_KEY:?}"
    assert "TOC_SECRET_KEY" not in COMPOSED["services"]["worker-1"]["environment"]
    # What is commented out is right as well.
    dialects = set(re.findall(r"# (TOC_GATEWAY_\w+):", COMPOSE))
    assert dialects <= {param.envvar for param in command.commands["gateway"].params}
    assert len(dialects) == 7


def test_prometheus_asks_every_daemon_of_compose_under_the_name_that_the_alerts_expect() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert set(re.findall(r'job="(\w+)"', (DEPLOY / "prometheus/alerts.yml").read_text())) == {
        job["job_name"]
    }
    services = COMPOSED["services"]
    daemons = ("worker", "gateway")
    workers = {name: one for name, one in services.items() if one.get("command", [""])[0] in daemons}
    (asked,) = job["static_configs"]
    assert sorted(asked["targets"]) == sorted(
        f"{name}{one['environment']['TOC_METRICS_ADDRESS']}" for name, one in workers.items()
    )
    for name, one in workers.items():
        assert one["hostname"] == name  # as `toc top` asks for it
        assert f"{one['environment']['TOC_METRICS_ADDRESS']}/readyz" in one["healthcheck"]["test"][-1]
    placed = {one["source"]: Path(one["target"]) for one in services["prometheus"]["configs"]}
    assert f"--config.file={placed['prometheus']}" in services["prometheus"]["command"]
    assert [placed["prometheus"].parent / name for name in config["rule_files"]] == [placed["alerts"]]


def test_grafana_has_the_dashboard_and_where_it_reads() -> None:
    services = COMPOSED["services"]
    placed = {one["source"]: Path(one["target"]) for one in services["grafana"]["configs"]}
    home = Path("/etc/grafana/provisioning")
    assert placed["grafana-datasource"].parent == home / "datasources"
    assert placed["grafana-dashboards"].parent == home / "dashboards"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yml").read_text())["providers"]
    assert placed["grafana-toc"].parent == Path(provider["options"]["path"])
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(
        placed["grafana-toc"]
    )
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasource.yml").read_text())["datasources"]
    address = urlsplit(source["url"])
    assert address.hostname in services
    assert services[address.hostname]["ports"] == [f"127.0.0.1:{address.port}:{address.port}"]
    # The dashboard takes the one that is the default.
    dashboard = json.loads((DEPLOY / "grafana/toc.json").read_text())
    assert source["isDefault"]
    assert [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "datasource"] == [
        source["type"]
    ]


def test_the_redis_of_compose_evicts_nothing_and_keeps_a_log() -> None:
    lines = (DEPLOY / "compose/redis.conf").read_text().splitlines()
    assert {"maxmemory-policy noeviction", "appendonly yes", "cluster-enabled yes"} <= set(lines)


def test_the_mysql_of_compose_has_written_what_it_has_acknowledged() -> None:
    lines = (DEPLOY / "compose/mysql.cnf").read_text().splitlines()
    assert {"innodb_flush_log_at_trx_commit = 1", "sync_binlog = 1"} <= set(lines)
