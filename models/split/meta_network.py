"""Builds networks to keep a part of them, in the memory of that part. Worker processes.

A network is first built with its parameters on torch's meta device, to see what there is. The
numbers of a part then come from a checkpoint, or the network is built again with them.
"""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from inferpool.models.errors import ModelError

logger = logging.getLogger(__name__)

_RANDOM_FILLS = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
}


class MetaNetwork:
    """A network with parameters that have names, shapes and dtypes, and no numbers.

    They are on torch's meta device; buffers are real, for a checkpoint may lack them.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        """Build it.

        Args:
            build: Makes the network, the same one each time. If it fails without numbers, all of
                them are made.

        Raises:
            ModelError: Raised by `build`.
        """
        self._build = build
        self._registered: list[nn.Parameter] = []
        """All parameters in the order in which modules got them, which is the same each time."""
        self._originals: dict[int, int] = {}
        """Places in that order: of a copy, and of the parameter that it was copied from."""
        network: nn.Module | None = None
        try:
            with (
                torch.random.fork_rng(devices=[]),
                _mapped_files(),
                _replaced_parameters(self._register, self._register_copy),
            ):
                network = build()
            problem = self._problem(network)
        except ModelError:
            raise
        except Exception as error:  # the network is the user's: it may raise anything
            problem = f"{type(error).__name__}: {error}"
        if network is None or problem:
            text = "the network cannot be built without its numbers, so all are made: %s"
            logger.warning(text, problem)
            with torch.random.fork_rng(devices=[]):
                network = build()
        self.network = network.eval().requires_grad_(False)

    def built(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Build the network once more, with numbers in some of its parameters.

        They are those that the whole network would have: the parameters that are left out use up as
        many random numbers. Torch's generator is left where it was, so that the next time is the
        same.

        Args:
            state: Parameters of `network`, and other tensors, by any names.

        Returns:
            The parameters with numbers, and the other tensors as they are.

        Raises:
            ModelError: It is another network this time.
        """
        if not any(tensor.is_meta for tensor in state.values()):
            return dict(state)
        wanted = {id(tensor) for tensor in state.values()}
        kept = {i for i, each in enumerate(self._registered) if id(each) in wanted}
        kept |= {original for copied, original in self._originals.items() if copied in kept}
        found: dict[int, nn.Parameter] = {}
        count = 0

        def keep(parameter: nn.Parameter) -> nn.Parameter:
            nonlocal count
            index, count = count, count + 1
            if index not in kept:
                return _without_values(parameter)
            found[id(self._registered[index])] = parameter
            return parameter

        with (
            torch.random.fork_rng(devices=[]),
            _mapped_files(),
            _replaced_parameters(keep, lambda _, copied: keep(copied)),
            _drawing_for_meta(),
        ):
            network = self._build()
        if count != len(self._registered):
            raise ModelError(
                f"the network was built with {len(self._registered)} parameters at first, and "
                f"with {count} the second time: it must be the same each time"
            )
        own = dict(_other_tensors(self.network))
        for name, made in _other_tensors(network):  # they may be random too
            if name in own and not torch.equal(own[name], made):
                own[name].copy_(made)
        return {name: found.get(id(tensor), tensor) for name, tensor in state.items()}

    def _problem(self, network: nn.Module) -> str:
        """Name a tensor that was computed of parameters, and so has no numbers; for the log."""
        known = {id(parameter) for parameter in self._registered}
        parameters = [each for each in network.named_parameters() if id(each[1]) not in known]
        odd = [name for name, each in [*parameters, *network.named_buffers()] if each.is_meta]
        return f"{odd[0]} is computed of its parameters" if odd else ""

    def _register(self, parameter: nn.Parameter) -> nn.Parameter:
        self._registered.append(_without_values(parameter))
        return self._registered[-1]

    def _register_copy(self, original: nn.Parameter, copied: nn.Parameter) -> nn.Parameter:
        places = [i for i, each in enumerate(self._registered) if each is original]
        if places:  # a copy of a copy is, at last, a copy of the one that was made
            self._originals[len(self._registered)] = self._originals.get(places[0], places[0])
        return self._register(copied)


