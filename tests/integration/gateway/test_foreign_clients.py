"""The tests of other queues' own clients, unchanged, against a gateway; only their set-up is ours."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.dialect import port_of
from harness.gateway import Gateway
from harness.lmstfy import OPTIONS
from harness.programs import missing
from harness.system import System

from toc.model.sharding import BizId
from toc.model.task import TaskStatus

SET_UP = Path(__file__).with_name("foreign")

PHP_SOURCE = os.environ.get("DELAYQUEUE_PHP")
TESTS = {
    "DelayQueueTest": ["testPushException", "testPush", "testPop"],
    "JobTest": ["testAppendValueToBody", "testToArray", "testJsonSerialize"],
}
JOBS = {"15702398321": [TaskStatus.CANCELLED], "56352695584": [TaskStatus.PROCESSED]}
"""What they push, and what becomes of it."""


@pytest.mark.chaos
def test_the_tests_of_ouqiangs_own_client_pass(system: System) -> None:
    if PHP_SOURCE is None:
        missing("DELAYQUEUE_PHP names no checkout of ouqiang/delayqueue-php (CONTRIBUTING.md)")
    told = (Path(PHP_SOURCE) / "tests" / "DelayQueueTest.php").read_text()
    assert all(f"function {name}(" in told for name in TESTS["DelayQueueTest"])
    assert told.count("function test") == len(TESTS["DelayQueueTest"]), "there are further tests"
    tests = [f"{name}::{test}" for name, some in TESTS.items() for test in some]
    with Gateway(system, "--youzan", "127.0.0.1:0") as gateway:
        done = subprocess.run(
            ["php", SET_UP / "delayqueue.php", PHP_SOURCE, str(port_of(gateway, "youzan")), *tests],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"passed {test}" for test in tests], done.stdout + done.stderr
    center = system.center
    ended = {biz_id: [row.status for row in center.store.find(BizId.of(biz_id))] for biz_id in JOBS}
    assert ended == JOBS, "they were this gateway's"


GO_SOURCE = os.environ.get("LMSTFY_CLIENT")


@pytest.mark.chaos
def test_the_tests_of_lmstfys_own_client_pass(system: System, tmp_path: Path) -> None:
    if GO_SOURCE is None:
        missing("LMSTFY_CLIENT names no checkout of lmstfy's client (CONTRIBUTING.md)")
    package = tmp_path / "src" / "github.com" / "bitleak" / "lmstfy" / "client"
    shutil.copytree(GO_SOURCE, package, ignore=shutil.ignore_patterns("cmd", "setup_test.go"))
    with Gateway(system, *OPTIONS) as gateway:
        shutil.copy(SET_UP / "setup_test.go", package)
        done = subprocess.run(
            ["go", "test", "-count=1", "-v", "."],
            cwd=package,
            env={
                **os.environ,
                "TEST_PORT": str(port_of(gateway, "lmstfy")),
                "TEST_ADMIN_PORT": str(port_of(gateway, "lmstfy-admin")),
                "TEST_TOKEN": gateway.tokens["all"],
                "GO111MODULE": "off",
                "GOPATH": f"{tmp_path}:/usr/share/gocode",
                "GOCACHE": str(tmp_path / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("--- PASS") >= 10
