"""Tries presets on a loaded model: how fast each is, and how far from the exact network.

Runs in workers, and in the process that searches beside them.
"""

import gc
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inferpool.models.accelerator.device import (
    build_of,
    is_accelerator,
    name_of,
    pinned,
    release_memory,
    synchronize,
)
from inferpool.models.accelerator.failures import is_out_of_memory
from inferpool.models.base import Model
from inferpool.models.item import Features, Item, Outputs
from inferpool.models.overrides import forward_can_run_ahead
from inferpool.models.ragged import joined
from inferpool.models.speed.compiled import compiler_for
from inferpool.models.speed.graphs import Graphed
from inferpool.models.speed.options import SpeedOptions
from inferpool.models.speed.presets import Recast, can_be_changed, prepare
from inferpool.models.speed.verdicts import VerdictStore, fingerprint
from inferpool.models.speed_names import COMPILED, FOR_ACCELERATORS, GRAPHED, LONG_S, NO_NETWORK
from inferpool.models.tolerance import Agreement
from inferpool.models.warm_sizes import steps_to

logger = logging.getLogger(__name__)

_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
_CLEAR_SPREAD = 1.1
"""Rounds that differ by less than this factor are enough."""
_NUM_LOOKS = 2
"""Times that a size is timed before it counts as too long; others may use the device, too."""
_COMPARED_BATCH = 8
_MAX_TIMED_BATCH = 32
"""Largest batch for timing on a CPU."""
_CALIBRATION_BATCH = 12
_MOST_FURTHER = 2.0
"""Largest deviation of a graph that is not within the tolerance, as a multiple of its preset's own.
Fused convolutions round once where others round three times: on ResNet-50 in bf16 with random
weights, answers of either were off by up to 0.11, and by 0.06 from each other."""


class NoTimeLeftError(TimeoutError):
    """Raised past `Trial.until`."""


