"""Networks that are replayed as graphs: by a fake capture, and on the simulated accelerator."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from inferpool.models.accelerator.device import current_stream, use_stream
from inferpool.models.accelerator.graph_pool import GraphPool
from inferpool.models.errors import ModelError
from inferpool.models.speed.choose import choose
from inferpool.models.speed.graphs import Graphed
from inferpool.models.speed.presets import Recast
from tests.models.speed.pace import options, quietly, small

SIZES = (8, 4, 2, 1)


class Captures:
    """Fake capture: replays compute into the same memory, and are counted."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def __call__(self, call):
        self.num_captured += 1
        outputs = call()

        def replay() -> None:
            self.num_replayed += 1
            for held, new in zip(outputs.values(), call().values(), strict=True):
                held.copy_(new)

        return outputs, replay


class Two(nn.Module):
    def forward(self, x, y):
        return {"sum": x.flatten(1).sum(1) + y, "x": x * 2}


def captured(network, *shape, sizes=SIZES, capture=None, device="cpu"):
    """Return a network with graphs for some sizes of one shape."""
    graphed = Graphed(network, capture).eval()
    with torch.inference_mode(), graphed.capturing():
        for size in sizes:
            graphed(torch.randn(size, *shape, device=device))
    return graphed


def test_batches_are_computed_by_the_next_larger_graph():
    captures = Captures()
    graphed = Graphed(Two(), captures)
    with graphed.capturing():
        for size in SIZES:
            graphed(torch.randn(size, 2, 3), torch.randn(size))
    kept = []
    for size in (3, 4, 1, 5, 8, 4, 3):
        x, y = torch.randn(size, 2, 3), torch.randn(size)
        found = graphed(x, y)
        assert torch.equal(found["sum"], x.flatten(1).sum(1) + y)
        kept.append((x, found["x"]))
    assert captures.num_captured == len(SIZES)
    assert captures.num_replayed == len(SIZES) + len(kept)
    for x, found in kept:  # none is written over by a later replay
        assert torch.equal(found, x * 2)


def test_shapes_seen_in_service_are_computed_without_a_graph():
    captures = Captures()
    graphed = Graphed(Two(), captures)
    with graphed.capturing():
        graphed(torch.randn(4, 2), torch.randn(4))
    for x in (torch.randn(5, 2), torch.randn(4, 3), torch.randn(4, 2).double()):
        assert torch.equal(graphed(x, torch.zeros(len(x)))["x"], x * 2)
    assert (captures.num_captured, captures.num_replayed) == (1, 1)


def test_graphs_are_bounded_in_number():
    captures = Captures()
    graphed = Graphed(Two(), captures)
    with graphed.capturing():
        for width in range(1, 41):
            x = torch.randn(2, width)
            assert torch.equal(graphed(x, torch.zeros(2))["x"], x * 2)
    assert captures.num_captured == graphed.num_graphs == 32


def test_graphs_keep_the_layout_that_the_network_prefers_whatever_batches_have():
    seen = []

    class Look(nn.Module):
        memory_format = torch.channels_last

        def forward(self, x):
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return {"y": x + 1}

    captures = Captures()
    graphed = captured(Look(), 4, 5, 5, sizes=(3,), capture=captures)
    x = torch.randn(3, 4, 5, 5)
    with torch.inference_mode():
        for each in (x, x.to(memory_format=torch.channels_last)):
            assert torch.equal(graphed(each)["y"], x + 1)
    assert captures.num_captured == 1
    assert set(seen) == {True}


def test_graphs_hold_float32_inputs_in_the_dtype_of_the_network():
    seen = []

    class Look(nn.Module):
        def forward(self, x, y):
            seen.append((x.dtype, y.dtype))
            return {"sum": x + y}

    captures = Captures()
    graphed = Graphed(Recast(Look(), torch.bfloat16), captures)
    assert graphed.input_dtype == torch.bfloat16
    x, y = torch.randn(4, 3), torch.arange(12).reshape(4, 3)
    with graphed.capturing():
        want = graphed(x, y)["sum"]
    for each in (x, x.bfloat16()):  # a batch may come in either dtype
        assert torch.equal(graphed(each, y)["sum"], want)
    assert (captures.num_captured, captures.num_replayed) == (1, 3)
    assert set(seen) == {(torch.bfloat16, torch.int64)}


@pytest.mark.parametrize("preset", ["graphed_bf16", "tf32"])
def test_presets_for_gpus_are_refused_where_there_is_none(preset):
    with pytest.raises(ModelError, match=f'speed = "{preset}" is for GPUs'):
        choose(small(), options(preset), quietly)


def test_a_network_whose_outputs_are_no_batch_is_refused():
    class Mean(nn.Module):
        def forward(self, x):
            return {"mean": x.mean()}

    with pytest.raises(ValueError, match="does not have the batch first"):
        captured(Mean(), 3, capture=Captures())


