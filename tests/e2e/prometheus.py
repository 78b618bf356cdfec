"""A real Prometheus, with the repository's configuration pointed at a service of the tests."""

import contextlib
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.running import ROOT

FOLDER = ROOT / "docker" / "prometheus"
_START_S = 60.0


class Prometheus:
    """One that runs, asked over HTTP."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=30)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression now; an error of Prometheus' is an AssertionError."""
        answer = self.client.post("/api/v1/query", data={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return list(answer["data"]["result"])

    def rules(self) -> list[dict[str, Any]]:
        """Each rule as it was evaluated last."""
        groups = self.client.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = self.client.get("/api/v1/alerts").json()["data"]["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


@contextlib.contextmanager
def prometheus(folder: Path, *, target: str, key: Path) -> Iterator[Prometheus]:
    """Run one that asks a service every half second, and whose alerts wait for nothing."""
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
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
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
    try:
        _wait_until_ready(server, process, folder)
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait(10)


def _wait_until_ready(server: Prometheus, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    until = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if server.client.get("/-/ready").status_code == 200:
                return
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < until, "Prometheus is not ready in time"
        time.sleep(0.05)
