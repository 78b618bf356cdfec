"""Numbers that the simulated accelerator computes: those of the CPU."""

import copy
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torchvision
from torch.nn import functional

pytestmark = pytest.mark.simulated

LEAN = """
import sys, torch
from torch import nn
network = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.GroupNorm(2, 8), nn.Hardswish(),
    nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(4), nn.Flatten(2), nn.LayerNorm(16),
    nn.TransformerEncoderLayer(16, 2, batch_first=True), nn.GELU(), nn.Linear(16, 4),
).eval().to("sim")
with torch.inference_mode():
    y = network(torch.randn(1, 3, 32, 32).to("sim"))
    torch.where(y > 0, y, 0.0).roll(1, 0).softmax(-1).cpu()
assert "torch._dynamo" not in sys.modules
"""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a stream has
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def assert_same(network: torch.nn.Module, x: torch.Tensor) -> None:
    """Compare with the CPU, bit by bit."""
    with torch.inference_mode():
        expected = network.eval()(x)
        found = copy.deepcopy(network).to("sim:1")(x.to("sim:1"))
        assert found.shape == expected.shape
        assert found.stride() == expected.stride()
        assert torch.equal(found.cpu(), expected)


def test_resnet18_computes_the_numbers_of_the_cpu():
    network, x = torchvision.models.resnet18(), torch.randn(2, 3, 64, 64)
    assert_same(network, x)
    last = torch.channels_last
    assert_same(network.to(memory_format=last), x.to(memory_format=last))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (torch.nn.Conv1d(4, 6, 3, padding="same"), (2, 4, 9)),
        (torch.nn.Conv2d(4, 8, 3, stride=2, groups=2, dilation=2), (2, 4, 15, 13)),
        (torch.nn.Conv2d(4, 8, 3), (4, 9, 9)),
        (torch.nn.Conv3d(2, 3, 2), (1, 2, 5, 5, 5)),
        (torch.nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (2, 4, 5, 5)),
        (torch.nn.BatchNorm1d(4), (3, 4)),
        (torch.nn.ReLU6(), (3, 4)),
        (torch.nn.BatchNorm2d(4), (3, 4, 5, 5)),
    ],
)
def test_layers_have_the_shapes_of_the_cpu(layer, shape):
    assert_same(layer, torch.randn(shape))


def test_a_wrong_shape_is_an_error_of_the_call():
    x = torch.randn(1, 4, 5, 5, device="sim")
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 4"):
        torch.nn.Conv2d(3, 8, 3).to("sim")(x)
    with pytest.raises(RuntimeError, match="must match the size"):
        x + torch.ones(3, device="sim")
    assert (x + 1).isfinite().all()


def test_only_indices_may_be_on_the_host():
    x, i = torch.zeros(4, device="sim"), torch.tensor([1, 2])
    x[i] = 1.0
    x[i] = torch.tensor(2.0)
    assert x[i].sum().item() == 4
    with pytest.raises(RuntimeError, match="on the same device"):
        x[i] = torch.ones(2)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.zeros(4)[i.to("sim")] = 1.0


def test_an_operator_that_cpus_lack_is_an_error_of_the_call():
    with pytest.raises(NotImplementedError, match="_thnn_fused_lstm_cell"):
        torch.nn.LSTM(4, 4).to("sim")(torch.ones(2, 4, device="sim"))


def test_autocast_chooses_types_as_on_cuda():
    linear, x = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = linear(x)
        assert y.dtype == torch.bfloat16
        assert y.softmax(1).dtype == torch.float32
        assert torch.cat([x, y]).dtype == torch.float32
        assert functional.relu(y).dtype == torch.bfloat16
        assert (
            functional.conv2d(
                torch.ones(1, 1, 4, 4, device="sim"), torch.ones(1, 1, 3, 3, device="sim")
            ).dtype
            == torch.bfloat16
        )
    assert linear(x).dtype == torch.float32


def test_operators_whose_shapes_depend_on_numbers_wait_for_them():
    x = torch.tensor([0.0, 1, 2, 0], device="sim")
    assert x.nonzero().flatten().tolist() == [1, 2]
    assert x[x > 0].tolist() == [1, 2]
    assert torch.unique(x).tolist() == [0, 1, 2]
    assert x.topk(2).values.tolist() == [2, 1]
    x[1] = 9
    assert x.max().item() == 9
    assert x.sort().values.tolist() == [0, 0, 2, 9]


def test_operators_of_other_kinds_work(tmp_path: Path):
    x = torch.tensor([0.0, 1, 2, 0], device="sim")
    assert torch.stack(x.split(2)).shape == (2, 2)
    assert torch.equal(torch.cat([x, x]).view(2, 4).sum(0).cpu(), x.cpu() * 2)
    image = torch.rand(1, 3, 8, 8)
    smaller = {"size": (4, 4), "mode": "bilinear", "antialias": True}
    assert torch.equal(
        functional.interpolate(image.to("sim"), **smaller).cpu(),
        functional.interpolate(image, **smaller),
    )
    with torch.device("sim"):
        assert torch.arange(3).device.type == "sim"
    assert "sim:0" in repr(x)
    torch.save(x, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device.type == "sim"
    assert torch.load(tmp_path / "x.pt", map_location="cpu").tolist() == x.tolist()


def test_gradients_are_those_of_the_cpu():
    linear, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    there = copy.deepcopy(linear).to("sim")
    linear(x).sum().backward()
    there(x.to("sim")).sum().backward()
    assert torch.equal(linear.weight.grad, there.weight.grad.cpu())


@pytest.mark.slow
def test_a_forward_does_not_import_a_compiler():
    subprocess.run([sys.executable, "-c", LEAN], check=True)


def test_threads_with_streams_of_their_own_do_not_disturb_each_other():
    network = torchvision.models.resnet18().eval()
    xs = [torch.randn(1, 3, 32, 32) for _ in range(4)]
    with torch.inference_mode():
        expected = [network(x) for x in xs]
        copies = [copy.deepcopy(network).to(f"sim:{number}") for number in range(2)]
    for number in range(2):
        torch.sim.synchronize(number)
    wrong: list[tuple[int, int]] = []

    @torch.inference_mode()
    def work(thread: int) -> None:
        device = f"sim:{thread % 2}"
        torch.sim.set_device(device)
        stream = torch.Stream(device)
        for step in range(12):
            number = (step + thread) % 4
            with stream:
                x = xs[number].pin_memory().to(device, non_blocking=True)
                out = copies[thread % 2](x).to("cpu", non_blocking=True)
            stream.synchronize()
            if not torch.equal(out, expected[number]):
                wrong.append((thread, step))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
