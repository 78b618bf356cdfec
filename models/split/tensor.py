"""Tensor-parallel networks: each rank holds a part of every large matrix, and all compute at once.

Each rank builds the network without its numbers, puts shards (see `shards`) in the place of the
layers that its plan cuts (see `own_plan`, `tensor_search`), and reads its own slices of the
checkpoint. A plan is read off the network's code, which may do more than was seen: so before the
numbers are read all is computed, split and whole, with numbers that are made up (see `rehearsal`).

The lead sends its arguments to all followers, and every rank computes the whole forward pass with
its shards; what passes between the layers is whole on every rank, and so is the result.

An error must leave no rank waiting in a collective for one that has raised:

- A follower that raises tells the lead, with the number of collectives it has been through, and
  waits two seconds for the lead's word.
- A lead that raises waits as long for every follower to tell the same. If all stand at the same
  collective, as where an input makes all ranks raise alike, it tells them to go on, and its error
  is that of this call alone.
- Else some rank is, or will be, in a collective that others never come to. Whoever finds that out
  raises `OutOfStepError`, on which its process ends, and the group with it.

A style of torch's own (`ParallelStyle`) that no shard can stand in for is left to DTensor, whose
collectives are not counted: there the errors must be the same word by word.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from models.checkpoint import StoredWeights, check_fit
from models.errors import ModelError, OutOfStepError
from models.out_of_memory import is_out_of_memory
from models.split.collectives import Collectives, widths_of
from models.split.own_plan import OwnPlan, own_plan
from models.split.packing import pack, unpack
from models.split.ranks import Ranks
from models.split.rehearsal import Example, Origin, Rehearsal, copied, made_up
from models.split.report import Part, SplitReport
from models.split.shards import (
    ColumnEmbedding,
    ColumnLinear,
    Piece,
    RowLinear,
    Shard,
    SplitAttention,
)
from models.split.sketch import Sketch
from models.split.tensor_plan import Cut, Plan
from models.split.tensor_search import find_plan
from models.split.tracing import EncoderByLayers

_LEAD = 0
_CALL = True
"""What the lead says before each call of a rehearsal; at its end it says a text."""
_WORD_TIMEOUT_S = 2.0
_PRECISE = (torch.float32, torch.float64)
_TOLERANCE = 1e-3
"""Of the largest output: sums are made in another order, and a wrong plan is off by far more."""
_LOOSE_TOLERANCE = 0.05
_KEPT_SHARE = 0.25
"""Of a network's bytes: what is kept at a time of one that is built with its weights."""
_LEAST_SHARE = 0.2
"""Of a network's bytes: where less can be split, two ranks hold nine tenths of it each."""