def fill(part: nn.Module, read: Callable[[str], Tensor | None], device: torch.device) -> None:
    """Read the numbers of a part, one tensor after the other, and put it on its device.

    Args:
        part: A module with parameters on the meta device.
        read: Returns a parameter or a buffer by its name in the part; None leaves it as it is.
        device: Where it will compute.
    """
    made: dict[int, nn.Parameter] = {}  # by what they replace, which several modules may share
    for prefix, module in part.named_modules():
        for name, parameter in [*module._parameters.items()]:
            if parameter is None:
                continue
            if id(parameter) not in made:
                value = read(joined(prefix, name))
                real = parameter if value is None else value
                real = real.detach().to(device=device, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(real, requires_grad=False)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module._buffers.items():
            if buffer is not None and (value := read(joined(prefix, name))) is not None:
                buffer.copy_(value)
    part.to(device)


def num_bytes(part: nn.Module) -> int:
    """Count the bytes of the parameters and buffers of a part, shared ones once."""
    return sum(tensor.nbytes for tensor in [*part.parameters(), *part.buffers()])


def joined(prefix: str, name: str) -> str:
    """Join two names of modules; either may be empty."""
    return f"{prefix}.{name}".strip(".")


def _other_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors that modules have as plain attributes."""
    for prefix, module in network.named_modules():
        for name, value in {**module._buffers, **vars(module)}.items():
            if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
                yield joined(prefix, name), value


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    empty = torch.empty_like(parameter, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


@contextmanager
def _replaced_parameters(
    replace: Callable[[nn.Parameter], nn.Parameter],
    replace_copy: Callable[[nn.Parameter, nn.Parameter], nn.Parameter],
) -> Iterator[None]:
    """Replace every parameter as soon as a module gets it, before it has values.

    Copies of parameters are not registered: `replace_copy` gets the parameter and its copy.

    This is not done by torch's default device, since buffers are to stay. If all are replaced, one
    at a time has memory, and none is written to. In one thread of a process only.
    """
    register = nn.Module.register_parameter
    known = WeakIdKeyDictionary()  # two modules go on sharing a parameter that they share

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
        with _MetaFills():
            yield
    finally:
        nn.Parameter.__deepcopy__ = copy  # type: ignore[method-assign]  # as above
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as above


class _MetaFills(TorchFunctionMode):
    """Skips calls that fill meta tensors with numbers: torch imports its compiler for them, 5 s.

    A mode of functions, since one of operators imports it too.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        named = getattr(func, "__name__", "")
        if named in _RANDOM_FILLS or getattr(func, "__module__", "") == nn.init.__name__:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                others = {name: value for name, value in kwargs.items() if name != "tensor"}
                self.fill(tensor, func, args[1:], others)
                return tensor
        return func(*args, **kwargs)

    def fill(self, tensor: Tensor, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Do nothing."""


class _Draws(_MetaFills):
    """Draws as many random numbers for a meta tensor as if it were real."""

    def fill(self, tensor: Tensor, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        func(torch.empty_like(tensor, device="cpu"), *args, **kwargs)


@contextmanager
def _drawing_for_meta() -> Iterator[None]:
    """Use `_Draws`, also where torch looks at the numbers, and draws some of them anew."""
    draw = nn.init._no_grad_trunc_normal_

    def draw_real(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.is_meta:
            draw(torch.empty_like(tensor, device="cpu"), *args, **kwargs)
            return tensor
        return draw(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = draw_real
    try:
        with _Draws():
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = draw


@contextmanager
def _mapped_files() -> Iterator[None]:
    """Have `torch.load` in `build` map files where it can.

    A weight that nobody touches takes no memory then, and a meta tensor is given none.
    """
    load = torch.load

    def load_mapped(f: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(f, *args, **{"mmap": True, **kwargs})
        except (RuntimeError, ValueError) as error:
            if "mmap" not in str(error):
                raise
        return load(f, *args, **kwargs)  # an old file's format, or something that is no file

    torch.load = load_mapped
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            yield
    finally:
        torch.load = load
