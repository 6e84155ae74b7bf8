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

# The tests of ouqiang's own PHP client, unchanged, against a gateway; only their set-up is ours.

PHP_SOURCE = os.environ.get("DELAYQUEUE_PHP")
TESTS = {
    "DelayQueueTest": ["testPushException", "testPush", "testPop"],
    "JobTest": ["testAppendValueToBody", "testToArray", "testJsonSerialize"],
}
JOBS = {"15702398321": [TaskStatus.CANCELLED], "56352695584": [TaskStatus.PROCESSED]}
"""What they push, and what becomes of it."""

# Their own set-up names port 9277; of PHPUnit and Guzzle, what the client and its tests use.
PHP_SET_UP = r"""<?php

namespace GuzzleHttp {
    class Response
    {
        public function __construct(private string $body) {}

        public function json() { return json_decode($this->body, true, 512, JSON_THROW_ON_ERROR); }
    }

    class Client
    {
        public function __construct(private array $config) {}

        public function post($path, array $options)
        {
            $url = $this->config['base_url'] . $path;
            $body = file_get_contents($url, false, stream_context_create(['http' => [
                'method' => 'POST',
                'header' => "Content-Type: application/json\r\nConnection: close",
                'content' => json_encode($options['json']),
                'timeout' => $this->config['defaults']['timeout'],
                'protocol_version' => 1.1,
            ]]));
            if ($body === false) {
                throw new \Exception("no answer to $path");
            }
            return new Response($body);
        }
    }
}

namespace {
    abstract class PHPUnit_Framework_TestCase
    {
        private $expected;

        protected function setUp() {}

        protected function setExpectedException($name) { $this->expected = $name; }

        protected function assertEquals($expected, $actual)
        {
            if ($expected != $actual) {
                throw new \Exception(var_export($actual, true) . ' is not ' . var_export($expected, true));
            }
        }

        protected function assertArrayHasKey($key, $array)
        {
            $this->assertEquals(true, array_key_exists($key, $array));
        }

        protected function assertJsonStringEqualsJsonString($expected, $actual)
        {
            $this->assertEquals(json_decode($expected, true), json_decode($actual, true));
        }

        public function runTestOf($name)
        {
            $comment = (new \ReflectionMethod($this, $name))->getDocComment() ?: '';
            foreach (str_contains($comment, '@dataProvider') ? $this->providerJob() : [[]] as $arguments) {
                $this->setUp();
                $caught = null;
                try {
                    $this->$name(...$arguments);
                } catch (\Exception $exception) {
                    if ($this->expected === null) {
                        throw $exception;
                    }
                    $caught = $exception;
                }
                if ($this->expected !== null && !$caught instanceof $this->expected) {
                    throw new \Exception("$name did not raise $this->expected");
                }
                $this->expected = null;
            }
        }
    }

    error_reporting(E_ALL & ~E_DEPRECATED);
    [, $source, $port] = $argv;
    spl_autoload_register(function ($class) use ($source) {
        $path = str_starts_with($class, 'DelayQueue\\Tests\\')
            ? 'tests/' . substr($class, strlen('DelayQueue\\Tests\\'))
            : 'src/' . substr($class, strlen('DelayQueue\\'));
        $file = "$source/" . str_replace('\\', '/', $path) . '.php';
        if (is_file($file)) {
            require $file;
        }
    });

    class DelayQueueTest extends \DelayQueue\Tests\DelayQueueTest
    {
        protected function setUp()
        {
            $this->delayQueue = new \DelayQueue\DelayQueue("http://127.0.0.1:{$GLOBALS['port']}");
        }
    }

    class JobTest extends \DelayQueue\Tests\JobTest {}

    foreach (array_slice($argv, 3) as $test) {
        [$class, $name] = explode('::', $test);
        (new $class)->runTestOf($name);
        echo "passed $test\n";
    }
}
"""


@pytest.mark.chaos
def test_the_tests_of_ouqiangs_own_client_pass(system: System, tmp_path: Path) -> None:
    if PHP_SOURCE is None:
        missing("DELAYQUEUE_PHP names no checkout of ouqiang/delayqueue-php (CONTRIBUTING.md)")
    told = (Path(PHP_SOURCE) / "tests" / "DelayQueueTest.php").read_text()
    assert all(f"function {name}(" in told for name in TESTS["DelayQueueTest"])
    assert told.count("function test") == len(TESTS["DelayQueueTest"]), "there are further tests"
    (tmp_path / "run.php").write_text(PHP_SET_UP)
    tests = [f"{name}::{test}" for name, some in TESTS.items() for test in some]
    with Gateway(system, "--youzan", "127.0.0.1:0") as gateway:
        done = subprocess.run(
            ["php", tmp_path / "run.php", PHP_SOURCE, str(port_of(gateway, "youzan")), *tests],
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


# The tests of lmstfy's own Go client, unchanged, against a gateway; only their set-up is ours.

GO_SOURCE = os.environ.get("LMSTFY_CLIENT")

# Their own set-up starts Redis in a container and a server, and makes a token as this does.
GO_SET_UP = """package client

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
    if GO_SOURCE is None:
        missing("LMSTFY_CLIENT names no checkout of lmstfy's client (CONTRIBUTING.md)")
    package = tmp_path / "src" / "github.com" / "bitleak" / "lmstfy" / "client"
    shutil.copytree(GO_SOURCE, package, ignore=shutil.ignore_patterns("cmd", "setup_test.go"))
    with Gateway(system, *OPTIONS) as gateway:
        own = port_of(gateway, "lmstfy"), gateway.tokens["all"], port_of(gateway, "lmstfy-admin")
        (package / "setup_test.go").write_text(GO_SET_UP % own)
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
