"""The runbook of docs/run.md: each recipe with its commands as they are written, under load.

The page says what to run and when to go on; the test runs it and waits for that. ``ssh`` and ``systemctl``
are the test's to play: its hosts are daemons of this machine. In the end the checker judges every task.
"""

import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
from fault.kit.load import Load
from fault.kit.operated import OperatedCluster
from fault.kit.table import left, overdue

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs/run.md").read_text().split("\n## Runbook\n")[1].split("\n## ")[0]
RECIPES = {
    title: [
        line
        for block in re.findall(r"^ *```sh\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
        for line in textwrap.dedent(block).splitlines()
    ]
    for title, text in re.findall(r"^### (.+?)\n(.*?)(?=^### |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
}
TOPIC = "test.sync"
HERE = MappingProxyType({"order.close --biz-type 1001": f"{TOPIC} --biz-type 1", "order.close": TOPIC})
"""What this reader of the page puts in for its topic."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[OperatedCluster]:
    one = OperatedCluster(tmp_path)
    try:
        yield one
    finally:
        one.stop()


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_every_recipe_works_as_it_is_written(cluster: OperatedCluster) -> None:
    run = partial(cluster.run, words=HERE)
    new = dict(RECIPES)
    with _recipe(new, "Bring up a cluster") as (config, schema, topic, first, second, workers, doctor):
        for line in (config, schema, topic, first, second):
            run(line)
        cluster.wait(cluster.even, "both hosts have their slots")
        assert "host1" in run(workers)
        run(doctor, codes=(0, 1))
    system = cluster.system
    doomed = [system.client.submit("test.doomed", biz_id=n, delay=0.1) for n in range(4)]
    with Load(system.client, rate=40, ahead=(0.2, 2.0)) as load:
        with _recipe(new, "Add a host") as (check, start, workers):
            run(check)
            run(start)
            cluster.wait(cluster.even, "the new host has its share")
            assert "host3" in run(workers)

        with _recipe(new, "Drain a host") as (drain, workers, stop, start, undrain):
            run(drain)
            cluster.wait(lambda: cluster.owned("host2") == 0, "the host is drained")
            run(workers)
            run(stop)
            run(start)
            assert cluster.owned("host2") == 0
            run(undrain)
            cluster.wait(lambda: cluster.even() and cluster.owned("host2") > 0, "it has slots again")

        with _recipe(new, "Double the slots of a topic") as (show, alter, slots):
            assert "8" in run(show)
            run(alter)
            named = slots.replace("order.close", TOPIC)
            cluster.wait(
                lambda: sum(row["owner"] is not None for row in cluster.json(named)) == 16,
                "each new slot has an owner",
            )

        with _recipe(new, "Find out why tasks are late") as (slots, show, resume, workers, intents, *rest):
            undrain, doctor = rest
            with system.recorder.fault("other", note="paused"):
                run(f"toc topic pause {TOPIC}")
                cluster.wait(lambda: cluster.most_overdue() > 1000, "it is seen that tasks are late")
                run(slots)
                assert re.search(r"^paused +yes$", run(show), re.MULTILINE)
                run(resume)
            cluster.wait(lambda: cluster.most_overdue() < 1000, "nothing is late any more")
            with system.recorder.fault("other", note="all drained"):
                for host in cluster.hosts:
                    run(f"toc drain {host}")
                cluster.wait(lambda: cluster.most_overdue() > 1000, "it is seen that tasks are late")
                assert "no undrained worker" in run(slots)
                run(workers)
                assert "host1" in run(intents)
                run(undrain)
                cluster.wait(lambda: cluster.owned("host1") > 0, "there are owners again")
            cluster.wait(lambda: cluster.most_overdue() < 1000, "nothing is late any more")
            run(doctor, codes=(0, 1))
        for host in ("host2", "host3"):
            run(f"toc undrain {host}")
        cluster.wait(cluster.even, "all hosts have slots again")

        with _recipe(new, "When a host is lost") as lines:
            lost = cluster.hosts.pop("host3")
            with system.recorder.fault("kill", pids=lost.workers()):
                lost.kill()
            cluster.wait(cluster.even, "the others have its slots")
            for line in lines:
                run(line)
            cluster.wait(lambda: cluster.most_overdue() < 1000, "nothing is late any more")

        with _recipe(new, "When Redis is lost") as (rebuild,):
            with system.recorder.fault("redis_loss"):
                cluster.local.servers["redis1"].kill()
                shutil.rmtree(cluster.local.directory / "redis/0/appendonlydir")
                cluster.local.servers["redis1"].start()
                cluster.wait(lambda: _succeeds(cluster, rebuild), "all is indexed again")
            cluster.wait(lambda: cluster.most_overdue() < 1000, "nothing is late any more")

        with _recipe(new, "When MySQL is lost") as lines:
            with system.recorder.fault("store_down"):
                cluster.local.servers["mariadb"].kill()
                cluster.local.servers["mariadb"].start()
            for line in lines:
                run(line)
            cluster.wait(lambda: cluster.most_overdue() < 1000, "nothing is late any more")

        members = ("zookeeper1", "zookeeper2", "zookeeper3")
        with _recipe(new, "When a ZooKeeper is lost") as (doctor,), system.recorder.fault("zk_down"):
            cluster.local.servers[members[0]].kill()
            assert re.search(r"zookeeper .* it serves", run(doctor, codes=(0, 1)))
            assert cluster.even()
            cluster.local.servers[members[0]].start()

        with _recipe(new, "When all ZooKeepers are lost") as (workers,):
            with system.recorder.fault("zk_down"):
                for member in members:
                    cluster.local.servers[member].kill()
                seen = len(system.history())
                cluster.wait(lambda: len(system.history()) > seen + 200, "tasks run on")
                for member in members:
                    cluster.local.servers[member].start()
            cluster.wait(lambda: _succeeds(cluster, workers) and cluster.even(), "the hosts are back")
            run(workers)

        with _recipe(new, "Roll out a new version") as (schema, check, *steps):
            run(schema)
            run(check)
            for line in steps:
                run(line)
                cluster.wait(cluster.even, "every host has its slots")

    assert set(load.errors) <= {"StoreUnavailable", "SubmitUnknown"}, load.raised
    cluster.wait(lambda: not overdue(system, 10), f"all has ended: {left(system)}")
    verdict = system.verdict(settle=15)
    print(verdict)
    assert verdict.clean, f"{verdict}\n{system.logs()}"

    # after the verdict: the checker does not see what the command line does to dead tasks
    with _recipe(new, "Redrive dead tasks") as (listing, show, one, get, dry, rest_of_them):
        mine = {
            "order.close": "test.doomed",
            "connection refused": "fails as always",
            "JOB_ID": str(doomed[0]),
        }
        assert str(doomed[0]) in run(listing, words=mine)
        assert "fails as always" in run(show, words=mine)
        run(one, words=mine)
        assert str(doomed[0]) in run(get, words=mine)
        assert int(run(dry, words=mine).split()[-1]) >= len(doomed) - 1
        run(rest_of_them, words=mine)
    with _recipe(new, "Let gateways do it") as (jobs, show, of_job, stop):
        mine["3f9c0a11b2c4"] = job = re.findall(r"\b[0-9a-f]{12}\b", run(jobs))[0]
        assert job in run(show, words=mine)
        run(of_job, words=mine)
        run(stop, words=mine)
    assert not new, f"recipes that nobody has tried: {sorted(new)}"


@contextmanager
def _recipe(new: dict[str, list[str]], title: str) -> Iterator[list[str]]:
    """The lines of a recipe that nobody has tried yet."""
    print(title, flush=True)
    yield new.pop(title)


def _succeeds(cluster: OperatedCluster, line: str) -> bool:
    try:
        cluster.run(line, HERE)
    except AssertionError:  # it ends with 4 while a server is out of reach
        return False
    return True
