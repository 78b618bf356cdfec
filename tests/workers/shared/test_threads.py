import os
import subprocess
import sys

import pytest

from tests.e2e.running import ROOT

_ON_ONE_CORE = """
import os, sys, time
if sys.argv[1] == "ours":
    from inferpool.workers.shared.threads import spin_briefly
    spin_briefly()
import torch
torch.set_num_threads(2)
x = torch.randn(64, 4096)
x + x  # starts the second thread
core = min(os.sched_getaffinity(0))
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {core})
began = time.perf_counter()
for _ in range(100):
    x + x
print(time.perf_counter() - began)
"""


@pytest.mark.alone
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores, of which it uses one",
)
@pytest.mark.slow
def test_threads_that_share_a_core_do_not_wait_for_each_other_in_vain():
    def seconds(whose: str) -> float:
        command = [sys.executable, "-c", _ON_ONE_CORE, whose]
        env = {name: text for name, text in os.environ.items() if name != "GOMP_SPINCOUNT"}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        return float(done.stdout)

    assert seconds("ours") < 0.5 * seconds("default")
