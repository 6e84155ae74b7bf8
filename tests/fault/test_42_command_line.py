"""Fault 42: output that cannot be written, values that are none, on any command: a line, a code, no trace."""

import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from cryptography.fernet import Fernet
from fault.conftest import Case
from fault.kit.commands import Commands, Ended
from harness import forks
from harness.forks import CLOSED, FULL, GONE
from harness.refused import COMMANDS as COMMANDS_REFUSED
from reference_page import commands

from benchmarks.local import RedisServer, ZooKeeper
from benchmarks.private import free_port

JOB_ID = "912510244313854036"
WORDS = {
    name: words.split()
    for names, words in {
        "submit": "order.close --biz-id 1 --delay 1h", "get, dead show": JOB_ID, "find": "--biz-id 1",
        "cancel": "--topic order.close --biz-id 5",
        "reschedule": f"{JOB_ID} --delay 2h",
        "topic create": "order.remind --biz-type 8 --slots 1",
        "topic show, topic pause, topic resume": "order.close",
        "topic alter": "order.close --retries 5", "topic delete": "order.gone",
        "topic sync": "--app none:center", "template create": "shop.* --slots 1",
        "template show, template delete": "shop.*", "template alter": "shop.* --slots 2",
        "schedule create": "report --topic order.close --every 1h",
        "schedule show, schedule pause, schedule resume, schedule trigger, schedule preview": "report",
        "schedule alter": "report --every 2h",
        "schedule backfill": "report --from 2026-01-01T00:00:00Z --to 2026-01-01T03:00:00Z",
        "schedule delete": "report", "target create": "shop --url https://shop.example/hook",
        "target alter": "shop --timeout 5",
        "target show, target rotate, target test, target pause, target resume, target delete": "shop",
        "token create": "shop --role produce --topic order.*", "token revoke": "shop",
        "top": "--once --interval 0.1", "what-if": "--pause 2h",
        "drain": "h1 --absent", "undrain, unweight": "h1",
        "pin": "order.close_1 h1 --absent", "unpin": "order.close_1", "weight": "h1 2 --absent",
        "import youzan, import lmstfy": "--redis redis://127.0.0.1:1 --dry-run",
        "dead redrive, dead purge": JOB_ID,
        "bulk cancel, bulk purge": "--topic order.close --yes", "bulk redrive": "--topic order.close",
        "bulk reschedule": "--topic order.close --delay 2h --yes",
        "bulk show, bulk tasks, bulk stop, bulk resume": "3f9c0a11b2c4",
        # These start servers and go on; what they print is tested apart.
        "demo": "--count 0", "dev": "--directory /dev/null", "worker": "--app none:center",
        "gateway": "--host nowhere",
    }.items()
    for name in names.split(", ")
}  # fmt: skip
"""What a command needs to do something. One that is not here is run without arguments."""


COMMANDS = {name.removeprefix("toc "): command for name, command in commands()}
OUTPUTS = (".stdin", ".stdout", ".stderr")
JSON = {name for name, command in COMMANDS.items() if "--json" in [param.opts[0] for param in command.params]}


@pytest.fixture
def toc(tmp_path: Path, clean_redis: RedisServer, zookeeper: ZooKeeper, zookeeper_root: str) -> Commands:
    """Commands on SQLite, Redis and ZooKeeper, with one topic."""
    env = {
        "TOC_DATABASE_URLS": f"sqlite:///{tmp_path / 'toc.db'}",
        "TOC_REDIS_URL": clean_redis.url,
        "TOC_ZOOKEEPER": zookeeper.url,
        "TOC_CLUSTER": zookeeper_root,
        "TOC_SECRET_KEY": Fernet.generate_key().decode(),
    }
    made = Commands(tmp_path / "run", env)
    assert made("db", "upgrade").code == 0
    assert made("topic", "create", "order.close", "--biz-type", 7, "--slots", 4).code == 0
    return made


