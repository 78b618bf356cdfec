"""Networks that are split over simulated devices answer as whole ones on the CPU.

Ranks with a device each transfer as NCCL orders it; ranks that share one go by way of the host.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from inferpool.models.spec import RankPart, SplitReport
from inferpool.models.split.packing import pack
from inferpool.models.split.pipeline import Pipeline
from tests.busy_stages import BUSY_S, BusyStage, busy_pair, rows_for
from tests.models.split import networks
from tests.models.split.rank_processes import RaisedError, RankProcesses
from tests.models.split.test_pipeline import assert_equal
from tests.models.split.test_tensor import whole
from tests.simulated_accelerator.fake_nvml import nvmlDeviceGetComputeRunningProcesses, nvmlInit

pytestmark = pytest.mark.simulated

APART, SHARED = ("sim:0", "sim:1"), ("sim:0", "sim:0")


@pytest.fixture(scope="module", params=[APART, SHARED, ("sim:1", "sim:3", "sim:0")])
def ranks(request):
    with RankProcesses(len(request.param), request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=[APART, SHARED])
def tensor_pair(request):
    with RankProcesses(2, request.param, split="tensor") as pair:
        yield pair


def bound_devices(state):
    """Return the devices that the rank's groups know as its own."""
    groups = [dist.group.WORLD, *state.group._ways]
    return [str(group.bound_device_id) for group in groups if group is not None]


@pytest.mark.slow
def test_each_rank_tells_its_groups_its_device(ranks):
    # gloo's tensors are on the host.
    wanted = ["None"] * 2 if ranks.devices == SHARED else ranks.devices
    found = ranks.run(bound_devices)
    assert [{*each} for each in found] == [{device} for device in wanted]
    assert all(len(each) > 1 for each in found) == (ranks.devices != SHARED)


@pytest.mark.parametrize(
    ("build", "shape"),
    [(networks.mlp, (32,)), (networks.residuals, (3, 40, 40)), (networks.encoder, (5, 32))],
)
def test_a_pipeline_answers_as_the_whole_network(ranks, build, shape):
    network = build().eval()
    with ranks.loaded("pipeline", build, example=[torch.randn(2, *shape)]) as model:
        for num_rows in (1, 8, 8, 8, 8, 8, 8, 8, 3):
            x = torch.randn(num_rows, *shape)
            with torch.inference_mode():
                assert_equal(model(x), network(x))


def pid(state):
    return os.getpid()


def test_no_rank_takes_memory_of_the_device_of_another(ranks):
    pids = ranks.run(pid)
    with ranks.loaded("pipeline", networks.mlp, example=[torch.randn(2, 32)]) as model:
        for _ in range(5):
            model(torch.randn(4, 32))
    nvmlInit()
    for index in range(4):
        wanted = {pids[rank] for rank, name in enumerate(ranks.devices) if name == f"sim:{index}"}
        users = {each.pid for each in nvmlDeviceGetComputeRunningProcesses(index)}
        assert users & {*pids} == wanted


def send_rows(state):
    state.group.send(1, "rows", [torch.ones(1000, device=state.group.device)])


def receive_without_memory(state):
    torch.sim.out_of_memory_after(0)
    state.group.receive(0)


def test_a_rank_without_memory_for_what_it_is_sent_says_so_at_once():
    with RankProcesses(2, APART) as pair:
        pair.order(0, send_rows)
        pair.order(1, receive_without_memory)
        wanted = "OutOfStepError: rank 1 has no memory for what rank 0 sends: .* out of memory"
        with pytest.raises(RaisedError, match=wanted):
            pair.result_of(1)


def test_an_input_that_a_stage_refuses_fails_alone(ranks):
    good = torch.ones(4, 2)
    points = ["1", "2"][: ranks.size - 1]
    with ranks.loaded("pipeline", networks.refusing, split_points=points) as model:
        expected = model(good)
        with pytest.raises(RaisedError, match="RankError: rank 1: ValueError: 500 is too much"):
            model(torch.tensor([[1.0, 1], [1, 500], [1, 1], [1, 1]]))
        assert torch.equal(model(good), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("build", [networks.Encoder, networks.Blocks])
def test_a_tensor_parallel_network_answers_as_the_whole_one(tensor_pair, build, tmp_path):
    network, path = whole(build, tmp_path)
    example = networks.INPUTS[build]()
    with tensor_pair.loaded("tensor", build, path, example) as model, torch.inference_mode():
        for args in (networks.INPUTS[build](), networks.INPUTS[build]()[:1]):
            got, expected = model(*args), network(*args)
            assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def measured_s(state):
    """Return what the lead has noted of batches of one row, which go in one piece."""
    sizes = state.model._runtime.split_network._alone._sizes
    return [seconds for size in sizes.values() for seconds in size.row_s.values()]


def test_a_pipeline_measures_the_work_of_all_stages(ranks):
    if ranks.size != 2:
        pytest.skip("for two stages")
    loaded = ranks.loaded("pipeline", busy_pair, example=[torch.zeros(1, 1)], split_points=["1"])
    with loaded as model:
        got = model(rows_for("busy", torch.tensor([5.0])))
        assert torch.equal(got, rows_for("busy", torch.tensor([7.0])))
        ranks.order(0, measured_s)
        (seconds,) = ranks.result_of(0)
    assert seconds >= 0.99 * 2 * BUSY_S


class LastRank:
    """A rank of two that is sent one piece, and notes if the device has made what it sends on."""

    rank, size = 1, 2

    def __init__(self, rows):
        self.device = rows.device
        self._rows = rows
        self.was_done = []

    def receive(self, source, timeout_s=None):
        packed, tensors = pack([self._rows], self.device)
        return ["values", packed, 0.0, 0.0], tensors

    def send(self, to, message, tensors=()):
        self.was_done.append(torch.sim.current_stream().query())


def test_a_stage_sends_on_what_its_device_has_computed():
    ranks: Any = LastRank(rows_for("busy", torch.tensor([5.0])).to("sim:0"))
    steps: Any = SimpleNamespace(network=nn.Identity(), arguments=["input"])
    pipeline = Pipeline(ranks, BusyStage(1), steps, RankPart(1, 0, ""), SplitReport())
    pipeline.serve_next(1.0)
    assert ranks.was_done == [True]
