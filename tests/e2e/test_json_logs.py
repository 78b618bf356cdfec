"""The log as JSON, through a life in which everything is said that a process may say."""

import os
import re
import signal
import socket
from pathlib import Path

import httpx

from tests.e2e.running import running
from tests.noisy_model import SAID


def test_every_line_of_a_life_is_json_whoever_wrote_it_and_how(tmp_path: Path):
    config = tmp_path / "inferpool.toml"
    config.write_text(
        f"""
        [models.m]
        source = "tests.noisy_model:NoisyModel"
        replicas = 1
        batch_timeout_s = 0.7
        options = {{ once = "{tmp_path / "once"}" }}
        """
    )

    def ask(do: str) -> int:
        (tmp_path / "once").unlink(missing_ok=True)
        body = {"instances": [{"n": 1, "do": do}]}
        return httpx.post(f"{service.url}/predict", json=body, timeout=30).status_code

    # Both of its outputs are read here.
    with running("--config", str(config), preexec_fn=lambda: os.dup2(2, 1)) as service:
        for do in ("ok", "kill", "hang", "segfault", "exit"):
            assert ask(do) == (500 if do == "exit" else 200), do
        address = httpx.URL(service.url)
        with socket.create_connection((address.host, address.port or 0)) as rude:
            rude.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert b" 400 " in rude.recv(4096)
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
        service.close()
    for line in service.log:
        assert list(line)[:4] == ["time", "level", "logger", "message"], line
        assert re.fullmatch(r"[\d-]{10}T[\d:.]{12}Z", str(line["time"]))
    for logger, said in SAID.items():
        assert set(said) <= {line["message"] for line in service.log if line["logger"] == logger}
    printed = [line for line in service.log if str(line["message"]).startswith("from Python")]
    assert printed
    assert all(re.fullmatch(r"m/0#\d+", str(line.get("worker"))) for line in printed)
    assert any("from the warnings module" in str(line["message"]) for line in service.log)
    assert [line["message"] for line in service.log][-1] == "stopped"