def test_every_command_with_a_full_stdout_ends_in_a_line_and_a_code(toc: Commands, case: Case) -> None:
    line = case.verdict(42, "output that cannot be written", "every command, /dev/full")
    lines = [
        [*name.split(), *WORDS.get(name, []), *(["--json"] if name in JSON else [])] for name in COMMANDS
    ]
    lines += [[*name.split(), "--help"] for name in ("topic", "topic create")]
    lines += [["--help"], ["--version"], ["submit", "order.close", "--biz-id", "77", "--delay", "1h"]]
    ended = toc.all(lines, stdout=FULL)
    told = [each for each in ended if "stdout cannot be written: No space left on device" in each.err]
    for each in ended:
        assert not each.trace, each
        assert 0 <= each.code <= 4, each
        if each in told:
            assert each.code != 0, each
            assert each.err.splitlines()[-1].startswith("error: stdout"), each
        elif {"--json", "--help", "--version"} & set(each.words):
            assert each.code != 0, f"it printed nothing, so it must have been refused: {each}"
            assert each.err.startswith(("error: ", "Usage: toc ")), each
    line.prove(len(told) > 25, f"{len(ended)} commands, {len(told)} of them had something to print")
    assert ended[-1].err.endswith("No space left on device; the command itself succeeded\n")
    assert len(json.loads(toc("find", "--biz-id", 77, "--json").out)) == 1, "what was asked is done"
    for words in (["slots", "--watch"], ["top", "--interval", "0.1"]):  # which go on for ever
        for kind, code in ((GONE, 141), (FULL, 1), (CLOSED, 1)):
            watched = toc(*words, stdout=kind)
            assert (watched.code, watched.trace) == (code, False), watched


@pytest.mark.slow
def test_a_stream_that_fails_changes_no_other_and_no_code(toc: Commands, case: Case) -> None:
    line = case.verdict(42, "output that cannot be written", "each stream full, closed, without a reader")
    lines = [
        ["topic", "list"],  # prints a table
        ["topic", "list", "--json"],
        ["undrain", "h1"],  # fails, with words on stderr
        ["no-such-command"],
    ]
    plain = toc.all(lines)
    assert [each.code for each in plain] == [0, 0, 1, 2]
    for kind, lost in ((FULL, 1), (GONE, 128 + signal.SIGPIPE), (CLOSED, 1)):
        for usual, now in zip(plain, toc.all(lines, stderr=kind), strict=True):
            assert (now.code, now.out, now.err) == (usual.code, usual.out, ""), (kind, now)
        for usual, now in zip(plain, toc.all(lines, stdout=kind), strict=True):
            assert now.code == (usual.code or lost), (kind, now)
            assert ("stdout cannot be written" in now.err) == bool(usual.out and kind != GONE), (kind, now)
            assert not now.trace, (kind, now)
        both: dict[str, Any] = {"stdin": CLOSED} if kind == CLOSED else {}
        for usual, now in zip(plain, toc.all(lines, stdout=kind, stderr=kind, **both), strict=True):
            assert now.code == (usual.code or lost), (kind, now)
    line.prove(True, f"{9 * len(lines)} commands")


def test_toc_dev_ends_when_it_cannot_say_where_its_settings_are(case: Case) -> None:
    line = case.verdict(42, "output that cannot be written", "toc dev, as a process")
    said = case.path / "said"
    said.touch()
    words = ["dev", "--directory", str(case.path / "dev")]
    ended = forks.start(words, env=os.environ, streams={"stdout": FULL, "stderr": str(said)})
    try:
        code = ended.wait(60)
    finally:
        ended.kill()
    assert (code, said.read_text().splitlines()[-1]) == (
        1, "error: stdout cannot be written: No space left on device",
    )  # fmt: skip
    line.prove("Traceback" not in said.read_text(), said.read_text().splitlines()[-1])


