"""Transfers between simulated devices, ordered as NCCL orders them."""

import os
import sys
from pathlib import Path

import pytest

from inferpool.workers.host.forked import ForkedProcess
from inferpool.workers.host.local import start_forkserver

pytestmark = pytest.mark.simulated

START = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
rank, store, is_bound = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "bound"
here = torch.device("sim", rank)
torch.sim.set_device(here)
dist.init_process_group(
    "simccl", store=dist.FileStore(store, 2), rank=rank, world_size=2,
    device_id=here if is_bound else None,
)
"""
CALLS = """
x = torch.full((4,), float(rank + 1), device=here)
dist.all_reduce(x)
assert x.tolist() == [3.0] * 4, x
parts = torch.empty(4, device=here)
dist.all_gather_into_tensor(parts, torch.full((2,), float(rank), device=here))
assert parts.tolist() == [0.0, 0.0, 1.0, 1.0], parts
told = torch.full((2,), float(rank), device=here)
dist.broadcast(told, 1)
assert told.tolist() == [1.0, 1.0], told
part = torch.empty(2, device=here)
dist.reduce_scatter_tensor(part, torch.tensor([0.0, 1.0, 2.0, 3.0], device=here))
assert part.tolist() == [4.0 * rank, 4.0 * rank + 2], part
if rank == 0:
    dist.send(x * 2, 1)
else:
    found = torch.empty(4, device=here)
    dist.recv(found, 0)
    assert found.tolist() == [6.0] * 4, found
back = dist.new_group()
assert back.size() == 2
dist.barrier()
"""
LATE = """
x = torch.zeros(1000, device=here)
torch.sim.synchronize()
if rank == 0:
    with torch.sim.held():
        x.fill_(3)
        work = dist.isend(x, 1)
        assert not work.is_completed()
    torch.sim.synchronize()
else:
    work = dist.irecv(x, 0)
    early = torch.Stream(here)
    with early:
        before = x.cpu()  # nobody told this stream to wait
    work.wait()
    assert (x.cpu() == 3).all()
"""
CIRCLE = """
back = dist.new_group()
ways = [None, back] if rank == 0 else [back, None]
x, y = torch.full((8,), float(rank), device=here), torch.empty(8, device=here)
sent = dist.isend(x, 1 - rank, group=ways[0])
if sys.argv[4] == "here":
    sent.wait()  # our stream waits for a receiver, whose stream waits for us in the same way
else:
    with torch.Stream(here):
        sent.wait()
dist.recv(y, 1 - rank, group=ways[1])
arrived = torch.Event()
arrived.record()
until = time.monotonic() + (60 if sys.argv[4] == "aside" else 1)
while not arrived.query() and time.monotonic() < until:
    time.sleep(0.01)
print("arrived" if arrived.query() else "hangs", flush=True)
Path(f"{sys.argv[2]}.{rank}").touch()
while not Path(f"{sys.argv[2]}.{1 - rank}").exists() and time.monotonic() < until + 60:
    time.sleep(0.01)  # an end would disturb what the other one has under way
os._exit(0)  # what hangs would hold up the end
"""


def run_rank(code: str, output: Path, arguments: list[str]) -> None:
    """Run the code as a process of its own would. Runs in each rank."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = arguments
    exec(START + code, {"__name__": "__main__"})


def two_ranks(folder: Path, code: str, *arguments: str, limit_s: float = 150) -> list[str]:
    """Run the code in two processes; return what they wrote, if they end in time."""
    start_forkserver()  # with torch in it
    outputs = [folder / f"output.{rank}" for rank in range(2)]
    ranks = [
        ForkedProcess(
            target=run_rank,
            args=(code, output, [str(rank), str(folder / "store"), *arguments]),
            daemon=True,
        )
        for rank, output in enumerate(outputs)
    ]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(limit_s)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    written = [output.read_text() for output in outputs]
    assert [rank.exitcode for rank in ranks] == [0, 0], written
    return written


@pytest.mark.slow
@pytest.mark.parametrize("binding", ["bound", "free"])
def test_ranks_share_and_send_tensors(tmp_path: Path, binding: str):
    two_ranks(tmp_path, CALLS, binding)


@pytest.mark.slow
def test_a_transfer_waits_for_its_stream_and_the_host_does_not(tmp_path: Path):
    two_ranks(tmp_path, LATE, "free")


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "ending"), [("aside", "arrived"), ("here", "hangs")])
def test_a_stream_that_waits_for_its_send_hangs_in_a_circle(
    tmp_path: Path, stream: str, ending: str
):
    assert two_ranks(tmp_path, CIRCLE, "free", stream) == [f"{ending}\n"] * 2
