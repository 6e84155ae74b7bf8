"""The command line: options of the contract, --json of what lists, exit codes, the embedded default."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from contract.system import Contract
from harness import forks

from toc import CancelOutcome


def test_topic_create_takes_every_option_of_the_contract(contract: Contract) -> None:
    done = contract.toc(
        *("topic", "create", "t.all", "--biz-type", "100", "--slots", "1024", "--type", "instant"),
        *("--retries", "31", "--backoff", "immediate", "--backoff-base", "2", "--backoff-cap", "60"),
        *("--prepare-timeout", "3", "--max-runtime", "90", "--horizon", "7200", "--retention", "86400"),
    )
    assert done.returncode == 0, done.stderr
    shown = contract.json("topic", "show", "t.all")
    expected = {
        "name": "t.all",
        "biz_type": 100,
        "slot_amount": 1024,
        "topic_type": "instant",
        "retries": 31,
        "backoff": "immediate",
        "backoff_base": 2.0,
        "backoff_cap": 60.0,
        "prepare_timeout": 3,
        "max_runtime": 90,
        "horizon": 7200,
        "retention": 86400,
        "paused": False,
    }
    assert {name: shown[name] for name in expected} == expected
    (row,) = contract.query(f"SELECT * FROM `{contract.prefix}0`.timeout_topic WHERE name = 't.all'")
    assert (row["biz_type"], row["slot_amount"], row["retries"]) == (100, 1024, 31)


def test_topic_defaults_are_those_of_the_contract(contract: Contract) -> None:
    assert contract.toc("topic", "create", "t.plain", "--biz-type", "101", "--slots", "2").returncode == 0
    shown = contract.json("topic", "show", "t.plain")
    assert (shown["topic_type"], shown["retries"], shown["backoff"]) == ("timed", 16, "exponential")
    assert (shown["backoff_base"], shown["backoff_cap"]) == (1, 600)
    assert (shown["prepare_timeout"], shown["retention"]) == (30, 3 * 86400)
    assert "t.plain" in [topic["name"] for topic in contract.json("topic", "list")]
    assert contract.toc("topic", "alter", "t.plain", "--retries", "5", "--backoff-cap", "2m").returncode == 0
    shown = contract.json("topic", "show", "t.plain")
    assert (shown["retries"], shown["backoff_cap"]) == (5, 120)
    for command, paused in (("pause", True), ("resume", False)):
        assert contract.toc("topic", command, "t.plain").returncode == 0
        assert contract.json("topic", "show", "t.plain")["paused"] is paused


def test_a_task_goes_through_the_command_line(idle: Contract) -> None:
    submitted = idle.toc(
        *("submit", "c.plain", "--biz-id", "42", "--delay", "30m"),
        *("--attribute", '{"reason": "unpaid ☃"}', "--dedup-key", "k", "--slot-basis", "s"),
    )
    assert submitted.returncode == 0, submitted.stderr
    job_id = int(submitted.stdout)
    shown = idle.json("get", str(job_id))
    assert shown["job_id"] == str(job_id)
    assert shown["topic"] == "c.plain"
    assert shown["attribute"] == {"reason": "unpaid ☃"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", shown["action_time"])
    assert [task["job_id"] for task in idle.json("find", "--biz-id", "42")] == [str(job_id)]
    again = idle.json(
        *("submit", "c.plain", "--biz-id", "42", "--delay", "5s"),
        *("--attribute", '{"reason": "unpaid ☃"}', "--dedup-key", "k"),
    )
    assert again["job_id"] == str(job_id)
    at = datetime.now(timezone(timedelta(hours=2))).replace(microsecond=0) + timedelta(days=200)
    assert at.isoformat().endswith("+02:00")
    moved = idle.json("reschedule", str(job_id), "--action-time", at.isoformat())
    assert str(moved["outcome"]).lower() == "rescheduled"
    task = idle.center.get(job_id)
    assert task is not None
    assert task.action_time == at
    moved = idle.json("reschedule", str(job_id), "--delay", "200d")  # of microseconds none is kept
    task = idle.center.get(job_id)
    assert task is not None
    assert datetime.fromisoformat(moved["action_time"]) == task.action_time
    assert idle.json("get", str(job_id))["biz_type"] == task.biz_type
    cancelled = idle.json("cancel", str(job_id))
    assert str(cancelled["outcome"]).lower() == "cancelled"
    assert idle.center.cancel(job_id) is CancelOutcome.CANCELLED
    late = idle.toc("reschedule", str(job_id), "--delay", "1h", "--json")
    assert late.returncode == 1
    assert json.loads(late.stdout) == {"job_id": str(job_id), "outcome": "too_late", "action_time": None}
    assert "ended" in late.stderr
    assert idle.toc("get", str(job_id ^ 1)).returncode == 1
    assert idle.toc("cancel", str(job_id ^ 1)).returncode == 1
    assert idle.toc("cancel", "--topic", "c.plain", "--biz-id", "42").returncode == 0


def test_a_body_goes_in_and_comes_out_byte_by_byte(contract: Contract, tmp_path: Path) -> None:
    body, root, path = bytes(range(256)) * 3000, Path(__file__).parents[2], str(tmp_path / "body")

    def toc(*words: str, given: bytes = b"") -> bytes:
        done = forks.run_bytes(words, env=contract.env, directory=root, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    words = ("submit", "c.plain", "--biz-id", "8", "--delay", "1h", "--dedup-key", "body")
    job_id = toc(*words, "--body-file", "-", "--content-type", "image/x", given=body).decode().strip()
    assert toc("get", job_id, "--body") == body
    Path(path).write_bytes(body)
    assert toc(*words, "--body-file", path, "--content-type", "image/x").decode().strip() == job_id
    digest = {"body_sha256": hashlib.sha256(body).hexdigest()}
    told = {"content_type": "image/x", "body_length": len(body), **digest}
    shown = contract.json("get", job_id)
    assert shown.items() >= told.items()
    assert "body_base64" not in shown
    assert base64.b64decode(contract.json("get", job_id, "--body")["body_base64"]) == body
    task = contract.center.get(int(job_id))
    assert task is not None
    assert (task.body, task.content_type) == (body, "image/x")

    text = contract.json("submit", "c.plain", "--biz-id", "8", "--delay", "1h", "--body", "grün")["job_id"]
    assert toc("get", text, "--body") == "grün".encode()
    assert contract.json("get", text)["content_type"] == "text/plain; charset=utf-8"
    plain = contract.json("submit", "c.plain", "--biz-id", "8", "--delay", "1h")["job_id"]
    for refused in (
        ("get", plain, "--body"),
        (*words, "--body-file", path),  # another content type
        (*words, "--body-file", "nowhere"),
        (*words, "--body-file", "."),
        (*words, "--body", "x", "--body-file", path),
        (*words, "--content-type", "a/b"),
    ):
        done = contract.toc(*refused)
        assert (done.returncode, done.stdout) == (2, ""), refused
    large = contract.toc(*words, "--body", "x" * 11, env={"TOC_MAX_BODY": "10"})
    assert large.returncode == 2
    assert "TOC_MAX_BODY" in large.stderr


@pytest.mark.parametrize("command", ["sweep", "rebuild"])
def test_without_an_index_there_is_nothing_to_fill(alone: Contract, command: str) -> None:
    done = alone.toc(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "not indexed" in done.stderr


@pytest.mark.parametrize("command", ["slots", "workers"])
def test_who_owns_what_can_be_asked_of_one_host_without_zookeeper_too(
    contract: Contract, command: str
) -> None:
    assert isinstance(contract.json(command), list)
