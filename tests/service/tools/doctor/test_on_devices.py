"""`inferpool doctor` on a host with accelerators of another kind than CUDA's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.simulated


@pytest.mark.slow
def test_doctor_tries_accelerators_of_any_kind_and_calls_them_by_it(tmp_path: Path):
    command = [sys.executable, "-m", "inferpool", "doctor", "echo", "--devices", "sim:0,2"]
    done = subprocess.run(
        [*command, "--port", "0", "--json"],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "0",
            "SIM_SHARED": str(tmp_path / "devices"),  # whose memory no other test uses
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stderr == ""
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    for device in ("sim:0", "sim:2"):
        assert found[device]["level"] == "ok"
        assert found[device]["message"].startswith("Simulated accelerator, ")
    assert "sim:1" not in found
    assert found["GPUs"]["message"].startswith("every GPU works")
    assert "CUDA_VISIBLE_DEVICES" not in found
