"""A network as stages on several ranks, each with the memory of its own. Worker processes only.

A batch goes through in pieces: a rank computes one while those after it compute the pieces before.
The next batch follows, where threads of the lead call with several: each enters when the one before
has sent its last piece, and all come out in the order of their entry. The values that a
stage makes travel with a message that describes them, so shapes may differ from call to call; and a
stage that raises sends the error on instead, so that no rank waits for ever.

`torch.distributed.pipelining.ScheduleGPipe` wants fixed shapes, and leaves the other ranks waiting
in a receive when one raises. It is no faster: resnet18 in two stages, batches of 8 in 1, 2, 4 and 8
pieces, one thread each, 15 alternating pairs on two cores under load: 1.02, 1.01, 0.92 and 1.00
times our time (medians; quartiles within 0.86 to 1.06).
"""

import inspect
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from inferpool.models.accelerator.device import release_memory
from inferpool.models.accelerator.failures import is_lost_device, is_out_of_memory, raised
from inferpool.models.accelerator.order import OwnStream
from inferpool.models.errors import ModelError, RankError
from inferpool.models.files.checkpoint import StoredWeights, check_fit
from inferpool.models.runtime import NetworkToSplit
from inferpool.models.spec import RankPart, SplitReport
from inferpool.models.split.cuts import choose_cuts, verified
from inferpool.models.split.meta_network import MetaNetwork, fill, num_bytes
from inferpool.models.split.micro_batches import MicroBatches
from inferpool.models.split.packing import (
    have_different_rows,
    join_rows,
    num_rows,
    pack,
    split_rows,
    unpack,
)
from inferpool.models.split.ranks import Ranks
from inferpool.models.split.stages import ForwardSteps
from inferpool.models.split.turnstile import PipelineCall, Turnstile
from inferpool.models.split.verification import copied, deviation
from inferpool.models.texts import described

logger = logging.getLogger(__name__)

_LEAD = 0
_WINDOW = 2
"""Pieces on their way per rank: enough to compute while others travel, and few to hold."""
_NUM_CHECKS = 8
"""Batches in pieces, with rows that differ, that are also computed whole."""
_PIECES_TOLERANCE = 0.02
"""Share of the largest output: kernels differ with the batch size; bfloat16 keeps three digits."""


