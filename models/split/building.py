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
    with _parameters_on_meta():
        return build()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put every parameter on the meta device as soon as a module gets it, before it has values.

    Not the default device of torch, since buffers are to stay. One parameter at a time has memory,
    and none is written to. In one thread of a process only.
    """
    register = nn.Module.register_parameter
    known = WeakIdKeyDictionary()  # what two modules share, they share on the meta device too

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is None or param.is_meta or nn.parameter.is_lazy(param):
            register(self, name, param)
            return
        if param not in known:
            empty = torch.empty_like(param, device="meta")
            known[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
        register(self, name, known[param])

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]  # and back again
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as above
