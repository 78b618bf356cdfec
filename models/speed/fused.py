"""Has one kernel compute a convolution, its bias, a sum and a rectifier. Worker processes only.

In a network of torch each of them is a kernel that reads and writes all pixels; in 16 bits on a GPU
those after the convolution take longer than it does. cuDNN has a kernel for all of them, and torch
functions that call it (torch/aten/src/ATen/native/cudnn/ConvShared.cpp), but no network does. So a
network's operations are recorded for inputs of one shape, as a CUDA graph records its kernels, and
those that belong together are replaced. The caller verifies that the results stay the same.

cuDNN's rectifier may make 0 of NaN (cuDNN's backend API, CUDNN_ATTR_POINTWISE_NAN_PROPAGATION), and
an answer that should be an error would pass for a good one. So no operation before it may make NaN
of finite numbers, and an instance with an input that is not finite gets NaN.
"""

import operator
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from inferpool.models.accelerator.kinds import accelerator_of

_aten = torch.ops.aten
_KEEP_FINITE = {
    *(_aten.convolution, _aten.addmm, _aten.mm, _aten.add, _aten.mul, _aten.mean, _aten.cat),
    *(_aten.relu, _aten.hardtanh, _aten.sigmoid, _aten.silu, _aten.hardsigmoid, _aten.hardswish),
    *(_aten.max_pool2d_with_indices, _aten.avg_pool2d, _aten._adaptive_avg_pool2d),
    *(_aten._native_batch_norm_legit_no_training, _aten.cudnn_batch_norm, _aten.constant_pad_nd),
    *(_aten.upsample_nearest2d, _aten.upsample_bilinear2d, _aten.clone, _aten._to_copy),
    *(_aten.view, _aten._unsafe_view, _aten.as_strided, _aten.permute, _aten.transpose, _aten.t),
    *(_aten.squeeze, _aten.unsqueeze, _aten.expand, _aten.slice, _aten.select, _aten.split),
    operator.getitem,
}
"""Operations that make no NaN of finite numbers, unless these overflow float32's range."""


Convolution = Callable[..., Tensor]
"""Computes relu(convolution + bias + other), like `cudnn_convolution`."""


def fused(
    network: nn.Module, inputs: Sequence[Tensor], convolution: Convolution | None = None
) -> nn.Module:
    """Return a network's operations on inputs of these shapes, with rectifiers in convolutions.

    Args:
        network: What it computes depends on the shapes and dtypes of its inputs alone.
        inputs: Some for it.
        convolution: The kernel; by default that of the inputs' device.

    Raises:
        ValueError: Nothing can be fused; the network uses other tensors than its inputs, parameters
            and buffers; or it may make NaN of finite numbers, as fp16 does.
        Exception: The network cannot be recorded; its code is the user's.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second

    convolution = convolution or _convolution_of(inputs[0].device)
    if any(x.dtype == torch.float16 for x in inputs):
        raise ValueError("fp16 may overflow")
    # Recorded twice: a network's own code might keep functional tensors, or read memory that they
    # do not have (`Tensor.numpy` does not check).
    written = make_fx(lambda *some: network(*some))(*inputs)
    _check_constants(written, network)
    recorded = make_fx(torch.func.functionalize(lambda *some: written(*some)))(*inputs)
    graph = recorded.graph
    whole: Node | None = None
    for relu in graph.find_nodes(op="call_function", target=_aten.relu.default):
        if summands := _summands(relu.args[0]):
            node, other = summands
            x, weight, bias, stride, padding, dilation, *_ = node.args
            with graph.inserting_before(relu):
                whole = graph.call_function(
                    convolution, (x, weight, bias, other, stride, padding, dilation)
                )
            whole.meta = relu.meta
            relu.replace_all_uses_with(whole)
            for each in dict.fromkeys((relu, relu.args[0], node)):
                if isinstance(each, Node) and not each.users:
                    graph.erase_node(each)
    if whole is None:
        raise ValueError("no rectifier follows a convolution")
    _check_finite_before(whole, convolution)
    # Even unused operations stay: if Python took numbers from one, a capture refuses it.
    recorded.recompile()
    return _Marking(recorded)


def cudnn_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Compute relu(convolution + bias + other) by cuDNN: float [B, C, H, W], on CUDA."""
    rest = (bias, stride, padding, dilation, 1)
    if other is None:
        return torch.cudnn_convolution_relu(x, weight, *rest)
    return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, *rest)


def _convolution_of(device: torch.device) -> Convolution:
    accelerator = accelerator_of(device.type)
    if accelerator is None or not accelerator.fused_convolution:
        raise ValueError("this kind of device has no kernel for it")
    found: Convolution = resolve_name(accelerator.fused_convolution)
    return found


class _Marking(nn.Module):
    """Gives NaN to instances with an input that is not finite.

    The first axis of all inputs and outputs is that of the instances.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> object:
        sound = [x.flatten(1).isfinite().all(1) for x in inputs if x.is_floating_point()]
        is_bad = ~torch.stack(sound).all(0)

        def marked(output: Tensor) -> Tensor:
            if not output.is_floating_point():
                return output
            rows = is_bad.view(-1, *[1] * (output.dim() - 1))
            return output.masked_fill(rows, torch.nan)

        return pytree.tree_map_only(Tensor, marked, self.network(*inputs))


def _check_finite_before(last: Node, convolution: object) -> None:
    """Check that no operation up to a node makes NaN of finite numbers.

    Raises:
        ValueError: One may.
    """
    for node in last.graph.nodes:
        if node is last:
            return
        if node.op != "call_function" or not node.users:
            continue
        kind = getattr(node.target, "overloadpacket", node.target)
        is_known = kind is convolution or kind in _KEEP_FINITE
        if not is_known or _look_of(node)[1] == torch.float16:
            raise ValueError(f"{node.target} may make NaN of finite numbers")


def _check_constants(recorded: nn.Module, network: nn.Module) -> None:
    """Check that a record uses no tensors but the network's own.

    Others may hold what Python computed from these inputs, and nobody keeps their memory for a
    graph.

    Raises:
        ValueError: It uses others.
    """
    known = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
    if any(id(tensor) not in known for tensor in (*recorded.parameters(), *recorded.buffers())):
        raise ValueError("it uses tensors that are not the network's own")


def _summands(node: object) -> tuple[Node, Node | None] | None:
    """Return the convolution that a rectifier gets, and what was added to it, if anything."""
    if _is_convolution(node):
        return node, None
    if not isinstance(node, Node) or node.target is not _aten.add.Tensor or node.kwargs:
        return None
    for one, other in (node.args, node.args[::-1]):
        if _is_convolution(one) and _look_of(one) == _look_of(other) and len(node.users) == 1:
            assert isinstance(other, Node)
            return one, other
    return None


def _is_convolution(node: object) -> TypeGuard[Node]:
    """Return whether it is one over rows and columns, in one group, that one operation uses."""
    if not isinstance(node, Node) or node.target is not _aten.convolution.default:
        return False
    *_, is_transposed, _, groups = node.args
    return (
        len(node.users) == 1
        and (is_transposed, groups) == (False, 1)
        and len(_look_of(node)[0]) == 4
    )


def _look_of(node: object) -> tuple[Sequence[int], torch.dtype | None]:
    """Return a tensor's shape and dtype; nothing for a number or a weight."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return (value.shape, value.dtype) if isinstance(value, Tensor) else ((), None)
