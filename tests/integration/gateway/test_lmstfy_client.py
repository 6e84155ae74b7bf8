"""The tests of lmstfy's own Go client, unchanged, against a gateway; only their set-up is ours.

Long, and only where LMSTFY_CLIENT names the directory ``client`` of a checkout of bitleak/lmstfy (725f59e).
Needs Debian's golang-go and golang-github-stretchr-testify-dev.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness.gateway import Gateway
from harness.lmstfy import OPTIONS, port_of
from harness.programs import missing
from harness.system import System

SOURCE = os.environ.get("LMSTFY_CLIENT")

# Their own set-up starts Redis in a container and a server, and makes a token as this does.
SET_UP = """package client

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"testing"
)

var (
	Host      = "127.0.0.1"
	Port      = %d
	Namespace = "client-ns"
	Token     string
)

func TestMain(m *testing.M) {
	url := fmt.Sprintf("http://any:%s@127.0.0.1:%d/token/%%s?description=client", Namespace)
	resp, err := http.Post(url, "", nil)
	if err != nil || resp.StatusCode != http.StatusCreated {
		panic("Failed to create testing token")
	}
	var made struct {
		Token string `json:"token"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil {
		panic(err)
	}
	Token = made.Token
	os.Exit(m.Run())
}
"""


@pytest.mark.chaos
def test_the_tests_of_lmstfys_own_client_pass(system: System, tmp_path: Path) -> None:
    if SOURCE is None:
        missing("LMSTFY_CLIENT names no checkout of lmstfy's client (CONTRIBUTING.md)")
    package = tmp_path / "src" / "github.com" / "bitleak" / "lmstfy" / "client"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("cmd", "setup_test.go"))
    with Gateway(system, *OPTIONS) as gateway:
        own = port_of(gateway, "lmstfy"), gateway.tokens["all"], port_of(gateway, "lmstfy-admin")
        (package / "setup_test.go").write_text(SET_UP % own)
        done = subprocess.run(
            ["go", "test", "-count=1", "-v", "."],
            cwd=package,
            env={
                **os.environ,
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