# On the simulated accelerator


class Layers(nn.Module):
    """A network on the device, which counts its own calls."""

    def __init__(self, before=lambda x: None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5))
        self.before = before
        self.num_calls = 0
        self.eval().requires_grad_(False)

    def forward(self, x):
        self.num_calls += 1
        self.before(x)
        return self.layers(x)


def check(graphed, x):
    """Compare outputs for a batch with those on the CPU, which sums otherwise in other sizes."""
    with torch.inference_mode():
        torch.testing.assert_close(graphed(x.to("sim:0")).cpu(), Layers()(x))


@pytest.fixture
def sim():
    torch.sim.set_device(0)
    torch.zeros(1, device="sim:0")
    before = current_stream()
    yield torch.device("sim:0")
    assert before is not None
    use_stream(before)


@pytest.mark.simulated
def test_graphs_answer_as_the_network_does_at_all_sizes(sim):
    network = Layers().to(sim)
    graphed = captured(network, 6, device=sim)
    num_calls = network.num_calls
    with torch.inference_mode():
        for size in range(1, 9):
            check(graphed, torch.randn(size, 6))
    assert network.num_calls == num_calls  # all were replayed


@pytest.mark.simulated
def test_another_thread_may_pin_memory_during_a_capture(sim):
    held = []  # so that none is at hand that was pinned already

    def pin():
        held.append(torch.empty(4096, dtype=torch.uint8).pin_memory())

    with ThreadPoolExecutor(1) as other:
        network = Layers(before=lambda x: other.submit(pin).result()).to(sim)
        graphed = captured(network, 6, device=sim)
    check(graphed, torch.randn(3, 6))


@pytest.mark.simulated
def test_the_device_is_well_after_a_capture_that_failed(sim):
    before = current_stream()
    network = Layers(before=lambda x: x.sum().item()).to(sim)  # it waits for the device
    gc.disable()  # the memory is returned without it
    try:
        taken = torch.sim.memory_allocated(sim)
        with pytest.raises(torch.AcceleratorError, match="operation not permitted when") as caught:
            captured(network, 6, device=sim)
        del caught
        assert torch.sim.memory_allocated(sim) == taken
    finally:
        gc.enable()
    assert current_stream() == before
    torch.sim.synchronize()
    graphed = captured(Layers().to(sim), 6, device=sim)
    check(graphed, torch.randn(2, 6))


@pytest.mark.simulated
def test_a_replay_on_another_stream_waits_for_the_last_one(sim):
    graphed = captured(Layers().to(sim), 6, device=sim)
    first, second, unrelated = (torch.sim.Stream(device=sim) for _ in range(3))
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    on_device = [x.to(sim), y.to(sim)]
    torch.sim.synchronize()
    with torch.inference_mode():
        use_stream(first)
        with torch.sim.held(first):
            found_x = graphed(on_device[0])
            use_stream(second)
            found_y = graphed(on_device[1])
            use_stream(unrelated)
            Layers().to(sim)(on_device[1])
            unrelated.synchronize()  # by then the other would be done, too
            assert not second.query()
        torch.sim.synchronize()
        torch.testing.assert_close(found_x.cpu(), Layers()(x))
        torch.testing.assert_close(found_y.cpu(), Layers()(y))


@pytest.mark.simulated
def test_graphs_share_their_memory(sim):
    class Wide(nn.Module):
        def forward(self, x):
            return (x.repeat(1, 1000) * 2).relu().sum(1, keepdim=True)

    def taken(sizes):
        torch.sim.empty_cache()
        before = torch.sim.memory_reserved(sim)
        graphed = captured(Wide(), 64, sizes=sizes, device=sim)
        torch.sim.empty_cache()
        assert graphed.num_graphs == len(sizes)
        return torch.sim.memory_reserved(sim) - before

    largest = taken([32])
    assert largest > 32 * 64 * 1000 * 4
    # This allocator, unlike CUDA's, splits no blocks: much smaller batches would get their own.
    assert taken([32, 31, 30, 29]) < 1.1 * largest


@pytest.mark.simulated
def test_the_allocator_hears_of_a_capture_that_failed(sim, monkeypatch):
    told = []
    for name in ("endAllocateToPool", "releasePool"):
        tell = lambda *words, name=name: told.append((name, *words))  # noqa: E731
        monkeypatch.setattr(torch._C, f"_sim_{name}", tell, raising=False)

    def fail(pool):
        with pool.captured():
            raise ValueError("the network fails")

    pool = GraphPool()
    with pytest.raises(ValueError, match="the network fails"):
        fail(pool)
    assert told == [("endAllocateToPool", 0, pool._pool), ("releasePool", 0, pool._pool)]
