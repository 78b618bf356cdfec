"""Tensor-parallel networks: each rank holds a part of every large matrix, and all compute at once.

Each rank builds the network without its numbers, puts shards (see `shards`) in the place of the
layers that its plan cuts (see `tensor_plan`), and reads its own slices of the checkpoint. A plan
may be wrong: the code of a network may do more than was seen. So before the numbers are read, the
split network is compared with the whole one with made-up numbers (see `verification`).

The lead sends its arguments to all followers, and every rank computes the whole forward pass with
its shards; values between the layers are whole on every rank, and so is the result.

An error must leave no rank waiting in a collective for one that has raised:

- A follower that raises sends the lead the number of collectives that it has been through, and
  waits two seconds for the lead's word.
- A lead that raises waits as long for the same from every follower. If all stand at the same
  collective, as where an input makes all ranks raise alike, it tells them to go on, and only
  this call fails.
- Else some rank is, or will be, in a collective that others never come to. The rank that finds that
  out raises `OutOfStepError`; its process ends, and the group with it.

A style of torch's own (`ParallelStyle`) that no shard can stand in for is left to DTensor. Its
collectives are not counted: there the errors must be the same word by word.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack

import msgspec
import torch
from torch import nn

from inferpool.models.accelerator.failures import is_lost_device, raised
from inferpool.models.errors import ModelError, OutOfStepError
from inferpool.models.files.checkpoint import StoredWeights, check_fit
from inferpool.models.runtime import NetworkToSplit
from inferpool.models.spec import RankPart, SplitReport
from inferpool.models.split.meta_network import MetaNetwork
from inferpool.models.split.packing import pack, unpack
from inferpool.models.split.ranks import Ranks
from inferpool.models.split.shards import Collectives
from inferpool.models.split.tensor_parts import (
    BuiltWeights,
    Weights,
    cut_layers,
    fill_part,
    origins_of,
    part_bytes,
)
from inferpool.models.split.tensor_plan import OwnPlan, TensorPlan, find_plan, own_plan
from inferpool.models.split.verification import (
    Origin,
    Verification,
    copied,
    has_all_shapes,
    made_up,
)

_LEAD = 0
_CALL = True
"""The lead's message before each call of a verification; at its end it sends a text."""
_WORD_TIMEOUT_S = 2.0
_PRECISE = (torch.float32, torch.float64)
_TOLERANCE = 1e-3
"""Share of the largest output: sums are made in another order; a wrong plan is off by far more."""
_LOOSE_TOLERANCE = 0.05
_LEAST_SHARE = 0.2
"""Share of the bytes that must be split: with less, two ranks hold nine tenths of them each."""