class Pipeline:
    """One rank's stage, and on the lead the way through all of them.

    Several threads of the lead may call it at once, if those that hold `Ranks.giving_way` make sure
    that only one runs at a time otherwise.
    """

    def __init__(
        self,
        ranks: Ranks,
        stage: nn.Module,
        steps: ForwardSteps,
        part: RankPart,
        report: SplitReport,
    ) -> None:
        self.part = part
        self.report = report
        self._ranks = ranks
        self._stage = stage
        self._own_stream = OwnStream(ranks.device)
        self._signature = inspect.signature(steps.network.forward)
        self._arguments = steps.arguments
        self._name = type(steps.network).__name__
        self._turnstile = Turnstile()
        self._alone, self._beside = MicroBatches(), MicroBatches()
        """A batch beside another, which keeps the other stages busy, wants other pieces."""
        self._has_rows = True
        """Each row of an output is made of one row of the inputs, as far as is known: otherwise
        batches go through whole."""
        self._num_checks_left = _NUM_CHECKS

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Send a batch through all stages."""
        inputs = self._bound(args, kwargs)
        rows = num_rows(inputs)
        if rows is None or not self._has_rows:
            return self._whole(inputs)
        is_alone = self._turnstile.is_empty
        micro_batches = self._alone if is_alone else self._beside
        num_pieces = micro_batches.choose(rows)
        try:
            # The network may write to its inputs, so pieces are cut of a copy.
            pieces = split_rows(copied(inputs), num_pieces) if num_pieces > 1 else [inputs]
            call, outputs = self._sent(pieces)
            if call.is_alone == is_alone:
                micro_batches.note(rows, num_pieces, call.seconds)
            if num_pieces == 1:
                return outputs[0]
            result = join_rows(outputs, rows)
        except (EOFError, torch.AcceleratorError):
            raise
        except raised() as error:  # the network is the user's: it may raise anything
            if num_pieces == 1 or is_out_of_memory(error):
                raise
            whole = self._whole(inputs)  # raises if it is not for the pieces
            self._give_up_pieces(f"{type(error).__name__}: {error}")
            return whole
        if not self._num_checks_left or not have_different_rows(inputs):
            return result
        whole = self._whole(inputs)
        if difference := deviation(result, whole, _PIECES_TOLERANCE):
            self._give_up_pieces(difference)
        elif self._num_checks_left:  # another batch may have been checked meanwhile
            self._num_checks_left -= 1
        return whole

    def _whole(self, inputs: Any) -> Any:
        _, (output,) = self._sent([inputs])
        return output

    def _give_up_pieces(self, reason: str) -> None:
        self._has_rows = False
        text = "%s computes the rows of a batch together (%s): it goes through whole"
        logger.warning(text, self._name, reason)

    def serve_next(self, timeout_s: float) -> None:
        """Compute this stage of a piece, and send on its result or its error."""
        ranks = self._ranks
        free_since = time.monotonic()
        message, tensors = ranks.receive(ranks.rank - 1, timeout_s)
        assert isinstance(message, list)
        if message[0] == "values":
            _, packed, sent_at, held_up_s = message
            held_up_s += max(0.0, free_since - sent_at)
            self._pass_on(unpack(packed, tensors, ranks.device), held_up_s)
        else:
            ranks.send((ranks.rank + 1) % ranks.size, message, tensors)

    def _sent(self, pieces: Sequence[Any]) -> tuple[PipelineCall, list[Any]]:
        """Send pieces through all stages, while the caller's thread gives way to others."""
        with self._ranks.giving_way() as clock:
            call = self._turnstile.enter(clock)
            replies, failed = self._run(call, pieces)
            call.leave()
        if failed is not None:
            raise failed
        return call, [self._output(message, tensors) for message, tensors in replies]

    def _run(
        self, call: PipelineCall, pieces: Sequence[Any]
    ) -> tuple[list[tuple[object, list[Tensor]]], BaseException | None]:
        """Compute the first stage of each piece while the other ranks have those before it.

        Returns:
            All replies, and the error of the first stage, to be raised again now that the others
            have nothing of this call any more.
        """
        ranks = self._ranks
        failed: BaseException | None = None
        num_sent = 0
        replies: list[tuple[object, list[Tensor]]] = []
        for piece in pieces:
            if num_sent - len(replies) >= _WINDOW * ranks.size:
                replies.append(self._reply(call))
            try:
                self._compute(piece, 0.0)
            except raised() as error:  # the network is the user's: it may raise anything
                failed = error
                break
            num_sent += 1
        # Not after an error that ends the process, here or below: else another call would get this
        # one's replies.
        self._turnstile.let_next_in()
        while len(replies) < num_sent:
            replies.append(self._reply(call))
        return replies, failed

    def _reply(self, call: PipelineCall) -> tuple[object, list[Tensor]]:
        call.wait_for_others()
        message, tensors = self._ranks.receive(self._ranks.size - 1)
        assert isinstance(message, list)
        if message[0] == "values":
            call.was_held_up(message[3])
        return message, tensors

    def _output(self, message: Any, tensors: Sequence[Tensor]) -> Any:
        if message[0] == "error":
            _, rank, text, is_shortage = message
            raise RankError(rank, text, is_out_of_memory=is_shortage)
        return unpack(message[1], tensors, self._ranks.device)

    def _compute(self, values: Sequence[Any], held_up_s: float) -> None:
        """Compute this stage, wait until the device has done it, and send the results on.

        So the lead measures the time of the work, and a piece that waits for a stage does so on the
        host, where others can be computed meanwhile. The threads of the lead have this stage on one
        stream, since each stream keeps the memory that it has once needed.
        """
        ranks = self._ranks
        with self._own_stream.inserted():
            with torch.inference_mode():
                packed, tensors = pack(self._stage(*values), ranks.device)
            self._own_stream.finish()
            ranks.send((ranks.rank + 1) % ranks.size, _values(packed, held_up_s), tensors)

    def _pass_on(self, values: Sequence[Any], held_up_s: float) -> None:
        """Compute this stage, or send its error on."""
        ranks = self._ranks
        try:
            self._compute(values, held_up_s)
        except raised() as error:  # the network is the user's: it may raise anything
            if is_lost_device(error):
                raise  # and this rank is lost with it
            is_shortage = is_out_of_memory(error)
            logger.exception("stage %d failed", ranks.rank)
            text = described(error)
            traceback.clear_frames(error.__traceback__)
            if is_shortage:
                release_memory()
            else:
                self._own_stream.finish()  # raises if the context is lost
            ranks.send((ranks.rank + 1) % ranks.size, ["error", ranks.rank, text, is_shortage])

    def _bound(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
        """Return the values of the arguments that the network was traced with, in their order."""
        bound = self._signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name not in self._arguments and value != self._signature.parameters[name].default:
                raise TypeError(
                    f"the network was cut for calls without {name!r}: have it in the `example` of "
                    f"`load_network`"
                )
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self._arguments)


