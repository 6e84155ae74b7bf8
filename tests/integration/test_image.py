"""The image of deploy/Dockerfile: what it holds, and a worker in it, with as few rights as the docs give it.

It is built by hand, since that takes a base image: ``docker build -f deploy/Dockerfile -t toc .``. Without an
engine that has it (or what TOC_TEST_IMAGE names) these tests are skipped.
"""

import json
import os
import secrets
import shutil
import subprocess
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
from harness.patience import until
from harness.system import System

from benchmarks.private import free_port
from toc import TaskStatus, Topic

IMAGE = os.environ.get("TOC_TEST_IMAGE", "toc")
RUN = ("run", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--init", "--network=host")
APP = """
from toc import Task, TimeoutCenter

center = TimeoutCenter()


@center.handler("test.sync")
def nothing(task: Task) -> None:
    pass
"""


def docker(*words: str | Path, code: int | None = 0, timeout: float = 60) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=timeout, check=False)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def image() -> None:
    # By the command that the tests use: Docker's Python library leaves sockets open where there is no engine.
    look = ["docker", "image", "inspect", IMAGE]
    if shutil.which("docker") is None or subprocess.run(look, capture_output=True, check=False).returncode:
        pytest.skip(f"no Docker engine has the image {IMAGE}: docker build -f deploy/Dockerfile -t toc .")


@pytest.fixture
def system(hosts: System) -> System:
    hosts.center.store.topics.create(Topic("test.sync", 1, 4))
    return hosts


def test_it_holds_toc_and_no_installer_and_nobody_may_write_there() -> None:
    assert docker(*RUN, "--rm", IMAGE, "--version").strip() == version("timeout-center")
    extras = ("-c", "import aiohttp, cryptography, httptools, uvicorn, uvloop")  # of gateway and webhooks
    docker(*RUN, "--rm", "--entrypoint=/opt/toc/bin/python", IMAGE, *extras)
    inside = (
        "id -u; id -g; /opt/toc/bin/python -m pip --version; "
        "find / -xdev -writable -not -type l -not -path '/proc/*' -not -path '/dev/*' 2>/dev/null"
    )
    # without --read-only: by the rights of the files alone
    words = docker("run", "--rm", "--network=none", "--entrypoint=sh", IMAGE, "-c", inside, code=None).split()
    assert words[:2] == ["10001", "10001"]
    assert set(words[2:]) <= {"/tmp", "/var/tmp", "/run/lock"}  # no answer of pip among them
    print(f"{int(docker('image', 'inspect', '--format={{.Size}}', IMAGE)) / 1e6:.0f} MB")


def test_a_worker_in_it_works_answers_its_probes_and_ends_well(system: System, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/shop.py").write_text(APP)
    metrics, name = f"127.0.0.1:{free_port()}", f"toc-test-{secrets.token_hex(4)}"
    settings = {key: value for key, value in system.env.items() if key.startswith("TOC_")}
    settings |= {"TOC_METRICS_ADDRESS": metrics, "TOC_HOST": name}
    given = tmp_path / "env"  # a file, for passwords
    given.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    run = (*RUN, f"--env-file={given}", f"--volume={tmp_path / 'app'}:/app:ro")

    def answers(path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://{metrics}{path}", timeout=60) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    def log() -> str:
        done = subprocess.run(["docker", "logs", name], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    def status(job_id: int) -> TaskStatus | None:
        task = system.center.get(job_id)
        return task.status if task else None

    docker(*run, "--detach", f"--name={name}", IMAGE, "worker", "--app", "shop:center", "--processes", "2")
    try:
        assert until(lambda: answers("/readyz"), 60), log()
        assert answers("/livez")
        job_ids = [system.center.submit("test.sync", biz_id=n, delay=0.2) for n in range(200)]
        assert until(lambda: all(status(job_id) is TaskStatus.PROCESSED for job_id in job_ids), 30), log()

        lines = json.loads(docker(*run, "--rm", IMAGE, "doctor", "--json", code=None))
        assert not [line for line in lines if line["level"] == "wrong"], lines

        docker("stop", "--time", "50", name, timeout=60)
        assert docker("inspect", "--format={{.State.ExitCode}}", name).strip() == "0", log()
        assert "daemon_stopped" in log()
    finally:
        docker("rm", "--force", name, code=None)
