"""The log as JSON, whatever the processes of a service write and however they end."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from tests.e2e.running import faulty, running
from tests.fault_model import PRINTED


@pytest.mark.slow
def test_every_line_is_json_whoever_wrote_it_and_how(tmp_path: Path):
    once = tmp_path / "once"
    noisy = {"source": "tests.fault_model:NoisyModel", "options": {"once": once}}
    settings = faulty(batch_timeout_s=2, **noisy)
    # The test reads the service's stdout together with its stderr.
    with running(settings=settings, preexec_fn=lambda: os.dup2(2, 1)) as service:
        for do in ("ok", "kill", "hang", "segfault", "exit"):
            once.unlink(missing_ok=True)
            assert service.ask({"n": 1, "do": do}).status_code == (500 if do == "exit" else 200), do
        with socket.create_connection(service.address) as rude:
            rude.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            assert b" 400 " in rude.recv(4096)
        service.signal(signal.SIGTERM)
        assert service.wait() == 0
    for line in service.log:
        assert list(line)[:4] == ["time", "level", "logger", "message"], line
        assert re.fullmatch(r"[\d-]{10}T[\d:.]{12}Z", str(line["time"]))
    for logger, printed in PRINTED.items():
        assert set(printed) <= {line["message"] for line in service.log if line["logger"] == logger}
    lines = [line for line in service.log if str(line["message"]).startswith("from Python")]
    assert lines
    assert all(re.fullmatch(r"m/0#\d+", str(line.get("worker"))) for line in lines)
    assert any("from the warnings module" in str(line["message"]) for line in service.log)
    assert service.log[-1]["message"] == "stopped"
