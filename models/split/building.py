"""Networks without the memory for their weights. Worker processes of split replicas only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose parameters have shapes but no values.

    Its buffers are as they are built: some have values that no checkpoint keeps.
    """
    with replacing_parameters(without_values):
        return build()


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
        yield
    finally:
        nn.Parameter.__deepcopy__ = copy  # type: ignore[method-assign]  # as above
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as above
