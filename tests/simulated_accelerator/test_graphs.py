"""Graphs of the simulated accelerator, and what spoils a capture."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.simulated

SPOILT = "previous error during capture"
_sizes = iter([1 << n for n in range(16, 32)])


@pytest.fixture(autouse=True)
def nothing_cached():
    """Give back the memory that earlier tests have left, which would serve for what is new here."""
    torch.accelerator.empty_host_cache()
    torch.accelerator.empty_cache()


def in_thread(call: Callable[[], object]) -> list[Exception]:
    """Call it in another thread; return what it raised."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def pin_anew() -> None:
    """Pin memory of a size that is not cached."""
    torch.empty(next(_sizes), dtype=torch.uint8, pin_memory=True)


def allocate_anew() -> None:
    """Allocate device memory of a size that is not cached."""
    torch.empty(next(_sizes), dtype=torch.uint8, device="sim")


def ask_an_event() -> None:
    """Ask whether a stream has come to some point."""
    event = torch.Event("sim")
    event.record(torch.sim.default_stream())
    event.query()


def synchronize() -> None:
    """Wait for all streams of a device."""
    torch.sim.synchronize()


def test_a_graph_computes_again_with_what_its_inputs_hold_now():
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    ).eval()
    there = copy.deepcopy(network).to("sim")
    with torch.inference_mode():
        held = torch.randn(3, 8, device="sim")
        graph = torch.sim.CUDAGraph()
        with torch.sim.graph(graph, pool=torch.sim.graph_pool_handle()):
            out = there(held)
        for _ in range(2):
            x = torch.randn(3, 8)
            held.copy_(x)
            graph.replay()
            assert torch.equal(out.cpu(), network(x))


def test_what_was_captured_uses_memory_of_its_own():
    x = torch.ones(1000, device="sim")
    graph = torch.sim.CUDAGraph()
    with torch.sim.graph(graph):
        y = (x + 1) * 2
    inside = torch.empty(1000, device="sim")
    inside.fill_(7)
    graph.replay()
    assert (inside.cpu() == 7).all()
    assert (y.cpu() == 4).all()


def test_a_call_that_waits_spoils_a_capture():
    x = torch.ones(4, device="sim")
    with (
        pytest.raises(torch.AcceleratorError, match=SPOILT),
        torch.sim.graph(torch.sim.CUDAGraph()),
    ):
        x.sum().item()
    assert x.sum().item() == 4


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_a_copy_from_memory_that_is_not_pinned_cannot_be_captured(mode: str):
    x, pageable = torch.ones(4, device="sim"), torch.ones(4)
    with (
        pytest.raises(torch.AcceleratorError),
        torch.sim.graph(torch.sim.CUDAGraph(), capture_error_mode=mode),
    ):
        x.copy_(pageable, non_blocking=True)
    x.copy_(pageable, non_blocking=True)


@pytest.mark.parametrize("call", [pin_anew, allocate_anew, ask_an_event, synchronize])
def test_in_the_global_mode_another_thread_spoils_a_capture(call):
    x, graph = torch.ones(4, device="sim"), torch.sim.CUDAGraph()
    raised: list[Exception] = []

    def capture() -> None:
        with torch.sim.graph(graph):
            x.add_(1)
            raised.extend(in_thread(call))

    with pytest.raises(torch.AcceleratorError, match=SPOILT):
        capture()
    assert "not permitted when stream is capturing" in str(raised[0])


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_in_other_modes_another_thread_may_do_so(mode: str):
    x, graph = torch.ones(4, device="sim"), torch.sim.CUDAGraph()
    with torch.sim.graph(graph, capture_error_mode=mode):
        y = x + 1
        assert in_thread(pin_anew) == in_thread(allocate_anew) == in_thread(ask_an_event) == []
    graph.replay()
    assert y.sum().item() == 8


@pytest.mark.parametrize(("mode", "is_spoilt"), [("thread_local", True), ("relaxed", False)])
def test_only_in_the_relaxed_mode_the_capturing_thread_itself_may_do_so(mode, is_spoilt):
    x, graph = torch.ones(4, device="sim"), torch.sim.CUDAGraph()

    def capture() -> None:
        with torch.sim.graph(graph, capture_error_mode=mode):
            pin_anew()
            x.add_(1)

    if is_spoilt:
        with pytest.raises(torch.AcceleratorError):
            capture()
    else:
        capture()


def test_a_capture_needs_a_stream_of_its_own():
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.sim.CUDAGraph().capture_begin()
