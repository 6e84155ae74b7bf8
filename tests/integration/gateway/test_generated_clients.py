"""Clients that others' generators make of the document submit, look up, pull and acknowledge tasks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from harness.gateway import Gateway

from toc.gateway.app import CALLS
from toc.gateway.openapi import document

PYTHON = """
import sys
from client import AuthenticatedClient
from client.api.default import pull_calls_ack, pull_calls_pull, tasks_get, tasks_search, tasks_submit
from client.models import Leases, Pull, TaskToSubmit

url, token, topic, other = sys.argv[1:]
with AuthenticatedClient(base_url=url, token=token) as client:
    made = tasks_submit.sync(topic, client=client, body=TaskToSubmit(biz_id=42, delay=0.01))
    later = tasks_submit.sync(other, client=client, body=TaskToSubmit(biz_id="42", delay=3600.0))
    assert tasks_get.sync(later.job_id, client=client).biz_id == 42
    assert later.job_id in [one.job_id for one in tasks_search.sync(client=client, topic=other).tasks]
    (task,) = pull_calls_pull.sync(topic, client=client, body=Pull(wait=30.0)).tasks
    acked = pull_calls_ack.sync(client=client, body=Leases(lease=task.lease))
    assert (task.job_id, acked.outcome) == (made.job_id, "acked")
"""
NODE = """
const [url, token, topic] = process.argv.slice(2);
const headers = {Authorization: `Bearer ${token}`};
const same = (found: unknown, wanted: unknown) => {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) throw new Error(`${found}, not ${wanted}`);
};
"""
ORVAL = f"""
import * as toc from './orval';
{NODE}
const real = fetch;
globalThis.fetch = ((path: string, options: RequestInit) =>
  real(new URL(path, url), {{...options, headers: {{...options.headers, ...headers}}}})) as typeof fetch;
async function main() {{
  const made = await toc.tasksSubmit(topic, {{biz_id: 42, delay: 0.01}});
  const pulled = await toc.pullCallsPull(topic, {{wait: 30}});
  if (made.status !== 201 || pulled.status !== 200) throw new Error(`${{made.status}} ${{pulled.status}}`);
  same(pulled.data.tasks.map(one => one.job_id), [made.data.job_id]);
  const acked = await toc.pullCallsAck({{lease: pulled.data.tasks[0].lease}});
  same([acked.status, (acked.data as {{outcome?: string}}).outcome], [200, 'acked']);
}}
main().catch(error => {{ console.error(error); process.exit(1); }});
"""
FETCH = f"""
import createClient from 'openapi-fetch';
import type {{paths}} from './schema';
{NODE}
async function main() {{
  const client = createClient<paths>({{baseUrl: url, headers}});
  const body = {{biz_id: 42, delay: 0.01}};
  const made = await client.POST('/v1/topics/{{topic}}/tasks', {{params: {{path: {{topic}}}}, body}});
  const path = {{topics: topic}};
  const pulled = await client.POST('/v1/topics/{{topics}}:pull', {{params: {{path}}, body: {{wait: 30}}}});
  if (!made.data || !pulled.data) throw new Error(JSON.stringify([made.error, pulled.error]));
  same(pulled.data.tasks.map(one => one.job_id), [made.data.job_id]);
  const acked = await client.POST('/v1/leases:ack', {{body: {{lease: pulled.data.tasks[0].lease}}}});
  same(acked.data?.outcome, 'acked');
}}
main().catch(error => {{ console.error(error); process.exit(1); }});
"""


def test_the_document_has_nothing_that_generators_trip_over() -> None:
    found = document(CALLS)
    schemas = found["components"]["schemas"]
    assert not [name for name in schemas if "__" in name], "two schemas of one name"

    def look(node: Any, where: str) -> None:
        if isinstance(node, dict):
            assert not isinstance(node.get("title"), str) or where == "/info", where
            assert "*/*" not in node, where
            assert "default" not in node, where
            for key, value in node.items():
                look(value, f"{where}/{key}")
        elif isinstance(node, list):
            for value in node:
                look(value, where)

    look(found, "")
    for name in ("Leases", "Nack", "Extend"):
        assert schemas[name]["not"] == {"required": ["lease", "leases"]}
        assert "lease" not in schemas[name].get("required", [])


@pytest.fixture
def generators() -> Path:
    """Where the generators are, which are installed by hand: see CONTRIBUTING.md."""
    place = os.environ.get("CLIENT_GENERATORS")
    if place is None:
        pytest.skip("CLIENT_GENERATORS does not name a directory with the generators")
    return Path(place)


def _run(*words: object, cwd: Path) -> None:
    done = subprocess.run(list(map(str, words)), cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("generator", ["openapi-python-client", "orval", "openapi-typescript"])
def test_a_generated_client_does_what_the_document_says(
    shared: Gateway, generators: Path, tmp_path: Path, generator: str
) -> None:
    topic = f"pull.{generator}"
    made = {"name": topic, "biz_type": 7000 + len(generator), "slot_amount": 2, "delivery": "pull"}
    assert shared.call("POST", "/v1/topics", made).status == 201
    answer = shared.call("GET", "/openapi.json")
    (tmp_path / "openapi.json").write_text(json.dumps(answer.body))
    told = (f"http://127.0.0.1:{shared.port}", shared.tokens["all"], topic, "test.sync")
    if generator == "openapi-python-client":
        words = ("generate", "--path", "openapi.json", "--output-path", "client", "--meta", "none")
        _run(generators / "bin" / generator, *words, cwd=tmp_path)
        (tmp_path / "use.py").write_text(PYTHON)
        _run(generators / "bin" / "python", "use.py", *told, cwd=tmp_path)
        return
    binaries = generators / "node_modules" / ".bin"
    (tmp_path / "node_modules").symlink_to(generators / "node_modules")
    if generator == "orval":
        settings = {"input": "./openapi.json", "output": {"target": "./orval.ts", "client": "fetch"}}
        (tmp_path / "orval.config.js").write_text(f"module.exports = {json.dumps({'toc': settings})}")
        _run(binaries / "orval", cwd=tmp_path)
    else:
        _run(binaries / generator, "openapi.json", "-o", "schema.ts", cwd=tmp_path)
    (tmp_path / "use.ts").write_text(ORVAL if generator == "orval" else FETCH)
    strict = ("--strict", "--skipLibCheck", "--target", "es2022", "--module", "commonjs")
    lib = ("--moduleResolution", "node10", "--lib", "es2022,dom,dom.iterable", "--types", "node")
    _run(binaries / "tsc", *strict, *lib, "use.ts", cwd=tmp_path)
    _run("node", "use.js", *told, cwd=tmp_path)
