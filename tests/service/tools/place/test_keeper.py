import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from inferpool.service.tools.place.keeper import Keeper, digest
from tests.e2e.running import left_over, until


def order(*arguments: str, **environ: str) -> bytes:
    return json.dumps({"arguments": arguments, "environ": environ}).encode()


@pytest.fixture
def keeper():
    one = Keeper()
    yield one
    pid = looked(one)["pid"]
    if pid is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(str(pid))).kill()
        until(lambda: looked(one)["pid"] is None)


def looked(keeper: Keeper) -> dict[str, object]:
    told = json.loads(keeper.look())
    assert isinstance(told, dict)
    return told


def test_a_keeper_tells_how_its_agent_ended(keeper: Keeper):
    assert looked(keeper)["order"] == ""
    keeper.start(order("version", "--nonsense"))
    until(lambda: looked(keeper)["exit_status"] is not None)
    told = looked(keeper)
    assert (told["exit_status"], told["pid"]) == (2, None)
    assert told["order"] == digest(order("version", "--nonsense"))


def test_an_agent_runs_once_with_its_variables_and_none_that_ray_adds_and_ends_by_sigterm(
    keeper: Keeper, monkeypatch
):
    for name, value in {"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "7", "KEPT": "1"}.items():
        monkeypatch.setenv(name, value)
    key = {"INFERPOOL_CLUSTER_KEYS": "a-key-of-the-cluster"}
    keeper.start(order("serve", "echo", "--port", "0", **key))
    pid = looked(keeper)["pid"]
    keeper.start(order("version"))
    assert looked(keeper)["pid"] == pid
    agent = psutil.Process(int(str(pid)))
    until(lambda: "KEPT" in agent.environ())  # there are none for a moment while it begins
    environ = agent.environ()
    assert key.items() <= environ.items()
    assert not {"OMP_NUM_THREADS", "RAY_JOB_ID"} & environ.keys()
    keeper.stop()
    assert looked(keeper)["is_stopping"] is True
    until(lambda: looked(keeper)["pid"] is None)


def test_an_agent_ends_with_its_keeper():
    code = (
        "import json, time\n"
        "from inferpool.service.tools.place.keeper import Keeper\n"
        "one = Keeper()\n"
        f"one.start({order('serve', 'echo', '--port', '0')!r})\n"
        "print(json.loads(one.look())['pid'], json.loads(one.look())['niceness'], flush=True)\n"
        "time.sleep(3600)\n"
    )
    command = ["nice", "-n", "3", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, niceness = map(int, process.stdout.readline().split())
        assert niceness in ((0, 3) if os.geteuid() == 0 else (3,))  # containers may forbid it
        agent = psutil.Process(pid)
        process.send_signal(signal.SIGKILL)
    assert left_over([agent], 120.0) == []
