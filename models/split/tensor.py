"""Tensor-parallel networks: each rank holds a part of every large matrix, and all compute at once.

Each rank builds the network without its numbers, puts shards (see `shards`) in the place of the
layers that its plan cuts (see `tensor_plan`), and reads its own slices of the
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
from pathlib import Path

import msgspec
import torch
from torch import nn

from inferpool.models.errors import ModelError, OutOfStepError
from inferpool.models.files.checkpoint import StoredWeights, check_fit
from inferpool.models.out_of_memory import is_out_of_memory
from inferpool.models.split.collectives import Collectives
from inferpool.models.split.packing import pack, unpack
from inferpool.models.split.parts import (
    BuiltWeights,
    Weights,
    cut_layers,
    fill_part,
    origins_of,
    part_bytes,
)
from inferpool.models.split.ranks import Ranks
from inferpool.models.split.rehearsal import Example, Origin, Rehearsal, copied, made_up
from inferpool.models.split.report import RankPart, SplitReport
from inferpool.models.split.sketch import Sketch
from inferpool.models.split.tensor_plan import OwnPlan, TensorPlan, find_plan, own_plan

_LEAD = 0
_CALL = True
"""What the lead says before each call of a rehearsal; at its end it says a text."""
_WORD_TIMEOUT_S = 2.0
_PRECISE = (torch.float32, torch.float64)
_TOLERANCE = 1e-3
"""Of the largest output: sums are made in another order, and a wrong plan is off by far more."""
_LOOSE_TOLERANCE = 0.05
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
        part: RankPart,
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
    source: Weights = BuiltWeights(sketch)
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
    network = cut_layers(network, plan, collectives)
    if plan.styles:
        from inferpool.models.split.dtensors import apply_styles

        apply_styles(network, plan.styles, ranks.device.type, ranks.size)
    parallel = TensorParallel(
        network,
        ranks,
        collectives,
        part=RankPart(ranks.rank, part_bytes(network), text),
        report=known or SplitReport(note="; ".join([text, *plan.notes])),
        uses_dtensor=bool(plan.styles),
    )
    if is_rehearsed:
        has_own_plan = bool(tensor_plan or getattr(network, "tensor_plan", None))
        _rehearse(parallel, ranks, rehearsal, origins_of(network, shapes), has_own_plan)
    fill_part(network, source, ranks.device)
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


def choose_plan(
    network: nn.Module, size: int, tensor_plan: OwnPlan | None = None
) -> tuple[TensorPlan, str]:
    """What is split of a network, as the user says or as is found; and that, for a person.

    Raises:
        ModelError: It cannot be split so, or hardly anything of it can.
    """
    wishes = tensor_plan or getattr(network, "tensor_plan", None)
    plan = find_plan(network, size) if wishes is None else own_plan(network, wishes, size)
    cut = cut_parameters(network, plan)
    share = sum(each.nbytes for each in cut) / max(1, part_bytes(network))
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


def cut_parameters(network: nn.Module, plan: TensorPlan) -> list[nn.Parameter]:
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