def test_letters_that_the_output_has_not_are_written_otherwise(case: Case) -> None:
    line = case.verdict(42, "output that cannot be written", "letters that its encoding lacks")
    env = {**os.environ, "TOC_HOST": "caf\u00e9\U0001f600", "PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    for more in ([], ["--json"]):
        ended = subprocess.run(
            [sys.executable, "-m", "toc", "config", "show", *more],
            env=env, cwd=case.path, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (0, "")
        assert "caf" in ended.stdout
    assert json.loads(ended.stdout)["host"] == env["TOC_HOST"]
    line.prove(ended.stdout.isascii(), "JSON escapes them")


BAD = [
    *("1e300w", "1e300", "nan", "inf", "-inf", "-1", "-0.5", "", " ", "0x10", "9" * 400, "1" * 5000),
    *(str(2**64), str(-(2**63)), "99999-01-01T00:00:00Z", "9999-12-31T23:59:59.999999-14:00", "x" * 5000),
    *("0001-01-01T00:00:00+14:00", "2030-01-31T12:00:00+99:00", "\udcff", "a\nb", "\x1b[31m", "[/]", "%s"),
    *("{}", "/dev/null", "/dev/null/x", "/proc/x", "127.0.0.1:99999", "a..b:1", "order.close_1", "\ud800"),
]
NO_DIRECTORIES = ["/dev/null", "/dev/null/x", "/proc/x", "\udcff", "x" * 5000, "/proc/self/mem"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_value_of_any_option_or_argument_shows_a_trace(toc: Commands, case: Case) -> None:
    line = case.verdict(42, "values that are none", "every option and argument of every command")
    lines = [
        words
        for name, command in COMMANDS.items()
        for number, param in enumerate(command.params)
        if not getattr(param, "is_flag", False)
        for value in (NO_DIRECTORIES if param.name == "directory" else BAD)[number % 5 :: 5]
        for words in [_with(name, command, param, value)]
    ]
    ended = toc.all(lines)
    for each in ended:
        assert not each.trace, each
        away = each.words[0] == "import"  # what it would read from is not there, which has a code of its own
        assert each.code in ((0, 1, 2, 4) if away else (0, 1, 2)), each
        if each.code == 2:
            assert each.out == "", each
            assert "Usage: toc" in each.err or _in_one_line(each), each
    refused = sum(each.code == 2 for each in ended)
    line.prove(refused > len(ended) / 2, f"{len(ended)} commands, {refused} refused")


def _with(name: str, command: Any, param: Any, value: str) -> list[str]:
    """A command with a value for one of its parameters."""
    words = list(WORDS.get(name, []))
    if param.param_type_name == "option":
        return [*name.split(), *words, f"{param.opts[0]}={value}"]
    place = [each.name for each in command.params if each.param_type_name == "argument"].index(param.name)
    given = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    words[min(place, given) : place + 1 if place < given else given] = [value]
    return [*name.split(), *words]


def _in_one_line(ended: Ended) -> bool:
    return ended.err.startswith("error: ") and ended.err.count("\n") == 1 and len(ended.err) < 1500


def test_what_is_no_value_is_named_in_one_line_and_nothing_is_written(toc: Commands, case: Case) -> None:
    line = case.verdict(42, "values that are none", "numbers, ages, directories, addresses, hosts")

    def written() -> list[object]:
        with sqlite3.connect(case.path / "toc.db") as database:
            rows = [
                row for row in database.iterdump() if "timeout_audit" not in row
            ]  # an intent, and its end
        files = sorted(path.name for path in (case.path / "run").iterdir() if path.suffix not in OUTPUTS)
        return [rows, case.redis.call("KEYS", "*"), toc("intents", "--json").out, files]

    before = written()
    found = toc.all([shlex.split(words) for words in COMMANDS_REFUSED])
    for says, ended in zip(COMMANDS_REFUSED.values(), found, strict=True):
        assert ended.code == 2, ended
        assert says in " ".join(ended.err.split()), ended
        assert _in_one_line(ended) or "Usage: toc" in ended.err, ended
        assert (ended.out, ended.trace) == ("", False), ended
        assert "canary" not in ended.err
    assert written() == before
    line.prove(True, f"{len(found)} commands refused with code 2")


SETTINGS = [
    ("TOC_REDIS_URL", "redis://a..b:1", "'a..b' is not a host name"),
    ("TOC_DATABASE_URLS", f"mysql+pymysql://u:p@{'h' * 300}:1/", "is not a host name"),
    ("TOC_ZOOKEEPER", "\udcff:1", "is not a host name"),
    ("TOC_TABLES", "1" * 5000, "TOC_TABLES=111"),
    ("TOC_WEIGHT", "1e300", "TOC_WEIGHT=1e300"),
    ("TOC_SECRET_KEY", f"{'A' * 43}=,short", "TOC_SECRET_KEY=***"),
    ("TOC_CONFIG", "/", "not a readable file"),
    ("TOC_CONFIG", "x" * 5000, "not a readable file"),
]
FILES = [
    (b"tables = " + b"9" * 5000, "is not TOML"),
    (b"tables = " + b"[" * 5000, "is not TOML"),
    (bytes(range(256)), "cannot be read"),
]


def test_a_setting_that_is_none_is_named(toc: Commands, case: Case) -> None:
    line = case.verdict(42, "values that are none", "settings, and the file of settings")
    given = list(SETTINGS)
    for number, (text, says) in enumerate(FILES):
        file = case.path / f"{number}.toml"
        file.write_bytes(text)
        given.append(("TOC_CONFIG", str(file), says))
    for setting, value, says in given:
        for ended in toc.all([["config", "show"], ["doctor"]], env={setting: value}):
            assert ended.code == 2, ended
            assert says in ended.err, ended
            assert _in_one_line(ended), ended
    line.prove(True, f"{len(given)} settings, each in 2 commands")


def test_a_host_unknown_to_the_cluster_is_refused_by_name_unless_meant(toc: Commands, case: Case) -> None:
    line = case.verdict(42, "values that are none", "hosts and workers that are not there")
    wishes = (["drain", "h9"], ["weight", "h9", "2"], ["pin", "order.close_1", "h9"])
    no = "error: 'h9' has no worker now; hosts with workers: none; add --absent if it will come later\n"
    assert [(each.code, each.out, each.err) for each in toc.all(wishes)] == [(1, "", no)] * 3
    assert json.loads(toc("intents", "--json").out) == []
    assert {each.code for each in toc.all([[*words, "--absent"] for words in wishes])} == {0}
    assert len(json.loads(toc("intents", "--json").out)) == 3
    known = [["drain", "h9"], ["weight", "h9", "3"]]
    assert {each.code for each in toc.all(known)} == {0}, "it is known by now: to ask again is no mistake"
    for word, hosts in (("undrain", "drained hosts: h9"), ("unweight", "hosts with a weight: h9")):
        ended = toc(word, "h8")
        assert (ended.code, hosts in ended.err) == (1, True), ended
    ends = [["undrain", "h9"], ["unweight", "h9"], *([["unpin", "order.close_1"]] * 2)]
    assert {each.code for each in toc.all(ends)} == {0}, "the slot is there, if it is pinned or not"
    line.prove(True, "refused with code 1; nothing stood in ZooKeeper")


class _Daemon(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = {"/metrics": b"[]", "http://": b"from a proxy"}.get(self.path[:8], b"")
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_toc_top_says_which_daemon_is_silent_and_asks_no_proxy(toc: Commands, case: Case) -> None:
    line = case.verdict(42, "a daemon that does not answer", "toc top")
    proxies = {name: f"http://127.0.0.1:{free_port()}" for name in ("http_proxy", "HTTP_PROXY", "all_proxy")}
    silent = f"127.0.0.1:{free_port()}"
    other = f"127.0.0.1:{case.redis.port}"  # it answers, but not like a daemon
    with HTTPServer(("127.0.0.1", 0), _Daemon) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            lively = f"127.0.0.1:{server.server_address[1]}"
            top = ["top", "--interval", "0.1", "--daemon", lively]
            ended = toc(*top, "--json", env=proxies)
            assert ended.code == 0, ended
            shown = json.loads(ended.out)
            assert shown["daemons"] == 1, f"it went through a proxy: {ended}"
            assert shown["silent"] == []
            for more in (["--once"], ["--json"]):
                ended = toc(*top, "--daemon", silent, "--daemon", other, *more, env=proxies)
                assert (ended.code, ended.trace) == (1, False), ended
                assert ended.err == f"no answer from {silent}, {other}: their numbers are missing\n"
                assert silent in ended.out, ended
            assert json.loads(ended.out)["silent"] == [silent, other]
            line.prove(True, ended.err.strip())
        finally:
            server.shutdown()
            thread.join()
