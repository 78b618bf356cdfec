"""Convolutions that add and rectify in one kernel: which of them, and with the same results."""

import pytest
import torch
from torch import nn

from inferpool.models.speed.fused import fused
from tests.simulated_accelerator.convolutions import fused_convolution


class Residual(nn.Module):
    """Has convolutions with a rectifier, with a sum and a rectifier, and with others between."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.unbiased = nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False)
        self.last = nn.Conv2d(8, 8, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.first(x))
        y = self.relu(self.unbiased(x))
        y = self.last(y)
        y += x
        return self.relu(y).flatten(1)


class Between(nn.Module):
    """Uses a convolution's output once more, after it was changed in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        z = y * 2
        y.relu_()
        return y + z


class Spread(nn.Module):
    """Adds a number for each channel: cuDNN adds pictures."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.rows = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x):
        return (self.conv(x) + self.rows).relu()


class Outside(nn.Module):
    """Computes something outside of torch: a record has it as a tensor, for these inputs alone."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(x).relu() + torch.from_numpy((x * 2).numpy() + 1)


class Made(Outside):
    """Makes a tensor in each call, which only the record would keep."""

    def forward(self, x):
        return self.conv(x - torch.tensor([0.4, 0.5, 0.6])[:, None, None]).relu()


class Keeping(Outside):
    """Keeps a tensor for each batch size."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x):
        y = self.conv(x).relu()
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.arange(1.0, 1 + len(x)).view(-1, 1, 1, 1)
        return y * self.kept[len(x)]


class Stretched(Outside):
    """Takes a number from its input, outside of torch."""

    def forward(self, x):
        return self.conv(x).relu() * float(x.exp().numpy().max())


class Standardising(Outside):
    """Makes NaN of a picture of one colour, before or after the rectifier."""

    def __init__(self, *, is_before):
        super().__init__()
        self.is_before = is_before

    def forward(self, x):
        if self.is_before:
            return self.conv(x / x.std((1, 2, 3), keepdim=True)).relu()
        y = self.conv(x).relu()
        return y / x.std((1, 2, 3), keepdim=True)


class Halving(Outside):
    """Computes in fp16, which overflows, between float32."""

    def forward(self, x):
        return self.conv((x.half() * 2).float()).relu()


def line(*layers):
    return nn.Sequential(*layers, nn.ReLU())


def with_kernel(network, x):
    """Fuse a network for an input on the CPU, which has no kernel of its own for it."""
    return fused(network, [x], fused_convolution)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3])
def test_each_rectifier_after_a_convolution_and_a_sum_is_fused(dtype, size):
    calls = []

    def kernel(*arguments):
        calls.append(arguments)
        return fused_convolution(*arguments)

    network = Residual().eval().to(dtype)
    x = torch.randn(size, 3, 16, 16, dtype=dtype)
    with torch.inference_mode():
        whole = fused(network, [x], kernel)
        for other in (x, torch.randn_like(x)):
            calls.clear()
            assert torch.equal(whole(other), network(other))
            assert len(calls) == 3


@pytest.mark.parametrize(
    "network",
    [
        nn.Conv2d(3, 3, 1),
        line(nn.Conv2d(3, 6, 1, groups=3)),
        line(nn.ConvTranspose2d(3, 3, 2)),
        line(nn.Flatten(2), nn.Conv1d(3, 3, 1)),
        line(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
        Between(),
        Spread(),
    ],
)
def test_no_other_convolution_is_fused(network):
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="no rectifier follows a convolution"),
    ):
        with_kernel(network.eval(), torch.randn(2, 3, 4, 4))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_an_input_that_is_not_finite_has_no_finite_output(number):
    """The kernel makes 0 of NaN, and so a good answer of a bad one."""
    network, x = Residual().eval(), torch.randn(4, 3, 16, 16)
    with torch.inference_mode():
        whole = with_kernel(network, x)
        x[2, 1, 3, 4] = number
        found, wanted = whole(x), network(x)
    assert found.isfinite().all(1).tolist() == [True, True, False, True]
    assert torch.equal(found[[0, 1, 3]], wanted[[0, 1, 3]])


def test_a_network_that_may_make_nan_before_a_rectifier_is_refused():
    x = torch.randn(2, 3, 4, 4)
    x[0] = 1.0
    with torch.inference_mode():
        with pytest.raises(ValueError, match="may make NaN"):
            with_kernel(Standardising(is_before=True), x)
        with pytest.raises(ValueError, match="may make NaN"):
            with_kernel(Halving(), x)
        with pytest.raises(ValueError, match="fp16 may overflow"):
            with_kernel(Residual().half(), x.half())
        whole = with_kernel(Standardising(is_before=False), x)
        assert whole(x).flatten(1).isfinite().all(1).tolist() == [False, True]


@pytest.mark.parametrize("network", [Outside(), Made()])
def test_networks_that_use_other_tensors_than_their_own_are_refused(network):
    with torch.inference_mode(), pytest.raises(ValueError, match="not the network's own"):
        with_kernel(network, torch.randn(2, 3, 4, 4))


def test_a_network_keeps_nothing_of_its_recording():
    network, x = Keeping(), torch.randn(2, 3, 4, 4)
    with torch.inference_mode():
        whole = with_kernel(network, x)
        assert not torch._is_functional_tensor(network(x))
        assert torch.equal(whole(x), network(x))


def test_operations_stay_that_python_took_numbers_from():
    """A capture refuses to copy such numbers to the CPU."""
    with torch.inference_mode():
        whole = with_kernel(Stretched(), torch.randn(2, 3, 4, 4))
    targets = [node.target for node in whole.network.graph.nodes]
    assert torch.ops.aten.exp.default in targets
    assert torch.ops.aten.convolution.default not in targets
    assert torch.ops.aten.relu.default not in targets


def test_a_device_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="has no kernel"):
        fused(Residual(), [torch.randn(1, 3, 16, 16)])
