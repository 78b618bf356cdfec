"""Builds networks of which this process keeps a part, in the memory of that part. Workers only.

A network is first built without its parameters: to see what there is. Those of a part then come
from a checkpoint, or the network is built again with them.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inferpool.models.errors import ModelError
from inferpool.models.split.building import Filling, replacing_parameters, without_values

logger = logging.getLogger(__name__)


class Sketch:
    """A network whose parameters have names, shapes and dtypes, and no numbers.

    They are on torch's meta device; buffers are real, for they may come from no checkpoint.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        """Build it.

        Args:
            build: Makes the network, the same one each time. If it fails without numbers, all of
                them are made.

        Raises:
            ModelError: As it was raised by `build`.
        """
        self._build = build
        self._registered: list[nn.Parameter] = []
        """In the order in which they were, which is the same each time."""
        self._originals: dict[int, int] = {}
        """Of those that are copies: which they were copied from, by their places in that order."""
        network: nn.Module | None = None
        try:
            with (
                torch.random.fork_rng(devices=[]),
                _mapped_files(),
                replacing_parameters(self._register, self._register_copy),
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

    def built_for(self, part: nn.Module) -> dict[str, Tensor]:
        """Build the network once more; give a part's parameters and buffers, by their names in it.

        As `built`, of those of the part.
        """
        return self.built(dict(part.state_dict(keep_vars=True)))

    def built(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Build the network once more, with some parameters as they come out of that.

        They are the numbers that the whole network would have: what is left out uses up as many
        random ones. Torch's generator is left where it was, so that the next time is the same.

        Args:
            state: Parameters of the sketch, and other tensors.

        Returns:
            Those with numbers, and the others as they are.

        Raises:
            ModelError: It is another network this time.
        """
        if not any(tensor.is_meta for tensor in state.values()):
            return dict(state)
        wanted = {id(tensor) for tensor in state.values()}
        kept = {i for i, each in enumerate(self._registered) if id(each) in wanted}
        kept |= {original for copied, original in self._originals.items() if copied in kept}
        found: dict[int, nn.Parameter] = {}
        """Real ones, by the identity of those of the sketch."""
        count = 0

        def keep(parameter: nn.Parameter) -> nn.Parameter:
            nonlocal count
            index, count = count, count + 1
            if index not in kept:
                return without_values(parameter)
            found[id(self._registered[index])] = parameter
            return parameter

        with (
            torch.random.fork_rng(devices=[]),
            _mapped_files(),
            replacing_parameters(keep, lambda _, copied: keep(copied)),
            _drawing(),
        ):
            network = self._build()
        if count != len(self._registered):
            raise ModelError(
                f"the network was built with {len(self._registered)} parameters at first, and "
                f"with {count} the second time: it must be the same each time"
            )
        self._correct(network)
        return {name: found.get(id(tensor), tensor) for name, tensor in state.items()}

    def _problem(self, network: nn.Module) -> str:
        """What was computed of parameters as it was built, and so has no numbers; for the log."""
        known = {id(parameter) for parameter in self._registered}
        parameters = [each for each in network.named_parameters() if id(each[1]) not in known]
        odd = [name for name, each in [*parameters, *network.named_buffers()] if each.is_meta]
        return f"{odd[0]} is computed of its parameters" if odd else ""

    def _correct(self, network: nn.Module) -> None:
        """Take over what else is random: for the sketch, parameters before it drew no numbers."""
        own = dict(_other_tensors(self.network))
        for name, made in _other_tensors(network):
            if name in own and not torch.equal(own[name], made):
                own[name].copy_(made)

    def _register(self, parameter: nn.Parameter) -> nn.Parameter:
        self._registered.append(without_values(parameter))
        return self._registered[-1]

    def _register_copy(self, original: nn.Parameter, copied: nn.Parameter) -> nn.Parameter:
        places = [i for i, each in enumerate(self._registered) if each is original]
        if places:
            # What is copied of a copy is, at last, a copy of what was made.
            self._originals[len(self._registered)] = self._originals.get(places[0], places[0])
        return self._register(copied)


def fill(part: nn.Module, read: Callable[[str], Tensor | None], device: torch.device) -> None:
    """Give a part its numbers, one tensor after the other, and put it on its device.

    Args:
        part: With parameters on the meta device.
        read: Gives a parameter or a buffer by its name in the part; None leaves it as it is.
        device: Where it will compute.
    """
    made: dict[int, nn.Parameter] = {}
    """By the identity of what they replace, since several modules may share one."""
    for prefix, module in part.named_modules():
        for name, parameter in [*module._parameters.items()]:
            if parameter is None:
                continue
            if id(parameter) not in made:
                value = read(_joined(prefix, name))
                real = parameter if value is None else value
                real = real.detach().to(device=device, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(real, requires_grad=False)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module._buffers.items():
            if buffer is not None and (value := read(_joined(prefix, name))) is not None:
                buffer.copy_(value)
    part.to(device)


def num_bytes(part: nn.Module) -> int:
    """What the parameters and buffers of a part take, shared ones once."""
    return sum(tensor.nbytes for tensor in [*part.parameters(), *part.buffers()])


def _other_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that modules have as plain attributes."""
    for prefix, module in network.named_modules():
        for name, value in {**module._buffers, **vars(module)}.items():
            if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
                yield _joined(prefix, name), value


class _Drawing(Filling):
    """Draws as many random numbers for what is on the meta device as if it were real."""

    def fill(
        self, tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        func(torch.empty_like(tensor, device="cpu"), *args, **kwargs)


@contextmanager
def _drawing() -> Iterator[None]:
    """As `_Drawing`, also where torch looks at what was drawn, and draws some of it anew."""
    draw = nn.init._no_grad_trunc_normal_

    def draw_real(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.is_meta:
            draw(torch.empty_like(tensor, device="cpu"), *args, **kwargs)
            return tensor
        return draw(tensor, *args, **kwargs)

    nn.init._no_grad_trunc_normal_ = draw_real
    try:
        with _Drawing():
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = draw


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


@contextmanager
def _mapped_files() -> Iterator[None]:
    """For what `build` loads by itself: have `torch.load` map files where it can.

    What nobody touches takes no memory then, and what has no numbers is given none.
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