_UNVERIFIED = (
    "this split cannot be compared with the whole network (name each layer in a tensor_plan, or "
    'set placement = "pipeline" or "replicate")'
)


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
        """Add a text to the report."""
        if text:
            note = f"{self.report.note}; {text}"
            self.report = msgspec.structs.replace(self.report, note=note)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Have all ranks compute; on the lead.

        Raises:
            OutOfStepError: A rank has failed alone: this process must end.
            EOFError: Another rank is gone.
        """
        message, tensors = pack((args, kwargs), self._ranks.device)
        for follower in range(1, self._ranks.size):
            self._ranks.send(follower, message, tensors)
        try:
            return self._compute(*copied((args, kwargs)))  # it may write to what is still sent
        except raised() as error:  # the network is the user's: it may raise anything
            _raise_if_lost(error)
            self._settle(error)
            raise

    def serve_next(self, timeout_s: float | None) -> None:
        """Wait for the lead's next call and compute it; on a follower. See `SplitNetwork`.

        Raises:
            OutOfStepError: This rank has failed alone: its process must end.
        """
        message, tensors = self._ranks.receive(0, timeout_s)
        args, kwargs = unpack(message, tensors, self._ranks.device)
        try:
            self._compute(args, kwargs)
        except raised() as error:  # as above
            _raise_if_lost(error)
            self._ranks.send(0, self._summary(error))
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

    def _summary(self, error: BaseException) -> dict[str, object]:
        text = f"{type(error).__name__}: {error}"
        return {
            "num_collectives": self._collectives.num_done,
            "error": text if self._uses_dtensor else "",
        }

    def _settle(self, error: BaseException) -> None:
        """Check that all followers have failed alike, and tell them to go on."""
        mine = self._summary(error)
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


def load_tensor_parallel(ranks: Ranks, wanted: NetworkToSplit) -> TensorParallel:
    """Load this rank's part of a network; all ranks call this.

    Raises:
        ModelError: The network cannot be loaded, hardly any of it can be split, or the split
            network computes something else.
        EOFError: Another rank has failed.
    """
    meta = MetaNetwork(wanted.build)
    network = meta.network
    source: Weights = BuiltWeights(meta)
    if wanted.weights is not None:
        source = StoredWeights(wanted.weights, network)
        check_fit(network, source.shapes, wanted.weights)
    can_verify = has_all_shapes(wanted.example)
    plan, text = choose_plan(network, ranks.size, wanted.tensor_plan, can_verify=can_verify)
    must_verify = ranks.known_split is None and not plan.styles
    verification = None
    if must_verify and ranks.rank == _LEAD:
        verification = Verification(network, wanted.example, ranks.device)
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
        report=ranks.known_split or SplitReport(note="; ".join([text, *plan.notes])),
        uses_dtensor=bool(plan.styles),
    )
    if must_verify:
        has_own_plan = bool(wanted.tensor_plan or getattr(network, "tensor_plan", None))
        if plan.is_guess and verification and verification.complaint:
            raise ModelError(f"{_UNVERIFIED}: {verification.complaint}")
        _verify(parallel, ranks, verification, origins_of(network, shapes), has_own_plan)
    fill_part(network, source, ranks.device)
    return parallel


def _verify(
    parallel: TensorParallel,
    ranks: Ranks,
    verification: Verification | None,
    origins: Sequence[Origin],
    has_own_plan: bool,
) -> None:
    """Check that the ranks together compute what the whole network does. All of them call this."""
    if verification is None:
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
    difference = verification.difference(compute, origins, tolerance)
    text = ""
    if verification.complaint:
        text = f"not compared with the whole network: {verification.complaint}"
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
    network: nn.Module, size: int, tensor_plan: OwnPlan | None, *, can_verify: bool
) -> tuple[TensorPlan, str]:
    """Choose what is split of a network: as the user says, or as is found.

    Returns:
        The plan, and a description of it for a person.

    Raises:
        ModelError: It cannot be split so, or only a small part can.
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
    if plan.is_guess and not (can_verify and not plan.styles):
        raise ModelError(
            f"{_UNVERIFIED}: "
            + (
                "torch's styles make parts that cannot be filled for a trial"
                if plan.styles
                else "give `load_network` an `example`, or a plain network the option `inputs`"
            )
        )
    num_matrices = sum(parameter.dim() > 1 for parameter in network.parameters())
    text = (
        f"1/{size} of {len(cut)} of {num_matrices} matrices, {share:.0%} of the bytes; "
        "the rest whole"
    )
    return plan, text


def cut_parameters(network: nn.Module, plan: TensorPlan) -> list[nn.Parameter]:
    """Find the matrices that a plan cuts."""
    cut = {
        id(parameter)
        for name in {cut.name for cut in plan.cuts} | set(plan.styles)
        for parameter in network.get_submodule(name).parameters()
    }
    return [each for each in network.parameters() if each.dim() > 1 and id(each) in cut]


def _raise_if_lost(error: BaseException) -> None:
    """Raise an error of a lost device: there is nothing to settle."""
    if is_lost_device(error):
        raise error
