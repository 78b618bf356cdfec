"""The flags of `inferpool chaos`, and the plan that they make.

Imported whenever the command's line is read, so it imports little.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from inferpool.service.settings.fields import add_flag, add_flags_of, fields_of
from inferpool.service.tools.trial.flags import (
    READERS,
    Count,
    Folder,
    NonNegative,
    Seconds,
    non_negative,
)

Fault = Literal[
    "kill", "stop", "poison", "forkserver", "decoder", "swap", "host",
    "scribble", "exit", "burst", "unread", "greed", "store", "upload",
]  # fmt: skip

CallKind = Literal[
    "predict", "v2", "v1", "grpc", "embeddings", "rerank", "tei",
    "torchserve", "sagemaker", "vertex",
]  # fmt: skip
"""Protocols of the numbered requests."""

EXTRA: tuple[Fault, ...] = ("scribble", "exit", "burst", "unread", "greed", "store", "upload")
"""Faults that are off by default, without swaps."""
SCARCE: tuple[Fault, ...] = ("stop", "poison", "forkserver", "swap", *EXTRA)
"""The run goes on until there was one of each of these, unless its interval is 0."""
PLURALS: Mapping[Fault, str] = {
    "kill": "kills", "stop": "stops", "poison": "poisons", "forkserver": "forkservers",
    "decoder": "decoders", "host": "hosts", "swap": "swaps", "scribble": "scribbling inputs",
    "exit": "inputs that exit", "burst": "bursts", "unread": "rounds of unread connections",
    "greed": "greedy rounds", "store": "stores deleted",
    "upload": "rounds of slow uploads",
}  # fmt: skip
"""Names of several faults of a kind."""
HOST_STRIKES = 3
"""And until this number of hosts was struck, each in another way."""
_OWN_FLAGS = (
    "requests", "kills", "seconds", "clients", "inputs", "tolerance", "hosts", "protocol", "seed",
)  # fmt: skip


_FAULTS: Mapping[Fault, tuple[float, str]] = {
    "kill": (2.0, "SIGKILL a worker"),
    "stop": (15.0, "SIGSTOP a worker, so that it hangs"),
    "poison": (10.0, "send an input that kills any worker that takes it"),
    "forkserver": (10.0, "SIGKILL or SIGSTOP the process that forks workers"),
    "decoder": (5.0, "SIGKILL or SIGSTOP a decoder, if workers have some,"),
    "swap": (0.0, "swap a model to an equal version, which needs memory for both,"),
    "host": (
        5.0,
        "with --hosts: SIGKILL an agent, SIGSTOP it and its workers, or SIGTERM it, in turn,",
    ),
    "scribble": (0.0, "send an input whose model code writes to every descriptor it has,"),
    "exit": (0.0, "send an input whose model code raises SystemExit,"),
    "burst": (0.0, "SIGKILL the process that forks workers five times in a row,"),
    "unread": (0.0, "open connections that ask and read nothing,"),
    "greed": (0.0, "ask with a second key and eight times the clients,"),
    "store": (0.0, "delete the folder of the job store while jobs run,"),
    "upload": (0.0, "hold 64 uploads of jobs open with a second key,"),
}
"""The seconds between two faults of a kind by default, and what they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """How long the run goes on, and how often each fault happens."""

    requests: Count = 10_000
    """Go on until at least this many numbered requests are sent."""
    kills: Count = 10
    """And until at least this many workers are killed, which takes a quick model far more
    requests."""
    seconds: Seconds | None = None
    """Go on for these seconds instead of both."""
    clients: Count = 16
    """Clients at once."""
    inputs: Folder | None = None
    """Ask with the files in this folder: images, .npy, .safetensors, .json, .bin (default: made
    up)."""
    tolerance: NonNegative = 1e-3
    """The part of itself by which a float may differ, since batches of different sizes are rounded
    differently."""
    hosts: Count = 0
    """Run the workers on N hosts: agents on this machine, which join the front end (default:
    none)."""
    protocol: CallKind = "predict"
    """Ask by /predict, by the Open Inference Protocol (v2), by KServe's version 1 (v1), by the
    former over gRPC, which needs the extra grpc; or a model of texts by OpenAI's embeddings, by
    Cohere's rerank, or by Text Embeddings Inference (tei); or as TorchServe, SageMaker and Vertex
    AI are asked, the latter for the only model."""
    seed: int = 1
    """Decides the inputs, and what is done when."""
    every_s: Mapping[Fault, float]
    is_json: bool = False

    @property
    def planned_kills(self) -> int:
        """Number of kills there should be."""
        every_s = self.every_s["kill"]
        if not every_s:
            return 0
        return self.kills if self.seconds is None else int(self.seconds / every_s)

    @property
    def text(self) -> str:
        """Text that says when the run ends."""
        if self.seconds is not None:
            return f"for {self.seconds:g} s"
        kills = f" and {self.kills} kill{'s' * (self.kills > 1)}" if self.every_s["kill"] else ""
        others: list[str] = [kind for kind in SCARCE if self.every_s[kind]]
        rest = f", and one {' and one '.join(others)}" if others else ""
        hosts = f", and {HOST_STRIKES} hosts struck" if self.every_s["host"] else ""
        return f"until there are at least {self.requests:,} requests{kills}{rest}{hosts}"


def shown_share(shares: Sequence[float]) -> float:
    """Return how much of a run is done, from 0 to 1, for people.

    It moves with each thing that has to be done. The least of them would stay at 0 until the
    rarest fault has struck, and jump to 1 then.
    """
    return sum(min(share, 1.0) for share in shares) / len(shares)


def add_flags(parser: ArgumentParser) -> None:
    """The flags of the verb, beside those of the settings."""
    *load, seed = fields_of(__name__, ChaosPlan.__name__)
    add_flags_of(parser, load, {"requests": "load"}, READERS)
    faults = parser.add_argument_group("faults, each at random times; 0 for never")
    for kind, (every_s, what) in _FAULTS.items():
        faults.add_argument(
            f"--{kind}-every",
            type=non_negative,
            default=every_s,
            metavar="S",
            help=f"{what} every S seconds (default: {every_s:g})",
        )
    add_flag(seed, faults)
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, and as text on stderr"
    )


def plan_of(args: Namespace) -> ChaosPlan:
    """Return the plan that the flags make."""
    every_s = {fault: getattr(args, f"{fault}_every") for fault in get_args(Fault)}
    # The front end of several hosts forks no workers, and has no host to lose if it is alone.
    for fault in ("forkserver", "burst") if args.hosts else ("host",):
        every_s[fault] = 0.0
    return ChaosPlan(
        every_s=every_s,
        is_json=args.json,
        **{name: getattr(args, name) for name in _OWN_FLAGS},
    )