class Trial:
    """A loaded model, its exact network, and samples to try presets on.

    Args:
        model: Loaded.
        options: Its settings.
    """

    def __init__(self, model: Model, options: SpeedOptions) -> None:
        self.model = model
        self.options = options
        self.times = options.times
        self.store = VerdictStore(options.cache_dir)
        self.until = math.inf
        """Moment of `times.now` after which no batch begins."""
        self.obstacle = ""
        network = model.network
        if not isinstance(network, nn.Module) or not can_be_changed(network):
            self.obstacle = NO_NETWORK
            return
        self.exact = network
        tensor = next(iter(network.state_dict().values()))
        self.device = tensor.device
        self.is_on_cpu = not is_accelerator(self.device)
        self._items: Sequence[Item] = list(model.samples())
        if not self._items:
            self.obstacle = "no sample inputs to verify presets on"
            return
        self._features: dict[int, Features] = {}
        """Features of the samples, by number."""
        self._compared: list[tuple[Features, Outputs]] = []
        """Batches of samples, with the exact outputs."""
        self._single_s: float | None = None
        self._sizes: Sequence[int] = ()
        self._key = ""

    @property
    def key(self) -> str:
        """Key of this trial's verdict."""
        if not self._key:
            self._key = fingerprint(
                self.exact,
                self.model.tolerance,
                self.device.type,
                name_of(self.device),
                build_of(self.device),
                torch.get_num_threads() if self.is_on_cpu else 0,
                self.options.max_batch_size,
            )
        return self._key

    @property
    def compiled_presets(self) -> Sequence[str]:
        """Compiled presets for this kind of device, in the order to try them."""
        return [name for name in COMPILED if not (self.is_on_cpu and name in FOR_ACCELERATORS)]

    @property
    def compiler_obstacle(self) -> str:
        """Why no package can be made for this device and these inputs, or kept; empty if it can."""
        if compiler_for(self.device) is None:
            return f"not available: there is no compiler for {self.device.type}"
        if self.store.folder is None:
            return "not available: there is no cache_dir"
        if self.has_varying_shapes:
            return "not available: the samples have several shapes"
        return ""

    @property
    def has_varying_shapes(self) -> bool:
        """True if samples differ in shape: a network compiled for one of them would serve few."""
        if self.model.has_fixed_shapes:
            return False
        some = range(min(len(self._items), _COMPARED_BATCH))
        try:
            looks = {
                tuple((name, tensor.shape) for name, tensor in self._features_of(number).items())
                for number in some
            }
        except Exception:  # the model is the user's: the comparison reports what it raises
            return False
        return len(looks) > 1

    @property
    def sizes(self) -> Sequence[int]:
        """Batch sizes of service on an accelerator that fit and take no long time, rising."""
        if not self._sizes:
            self._sizes = self._found_sizes()
        return self._sizes

    def package(self, preset: str) -> Path | None:
        """Return the path of a preset's compiled package, if it exists and is undamaged."""
        return self.store.package(self.key, preset)

    def packages(self) -> list[str]:
        """Return the presets that have been compiled."""
        return [name for name in COMPILED if self.package(name) is not None]

    def make_package(self, preset: str) -> None:
        """Compile a preset, and keep the package.

        Raises:
            Exception: The network, the compiler or the disk may raise anything.
        """
        make = self.options.compile_package
        assert make is not None
        self.store.make_package(self.key, preset, lambda draft: make(self.exact, preset, draft))

    def prepare(self, name: str) -> nn.Module:
        """Return the network of a preset."""
        if name in GRAPHED:
            return self._graphed(GRAPHED[name])
        if name in COMPILED:
            path = self.package(name)
            if path is None:
                raise FileNotFoundError(f"there is no network that was compiled for {name}")
            with self.store.loading(path):
                other = None if self.model.has_fixed_shapes else self.exact
                network = self.options.load_package(path, other, self.device)
                self._run(network, self._collate([0]))
            return network if self.is_on_cpu else self._compiled_in_graphs(network)
        return prepare(name, self.exact, self.calibrate)

    def calibrate(self, network: nn.Module) -> None:
        """Call a network once, with samples of every kind."""
        size = max(2, self._fitting(_CALIBRATION_BATCH, self.times.calibration_s))
        step = max(1, len(self._items) // size)
        self._run(network, self._collate(range(0, size * step, step)))

    def compare(self, network: nn.Module, max_batches: int | None = None) -> Agreement:
        """Compare the outputs of a network with the exact ones."""
        return self._judged(
            (exact, self._run(network, batch)) for batch, exact in self._exact(max_batches)
        )

    def gain(self, network: nn.Module) -> float:
        """Return its speed relative to the exact one: the geometric mean over batch sizes."""
        most = min(self.options.max_batch_size, _MAX_TIMED_BATCH)
        sizes = {1, self._fitting(most, self.times.batch_s) if self.is_on_cpu else self.sizes[-1]}
        gains = [self._gain(network, self._timed_batch(size)) for size in sorted(sizes)]
        return float(math.prod(gains) ** (1 / len(gains)))

    def recover(self) -> None:
        """Free the memory of a preset that failed.

        Raises:
            torch.AcceleratorError: The device's context is lost.
        """
        if not self.is_on_cpu:
            synchronize(self.device)
            gc.collect()  # recorded networks refer to themselves
            release_memory()

    def _graphed(self, name: str) -> Graphed:
        """Capture graphs of a preset for all sizes; of its fused network if that is faster."""
        if self.has_varying_shapes:
            raise ValueError("graphs are for inputs of one shape, and the samples have several")
        network = prepare(name, self.exact, self.calibrate)
        if (graphed := self._fused(name, network)) is not None:
            return graphed
        self.recover()  # the memory of one that is not used
        return self._captured(network, Graphed(network))

    def _compiled_in_graphs(self, network: nn.Module) -> nn.Module:
        """Capture graphs of a compiled network for all sizes; return it as it is if that fails."""
        try:
            return self._captured(network, Graphed(network))
        except NoTimeLeftError:
            raise
        except Exception as error:  # the kernels are a compiler's: a capture may raise anything
            logger.warning("a compiled network serves without graphs: %s", first_line(error))
        self.recover()
        return network

    def _fused(self, name: str, network: Recast) -> Graphed | None:
        """Capture a preset's fused network; return None if it cannot be, or is no faster."""
        try:
            graphed = self._captured(network, Graphed(network, network_for=network.fused))
            gain = self._gain(graphed, self._timed_batch(self.sizes[-1]), network)
        except NoTimeLeftError:
            raise
        except Exception as error:  # the network is the user's: it may raise anything
            logger.debug("the preset %s is not fused: %s", name, first_line(error))
            return None
        logger.debug("the preset %s is %.2f x as fast if it is fused", name, gain)
        return graphed if gain > 1 else None

    def _captured(self, network: nn.Module, graphed: Graphed) -> Graphed:
        """Capture graphs for all sizes, and check that they stray no further than the network."""
        graphed.eval()
        with graphed.capturing():
            for size in reversed(self.sizes):
                self._run(graphed, self._collate(range(size)))
        for size in self.sizes:
            batch = self._collate(range(1, size + 1))  # not what was captured
            exact = self._run(self.exact, batch)
            agreement = self._judged([(exact, self._run(graphed, batch))])
            if not agreement.is_within:
                own = self._judged([(exact, self._run(network, batch))])
                most = _MOST_FURTHER * own.deviation
                if not (agreement.deviation <= most and math.isfinite(agreement.deviation)):
                    raise ValueError(f"graphs compute something else: {agreement.text}")
        return graphed

    def _found_sizes(self) -> Sequence[int]:
        sizes: list[int] = []
        for size in steps_to(self.options.max_batch_size):
            try:
                batch = self._timed_batch(size)
                self._seconds(self.exact, batch)  # the first call of a size is no measure
                took_s = min(self._seconds(self.exact, batch) for _ in range(_NUM_LOOKS))
            except RuntimeError as error:
                if not sizes or not is_out_of_memory(error):
                    raise
                break
            if sizes and took_s > LONG_S:
                break
            sizes.append(size)
        release_memory()
        return sizes

    def _gain(self, network: nn.Module, batch: Features, other: nn.Module | None = None) -> float:
        """Return how many times as fast as another network it is, by default as the exact one.

        It is the median over rounds; they take turns in each, so that slow moments hit both.
        """
        other = self.exact if other is None else other
        times = self.times
        ratios: list[float] = []
        began = times.clock()
        for each in (network, other):
            self._seconds(each, batch)
        while len(ratios) < _MIN_ROUNDS or (
            times.clock() < began + times.rounds_s
            and times.now() < self.until
            and len(ratios) < _MAX_ROUNDS
            and max(ratios) > min(ratios) * _CLEAR_SPREAD
        ):
            seconds = [self._seconds(each, batch) for each in (other, network)]
            ratios.append(seconds[0] / max(seconds[1], 1e-9))
        return statistics.median(ratios)

    def _exact(self, max_batches: int | None) -> Sequence[tuple[Features, Outputs]]:
        size = self._fitting(_COMPARED_BATCH, self.times.batch_s)
        if max_batches is not None:
            batch = self._collate(range(size))
            return self._compared[:max_batches] or [(batch, self._run(self.exact, batch))]
        if not self._compared:
            began = self.times.clock()
            for start in range(0, len(self._items), size):
                batch = self._collate(range(start, min(start + size, len(self._items))))
                self._compared.append((batch, self._run(self.exact, batch)))
                if self.times.clock() - began > self.times.compare_s:
                    break
        return self._compared

    def _fitting(self, size: int, within_s: float) -> int:
        """Return the size, or a smaller one if such a batch would take too long."""
        if self._single_s is None:
            single = self._timed_batch(1)
            self._seconds(self.exact, single)  # the first call of a network is no measure
            self._single_s = self._seconds(self.exact, single)
        return max(1, min(size, int(within_s / max(self._single_s, 1e-6))))

    @torch.inference_mode()
    def _collate(self, numbers: Sequence[int]) -> Features:
        """Collate a batch of samples as a worker does."""
        batch = self.model.collate([self._features_of(number) for number in numbers])
        if self.is_on_cpu:
            return batch
        return {name: pinned(value) for name, value in batch.items()}

    @torch.inference_mode()
    def _features_of(self, number: int) -> Features:
        i = number % len(self._items)
        if i not in self._features:
            self._features[i] = self.model.preprocess(self._items[i])
        return self._features[i]

    @torch.inference_mode()
    def _timed_batch(self, size: int) -> Features:
        """Collate a batch, and put it on the device if service does so beside what it computes."""
        batch = self._collate(range(size))
        if self.is_on_cpu or not forward_can_run_ahead(self.model):
            return batch
        return {name: value.to(self.device) for name, value in batch.items()}

    def _seconds(self, network: nn.Module, batch: Features) -> float:
        """Time a batch; on an accelerator `forward` alone, until the device is done.

        Service does the rest meanwhile, for any preset in the same way.
        """
        clock = self.times.clock
        if self.is_on_cpu:
            began = clock()
            self._run(network, batch)
            return clock() - began
        synchronize(self.device)
        began = clock()
        self._forward(network, batch)
        synchronize(self.device)
        return clock() - began

    @torch.inference_mode()
    def _run(self, network: nn.Module, batch: Features) -> dict[str, Any]:
        outputs = self._forward(network, batch)
        return dict(self.model.postprocess({name: out.cpu() for name, out in outputs.items()}))

    @torch.inference_mode()
    def _forward(self, network: nn.Module, batch: Features) -> Outputs:
        if self.times.now() > self.until:
            raise NoTimeLeftError
        with using_network(self.model, network):
            return self.model.forward(batch)

    def _judged(self, pairs: Iterable[tuple[Features, Outputs]]) -> Agreement:
        wanted, found = zip(*pairs, strict=True)
        return self.model.tolerance.judge(joined(wanted), joined(found))


def first_line(error: Exception) -> str:
    """Return the error's first line, with its type."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


@contextmanager
def using_network(model: Model, network: Callable[..., object] | None) -> Iterator[None]:
    """Have the model compute with another network in the block."""
    before, model.network = model.network, network
    try:
        yield
    finally:
        model.network = before
