"""Fault 58: a step up or down the ladder (the database alone, with an index, with ZooKeeper) under load."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack

from fault.conftest import Build, Verdict
from fault.kit.load import Load
from harness import forks
from harness.history import Client

from benchmarks.local import RedisServer, ZooKeeper
from toc import TimeoutCenter
from toc.model.errors import ConfigError

STAY_SECONDS = 1.0


def test_up_and_down_the_ladder_nothing_is_lost_early_or_run_twice(
    build: Build, clean_redis: RedisServer, zookeeper: ZooKeeper, zookeeper_root: str, verdict: Verdict
) -> None:
    """Submits and cancels go on, also of an application that was started without an index and stays so."""
    line = verdict(58, "steps up and down the ladder under load")
    system = build(clean_redis.url, topic_prepare_timeout=5)
    alone = {"TOC_REDIS_URL": ""}
    cluster = {"TOC_ZOOKEEPER": zookeeper.url, "TOC_CLUSTER": zookeeper_root}
    steps: list[tuple[str, dict[str, str]]] = [
        ("", {}), ("off", alone), ("on", {}), ("", cluster), ("off", alone), ("on", cluster), ("off", alone)
    ]  # fmt: skip
    refused = 0

    def switch(to: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return forks.run(["index", to], env={**system.env, **env}, directory=system.directory)

    with ExitStack() as stack:
        stack.enter_context(Load(system.client, rate=40, ahead=(0.1, 4.0)))
        for number, (to, env) in enumerate(steps):
            if to:
                done = switch(to, cluster if steps[number - 1][1] is cluster else {})
                assert done.returncode == 0, done.stderr
                wrong = forks.run(
                    ["worker", "--app", "harness.app:center"],
                    env={**system.env, **({} if to == "off" else alone)},
                    directory=system.directory,
                )
                assert wrong.returncode == ConfigError.exit_code, wrong.stderr
                refused += f"run `toc index {'on' if to == 'off' else 'off'}`" in wrong.stderr
            daemon = system.start(f"host-{number}", processes=2, env=env)
            if number == 1:
                settings = system.settings.model_copy(update={"redis_url": None})
                client = Client(stack.enter_context(TimeoutCenter(settings)), system.recorder)
                stack.enter_context(Load(client, rate=20, ahead=(0.1, 4.0), first=2_000_000))
            time.sleep(STAY_SECONDS)
            if number < len(steps) - 1:
                against = switch("on" if env is alone else "off", env if env is cluster else {})
                assert f"alive on host-{number}: stop them" in against.stderr
                with system.recorder.fault("other", note="no worker is there"):
                    daemon.terminate()
                    daemon.await_end()
    line.prove(refused == 5, f"{len(steps) - 1} steps, {refused} daemons of the wrong rung refused")
    line.judge(system, within=10, but="X")  # an index that is off does not follow
