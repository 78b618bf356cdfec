"""A real Prometheus with the configuration in docker/, for a service of a test."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.running import ROOT, until
from tests.ports import free_port

FOLDER = ROOT / "docker" / "prometheus"


class Prometheus:
    """A running Prometheus, asked over HTTP."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now; fail if Prometheus refuses the expression."""
        answer = self.client.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Return each rule with the result of its last evaluation."""
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        alerts = self.client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


@contextlib.contextmanager
def prometheus(folder: Path, *, target: str, key: Path) -> Iterator[Prometheus]:
    """Run Prometheus; it scrapes the service twice a second, and its alerts fire without delay."""
    shutil.copy(FOLDER / "prometheus.yml", folder)
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    ours = config["scrape_configs"][0]
    del ours["dns_sd_configs"]
    ours["static_configs"] = [{"targets": [target]}]
    ours["authorization"]["credentials_file"] = str(key)
    config["scrape_configs"] = [ours]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    rules = (FOLDER / "rules.yml").read_text()
    (folder / "rules.yml").write_text(re.sub(r"\n +for: \S+", "", rules))
    port = free_port()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    server = Prometheus(f"http://127.0.0.1:{port}")

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(httpx.TransportError):
            return server.client.get("/-/ready").status_code == 200
        return False

    try:
        until(is_ready)
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait(10)
