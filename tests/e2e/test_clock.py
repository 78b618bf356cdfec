"""A wall clock that jumps a day forth and back every half second, in every process."""

import asyncio
from pathlib import Path

import httpx

from tests.e2e.load import after, ask_until
from tests.e2e.running import ROOT, running

JUMPING = """
import os, pathlib, time
pathlib.Path(os.environ["JUMPS"], str(os.getpid())).touch()
_time, _monotonic = time.time, time.monotonic

def jumping():
    return _time() + 86_400 * (int(_monotonic() * 2) % 3 - 1)

time.time = jumping
time.time_ns = lambda: int(jumping() * 1e9)
"""


def test_wall_clock_that_jumps_makes_nothing_late_and_nothing_early(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    jumps = tmp_path / "jumps"
    jumps.mkdir()
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JUMPS": str(jumps)}
    config, gate = tmp_path / "inferpool.toml", tmp_path / "gate"
    config.write_text(
        f"""
        [models.m]
        source = "tests.fault_model:FaultModel"
        replicas = 2
        options = {{ gate = "{gate}" }}
        """
    )
    with running("--config", str(config), env=env) as service:
        is_late = after(1.6)
        tally = asyncio.run(
            ask_until(service.url, lambda tally: tally.right > 20 and is_late(tally))
        )
        assert (tally.wrong, tally.unanswered) == ([], [])
        for _ in range(3):
            gate.touch()
            late = httpx.post(
                f"{service.url}/predict",
                json={"instances": [{"n": 1, "do": "wait"}]},
                headers={"X-Timeout-Ms": "100"},
                timeout=60,
            )
            gate.unlink()
            total_ms = float(late.headers["server-timing"].rpartition("total;dur=")[2])
            assert late.status_code == 504
            assert 99 <= total_ms < 5000  # a jump is more, whichever way
        assert httpx.get(f"{service.url}/health/ready").status_code == 200
        assert 'worker_restarts_total{model="m",reason="hang"} 0.0' in (
            httpx.get(f"{service.url}/metrics").text
        )
        # The forkserver is one of them, and workers are forked from it.
        patched = {int(path.name) for path in jumps.iterdir()}
        assert len(patched & {process.pid for process in service.family()}) >= 2
