"""The flags of `inferpool chaos`, and the plan that they make.

Imported whenever the command's line is read, so it imports little.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from inferpool.service.tools.trial.flags import count, folder, non_negative

Fault = Literal[
    "kill", "stop", "poison", "forkserver", "decoder", "swap", "host",
    "scribble", "exit", "burst", "unread", "greed", "store", "upload",
]  # fmt: skip

EXTRA: tuple[Fault, ...] = ("scribble", "exit", "burst", "unread", "greed", "store", "upload")
"""Faults that are off unless they are asked for, but for swaps."""
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
"""And until so many hosts were struck, each in another way."""
_OWN_FLAGS = ("requests", "kills", "seconds", "clients", "seed", "inputs", "tolerance", "hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """How long the run goes on, and how often each fault happens."""

    requests: int = 10_000
    """Least number of requests; there are also `kills` kills and one of each other fault."""
    kills: int = 10
    seconds: float | None = None
    clients: int = 16
    every_s: Mapping[Fault, float]
    """The mean time between two faults of a kind; 0 is never."""
    seed: int = 1
    inputs: Path | None = None
    tolerance: float = 1e-3
    is_json: bool = False
    hosts: int = 0
    """Agents that run the workers, each as a host of its own; 0 for workers of the front end."""

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
    load = parser.add_argument_group("load")
    load.add_argument(
        "--requests",
        type=count,
        default=10_000,
        metavar="N",
        help="go on until at least so many numbered requests are sent (default: 10000)",
    )
    load.add_argument(
        "--kills",
        type=count,
        default=10,
        metavar="N",
        help="and at least so many workers are killed, which takes a quick model far more requests "
        "(default: 10)",
    )
    load.add_argument(
        "--seconds", type=non_negative, metavar="S", help="for so long instead of both"
    )
    load.add_argument(
        "--clients", type=count, default=16, metavar="N", help="at once (default: 16)"
    )
    load.add_argument(
        "--inputs",
        type=folder,
        metavar="DIR",
        help="ask with these files: images, .npy, .safetensors, .json, .bin (default: made up)",
    )
    load.add_argument(
        "--tolerance",
        type=non_negative,
        default=1e-3,
        metavar="X",
        help="by how much of itself a float may differ, since batches of different sizes are "
        "rounded differently (default: 0.001)",
    )
    load.add_argument(
        "--hosts",
        type=count,
        default=0,
        metavar="N",
        help="run the workers on N hosts: agents on this machine, which join the front end "
        "(default: none)",
    )
    faults = parser.add_argument_group("faults, each at random times; 0 for never")
    for kind, default, what in (
        ("kill", 2.0, "SIGKILL a worker"),
        ("stop", 15.0, "SIGSTOP a worker, so that it hangs"),
        ("poison", 10.0, "send an input that kills any worker that takes it"),
        ("forkserver", 10.0, "SIGKILL or SIGSTOP the process that forks workers"),
        ("decoder", 5.0, "SIGKILL or SIGSTOP a decoder, if workers have some,"),
        (
            "swap",
            0.0,
            "swap a model to an equal version, which needs memory for both,",
        ),
        (
            "host",
            5.0,
            "with --hosts: SIGKILL an agent, SIGSTOP it and its workers, or SIGTERM it, in turn,",
        ),
        ("scribble", 0.0, "send an input whose model code writes to every descriptor it has,"),
        ("exit", 0.0, "send an input whose model code raises SystemExit,"),
        ("burst", 0.0, "SIGKILL the process that forks workers five times in a row,"),
        ("unread", 0.0, "open connections that ask and read nothing,"),
        ("greed", 0.0, "ask with a second key and eight times the clients,"),
        ("store", 0.0, "delete the folder of the job store while jobs run,"),
        ("upload", 0.0, "hold 64 uploads of jobs open with a second key,"),
    ):
        faults.add_argument(
            f"--{kind}-every",
            type=non_negative,
            default=default,
            metavar="S",
            help=f"{what} every S seconds (default: {default:g})",
        )
    faults.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="decides the inputs, and what is done when (default: 1)",
    )
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
