"""A real Prometheus with the rules of deploy/."""

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from benchmarks.private import PrivateServer

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"


class Prometheus(PrivateServer):
    """With the configuration of deploy/ and other targets; with ``hurry`` at intervals of a second."""

    name = "prometheus"

    def __init__(self, directory: Path, targets: list[str], *, hurry: bool = True) -> None:
        super().__init__(directory)
        self._targets = targets
        self._hurry = hurry

    def ask(self, path: str, **parameters: str) -> Any:
        """What its API answers."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}", timeout=60
        ) as answer:
            return json.load(answer)["data"]

    def values(self, query: str, label: str) -> dict[str, float]:
        """What a query finds, by a label."""
        found = self.ask("query", query=query)["result"]
        return {one["metric"][label]: float(one["value"][1]) for one in found}

    def _prepare(self) -> list[str | Path]:
        config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        if self._hurry:
            config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = self._targets
        (self.directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        for name in config["rule_files"]:
            shutil.copy(DEPLOY / name, self.directory)
        return [
            shutil.which("prometheus") or "",
            f"--config.file={self.directory}/prometheus.yml",
            f"--storage.tsdb.path={self.directory}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def _ready(self, _log_start: int) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=60):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False