def _values(packed: object, held_up_s: float) -> list[object]:
    """Return the message that describes the values of a piece.

    Args:
        packed: See `pack`.
        held_up_s: Seconds that the piece waited in front of stages that were busy with others.
    """
    return ["values", packed, time.monotonic(), held_up_s]


def load_pipeline(ranks: Ranks, network: NetworkToSplit) -> Pipeline:
    """Load this rank's stage of a network; the lead chooses where to cut it.

    All ranks call this. The others wait for the lead, so that files that `build` fetches are there
    for them.

    Raises:
        ModelError: The network cannot be loaded or cut, on this rank or on another.
        EOFError: Another rank has failed.
    """
    if ranks.rank != _LEAD:
        ranks.send(_LEAD, ranks.room_bytes)
        received = msgspec.convert(ranks.receive(_LEAD)[0], SplitReport)
        try:
            pipeline = _load_stage(ranks, network, lambda _: received)
        except ModelError as error:
            ranks.send(_LEAD, str(error) or "it cannot be loaded")
            raise
        ranks.send(_LEAD, "")
        return pipeline

    def choose(steps: ForwardSteps) -> SplitReport:
        rooms: list[Any] = [ranks.receive(rank)[0] for rank in range(1, ranks.size)]
        report = ranks.known_split
        if report is None or len(report.cuts) != ranks.size - 1:
            report = choose_cuts(ranks, steps, network, min(ranks.room_bytes, *rooms))
            report = verified(steps, report, network.example, ranks.device)
        steps.positions(report.cuts)  # before the others try
        for rank in range(1, ranks.size):
            ranks.send(rank, msgspec.to_builtins(report))
        return report

    pipeline = _load_stage(ranks, network, choose)
    for rank in range(1, ranks.size):
        if problem := ranks.receive(rank)[0]:
            raise ModelError(f"rank {rank}: {problem}")
    return pipeline


def _load_stage(
    ranks: Ranks, network: NetworkToSplit, choose: Callable[[ForwardSteps], SplitReport]
) -> Pipeline:
    meta = MetaNetwork(network.build)
    path = network.weights
    stored = None if path is None else StoredWeights(path, meta.network)
    shapes = stored.shapes if stored else {}
    if stored:
        check_fit(meta.network, shapes, stored.path)
    steps = ForwardSteps(meta.network, network.example)
    report = choose(steps)
    begin, end = steps.stages(steps.positions(report.cuts))[ranks.rank]
    stage = steps.cut(begin, end)
    if stored:
        fill(stage, lambda name: stored.read(name) if name in shapes else None, ranks.device)
    else:
        fill(stage, meta.built(dict(stage.state_dict(keep_vars=True))).get, ranks.device)
    part = RankPart(ranks.rank, num_bytes(stage), steps.describe(begin, end))
    return Pipeline(ranks, stage, steps, part, report)