class TensorParallel:
    """One rank's part of a tensor-parallel network, as a `SplitNetwork`."""

    def __init__(
        self,
        network: nn.Module,
        ranks: Ranks,
        collectives: Collectives,
        *,
        part: Part,
        report: SplitReport,
        uses_dtensor: bool,
    ) -> None:
        self.part = part
        self.report = report
        self._network = network
        self._ranks = ranks
        self._collectives = collectives
        self._uses_dtensor = uses_dtensor

    def add_note(self, text: str) -> None:
        """Have the report say more."""
        if text:
            note = f"{self.report.note}; {text}"
            self.report = msgspec.structs.replace(self.report, note=note)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Have all ranks compute; on the lead.

        Raises:
            OutOfStepError: A rank has failed alone: this process must end.
            EOFError: Another rank is gone.
            torch.AcceleratorError: The device's context is lost.
        """
        message, tensors = pack((args, kwargs), self._ranks.device)
        for follower in range(1, self._ranks.size):
            self._ranks.send(follower, message, tensors)
        try:
            return self._compute(*copied((args, kwargs)))  # it may write to what is still sent
        except Exception as error:  # the network is the user's: it may raise anything
            _raise_if_lost(error)
            self._settle(error)
            raise

    def serve_next(self, timeout_s: float | None) -> None:
        """Wait for the lead's next call and compute it; on a follower.

        Raises:
            EOFError: The lead lets this rank go, or is gone.
            TimeoutError: None has come.
            OutOfStepError: This rank has failed alone: its process must end.
            torch.AcceleratorError: The device's context is lost.
        """
        message, tensors = self._ranks.receive(0, timeout_s)
        args, kwargs = unpack(message, tensors, self._ranks.device)
        try:
            self._compute(args, kwargs)
        except Exception as error:  # as above
            _raise_if_lost(error)
            self._ranks.send(0, self._told(error))
            try:
                self._ranks.receive(0, _WORD_TIMEOUT_S)
            except TimeoutError:
                raise OutOfStepError(f"rank {self._ranks.rank} failed alone: {error!r}") from error

    def _compute(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        with self._without_gradients():
            return self._network(*args, **kwargs)

    def _without_gradients(self) -> AbstractContextManager[object]:
        if not self._uses_dtensor:
            return torch.inference_mode()
        modes = ExitStack()  # under inference_mode DTensor gathers the whole weight of a Linear
        modes.enter_context(torch.inference_mode(mode=False))
        modes.enter_context(torch.no_grad())
        return modes

    def _told(self, error: Exception) -> dict[str, object]:
        text = f"{type(error).__name__}: {error}"
        return {
            "num_collectives": self._collectives.num_done,
            "error": text if self._uses_dtensor else "",
        }

    def _settle(self, error: Exception) -> None:
        """See that all followers have met with the same, and let them go on."""
        mine = self._told(error)
        followers = range(1, self._ranks.size)
        for follower in followers:
            try:
                theirs, _ = self._ranks.receive(follower, _WORD_TIMEOUT_S)
            except TimeoutError:
                theirs = None
            if theirs != mine:
                raise OutOfStepError(
                    f"rank 0 failed, and rank {follower} did not at the same step: {error!r}"
                ) from error
        for follower in followers:
            self._ranks.send(follower, "go on")


def load_tensor_parallel(
    ranks: Ranks,
    build: Callable[[], nn.Module],
    weights: Path | str | None,
    example: Example = (),
    *,
    tensor_plan: OwnPlan | None = None,
    known: SplitReport | None = None,
) -> TensorParallel:
    """Load this rank's part of a network; all ranks call this.

    Args:
        ranks: This rank and the others.
        build: Makes the network, the same one each time.
        weights: A checkpoint to load into it; None leaves it as built.
        example: What it will be called with.
        tensor_plan: What to split, as the user says; None has it found, unless the network says it.
        known: How it was split before, and found to compute the same.

    Raises:
        ModelError: It cannot be had, hardly anything of it can be split, or split it computes
            something else.
        EOFError: Another rank has failed.
    """
    sketch = Sketch(build)
    network = sketch.network
    source: _Source = _BuiltWeights(sketch)
    if weights is not None:
        source = StoredWeights(weights)
        check_fit(network, source.shapes, weights)
    plan, text = choose_plan(network, ranks.size, tensor_plan)
    is_rehearsed = known is None and not plan.styles
    rehearsal = None
    if is_rehearsed and ranks.rank == _LEAD:
        rehearsal = Rehearsal(network, example, ranks.device)
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    collectives = Collectives(ranks.rank, ranks.size)
    network = _cut(network, plan, collectives)
    if plan.styles:
        from models.split.dtensors import apply_styles

        apply_styles(network, plan.styles, ranks.device.type, ranks.size)
    parallel = TensorParallel(
        network,
        ranks,
        collectives,
        part=Part(ranks.rank, _num_bytes(network), text),
        report=known or SplitReport(note="; ".join([text, *plan.notes])),
        uses_dtensor=bool(plan.styles),
    )
    if is_rehearsed:
        has_own_plan = bool(tensor_plan or getattr(network, "tensor_plan", None))
        _rehearse(parallel, ranks, rehearsal, _origins(network, shapes), has_own_plan)
    _fill(network, source, ranks.device)
    network.requires_grad_(requires_grad=False).to(ranks.device)
    return parallel


def _rehearse(
    parallel: TensorParallel,
    ranks: Ranks,
    rehearsal: Rehearsal | None,
    origins: Sequence[Origin],
    has_own_plan: bool,
) -> None:
    """See that the ranks together compute what the whole network does. All of them call this.

    Raises:
        ModelError: They do not; on the lead, which has the rehearsal.
        EOFError: Another rank is gone.
    """
    if rehearsal is None:
        with made_up(origins, ranks.device):
            while (message := ranks.receive(_LEAD)[0]) == _CALL:
                parallel.serve_next(None)
        parallel.add_note(str(message))
        return
    followers = range(1, ranks.size)

    def compute(*args: object, **kwargs: object) -> object:
        for follower in followers:
            ranks.send(follower, _CALL)
        return parallel(*args, **kwargs)

    is_precise = all(each.tensor.dtype in _PRECISE for each in origins)
    tolerance = _TOLERANCE if is_precise else _LOOSE_TOLERANCE
    difference = rehearsal.difference(compute, origins, tolerance)
    text = ""
    if rehearsal.complaint:
        text = f"not held against the whole network: {rehearsal.complaint}"
    for follower in followers:
        ranks.send(follower, text)
    parallel.add_note(text)
    if difference:
        advice = (
            'have its tensor_plan name each "column" with the "row" that takes its outputs, or as '
            '"gather", or leave the plan to be found'
            if has_own_plan
            else "what to split is read off its code, which does more than was seen: give the "
            'model a tensor_plan, or set placement = "pipeline" or "replicate"'
        )
        raise ModelError(f"{difference}; {advice}")


def _origins(network: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[Origin]:
    """Where each parameter of a network that is cut lies in the whole one."""
    origins: dict[int, Origin] = {}
    for prefix, module in network.named_modules():
        start = f"{prefix}." if prefix else ""
        pieces = module.pieces if isinstance(module, Shard) else {}
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in origins:
                continue
            piece = pieces.get(name, Piece(source=name))
            whole = start + piece.source
            origins[id(parameter)] = Origin(
                tensor=parameter,
                name=whole,
                shape=shapes[whole],
                dim=piece.dim,
                ranges=piece.ranges,
            )
    return list(origins.values())


def choose_plan(
    network: nn.Module, size: int, tensor_plan: OwnPlan | None = None
) -> tuple[Plan, str]:
    """What is split of a network, as the user says or as is found; and that, for a person.

    Raises:
        ModelError: It cannot be split so, or hardly anything of it can.
    """
    wishes = tensor_plan or getattr(network, "tensor_plan", None)
    plan = find_plan(network, size) if wishes is None else own_plan(network, wishes, size)
    cut = cut_parameters(network, plan)
    share = sum(each.nbytes for each in cut) / max(1, _num_bytes(network))
    if share < _LEAST_SHARE and wishes is None:
        raise ModelError(
            f"{type(network).__name__} is no network for tensor parallelism: of its bytes "
            f"{share:.0%} can be split (Linear, Embedding, MultiheadAttention); "
            'use placement = "pipeline"'
        )
    num_matrices = sum(parameter.dim() > 1 for parameter in network.parameters())
    text = (
        f"1/{size} of {len(cut)} of {num_matrices} matrices, {share:.0%} of the bytes; "
        "the rest whole"
    )
    return plan, text


def cut_parameters(network: nn.Module, plan: Plan) -> list[nn.Parameter]:
    """The matrices that a plan cuts."""
    cut = {
        id(parameter)
        for name in {cut.name for cut in plan.cuts} | set(plan.styles)
        for parameter in network.get_submodule(name).parameters()
    }
    return [each for each in network.parameters() if each.dim() > 1 and id(each) in cut]


def _raise_if_lost(error: Exception) -> None:
    """Raise an error that leaves nothing to settle: the end of the process is near."""
    if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
        raise error


class _BuiltWeights:
    """The weights that a network is built with, to be read as those of a checkpoint are.

    They have numbers at the end of a build only. So that they never lie here all at once, the
    network is built several times, and some of them are kept each time.
    """

    def __init__(self, sketch: Sketch) -> None:
        self._sketch = sketch
        self._empty = dict(sketch.network.named_parameters(remove_duplicate=False))
        self._room_bytes = _KEPT_SHARE * sum(each.nbytes for each in sketch.network.parameters())
        self._kept: dict[str, Tensor] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._empty.items()}

    def read(self, name: str, *index: slice) -> Tensor:
        """As `StoredWeights.read`; quick if they are read in the order of the network."""
        if name not in self._kept:
            self._kept = {}
            self._kept = self._sketch.built(self._beginning_with(name))
        part: Tensor = self._kept[name][index or ...]
        return part.detach().clone(memory_format=torch.contiguous_format)

    def _beginning_with(self, name: str) -> dict[str, Tensor]:
        """As many as are kept at a time, and that one in any case."""
        names = list(self._empty)
        kept: dict[str, Tensor] = {name: self._empty[name]}
        num_bytes = self._empty[name].nbytes
        for each in names[names.index(name) + 1 :]:
            num_bytes += self._empty[each].nbytes
            if num_bytes > self._room_bytes:
                break
            kept[each] = self._empty[each]
        return kept


_Source = StoredWeights | _BuiltWeights


def _cut(network: nn.Module, plan: Plan, collectives: Collectives) -> nn.Module:
    """Put shards in the place of the layers that are cut."""
    for cut in plan.cuts:
        shard = _shard_of(network.get_submodule(cut.name), cut, collectives)
        if not cut.name:
            return shard
        network.set_submodule(cut.name, shard)
    for count in plan.counts:
        share = widths_of(count.units, collectives.size, count.per_unit)[collectives.rank]
        setattr(network.get_submodule(count.module), count.attribute, share)
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fast path reads weights past the modules
        elif type(module) is nn.TransformerEncoder:
            module.__class__ = EncoderByLayers  # it makes nested tensors for that fast path
    return network


def _shard_of(whole: nn.Module, cut: Cut, collectives: Collectives) -> Shard:
    if isinstance(whole, nn.MultiheadAttention):
        return SplitAttention(whole, collectives)
    if isinstance(whole, nn.Embedding):
        return ColumnEmbedding(whole, collectives)
    assert isinstance(whole, nn.Linear)
    if cut.how == "row":
        return RowLinear(whole, collectives, units=cut.units)
    return ColumnLinear(
        whole,
        collectives,
        units=cut.units,
        gathers=cut.how == "gather",
        num_dims=cut.num_dims,
    )


def _fill(network: nn.Module, stored: _Source, device: torch.device) -> None:
    """Read what this rank holds, tensor by tensor."""
    filled: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the empty ones, to be kept
    shapes = stored.shapes
    for prefix, module in network.named_modules():
        start = f"{prefix}." if prefix else ""
        pieces = module.pieces if isinstance(module, Shard) else {}
        for name, empty in module._parameters.items():  # also what was met before
            if empty is None:
                continue
            if id(empty) not in filled:
                piece = pieces.get(name, Piece(source=name))
                filled[id(empty)] = (
                    empty,
                    _read(stored, start + piece.source, piece, empty, device),
                )
            module._parameters[name] = filled[id(empty)][1]
        for name, buffer in module.named_buffers(recurse=False):
            if start + name in shapes:
                buffer.copy_(stored.read(start + name))


def _read(
    stored: _Source, name: str, piece: Piece, empty: nn.Parameter, device: torch.device
) -> nn.Parameter:
    if type(empty.data) is not Tensor:
        from models.split.dtensors import read_local

        local = read_local(empty.data, partial(stored.read, name), device)
        return nn.Parameter(local, requires_grad=False)
    before = (slice(None),) * piece.dim
    parts = [stored.read(name, *before, slice(*each)) for each in piece.ranges]
    if len(parts) > 1:
        value = torch.cat(parts, piece.dim)
    else:  # to copy a single one would leave gaps in the heap as large as all that is loaded
        value = parts[0] if parts else stored.read(name)
    return nn.Parameter(value.to(device, empty.dtype), requires_grad=False)


def _num_bytes(network: nn.Module) -> int:
    """What this rank holds."""
    tensors = [each.data for each in (*network.parameters(), *network.buffers())]
    if all(type(each) is Tensor for each in tensors):
        return sum(each.nbytes for each in tensors)
    from models.split.dtensors import local_bytes

    return sum(map(local_bytes, tensors))
