"""Networks without the memory for their weights. Worker processes of split replicas only."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

_RANDOM_FILLS = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
}
"""Methods of tensors."""


def without_values(parameter: nn.Parameter) -> nn.Parameter:
    """Make one like it on the meta device."""
    empty = torch.empty_like(parameter, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


@contextmanager
def replacing_parameters(
    replace: Callable[[nn.Parameter], nn.Parameter],
    replace_copy: Callable[[nn.Parameter, nn.Parameter], nn.Parameter] = lambda old, new: new,
) -> Iterator[None]:
    """Replace every parameter as soon as a module gets it, before it has values.

    Those that come of copying a module are not registered, but go to `replace_copy`, behind what
    they are a copy of.

    Not by the default device of torch, since buffers are to stay. If all are replaced, one at a
    time has memory, and none is written to. In one thread of a process only.
    """
    register = nn.Module.register_parameter
    known = WeakIdKeyDictionary()  # what two modules share, they share afterwards too

    def register_another(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or param.is_meta or nn.parameter.is_lazy(param):
            register(self, name, param)
            return
        if param not in known:
            known[param] = replace(param)
        register(self, name, known[param])

    def copy_another(self: nn.Parameter, memo: dict[int, object]) -> object:
        is_new = id(self) not in memo
        copied = copy(self, memo)  # type: ignore[no-untyped-call]
        if is_new:
            memo[id(self)] = copied = replace_copy(self, copied)
        return copied

    copy = nn.Parameter.__deepcopy__
    nn.Parameter.__deepcopy__ = copy_another  # type: ignore[assignment,method-assign]  # and back again
    nn.Module.register_parameter = register_another  # type: ignore[method-assign]  # and back again
    try:
        with Filling():
            yield
    finally:
        nn.Parameter.__deepcopy__ = copy  # type: ignore[method-assign]  # as above
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as above


class Filling(TorchFunctionMode):
    """Leaves out what fills the meta device with numbers: torch imports its compiler for that, 5 s.

    A mode of functions, since one of operators imports it too.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """See `TorchFunctionMode`."""
        kwargs = kwargs or {}
        named = getattr(func, "__name__", "")
        if named in _RANDOM_FILLS or getattr(func, "__module__", "") == nn.init.__name__:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.fill(tensor, func, args[1:], {k: kwargs[k] for k in kwargs if k != "tensor"})
                return tensor
        return func(*args, **kwargs)

    def fill(
        self, tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Do what there is to do instead of filling it by a function: nothing."""
