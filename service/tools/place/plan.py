"""The flags of `inferpool place`. The parser of the command imports this, so it imports little."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from inferpool.service.client.cli.access import key_of, url_of
from inferpool.service.client.cli.flags import METRICS_KEY_VARIABLE
from inferpool.service.settings.address import address_of
from inferpool.service.settings.fields import FieldText, add_flags_of, fields_of
from inferpool.service.settings.names import FlagError

CLUSTER_KEYS_VARIABLE = "INFERPOOL_CLUSTER_KEYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePlan:
    """The flags of `inferpool place`, with their help, and the variables that it reads."""

    join: Annotated[str | None, "HOST:PORT"] = None
    """Address of the front end's cluster port, as the hosts reach it; several with commas."""
    stop: bool = False
    """Let all agents drain and end, free what Ray has reserved for them, and leave."""
    address: Annotated[str, "HOST:PORT"] = "auto"
    """Address of Ray's head (default: auto, the cluster that this host is a node of)."""
    namespace: Annotated[str, "NAMESPACE"] = "inferpool"
    """Ray's namespace of the actors; each service needs its own."""
    gpus_per_host: int = 1
    """GPUs that a node must have to get an agent, which takes all of them, and that an autoscaler
    is asked for (default: 1; 0 for hosts without GPUs)."""
    cpus_per_host: int = 1
    """CPUs that Ray reserves on each host, and an autoscaler is asked for."""
    drain_timeout_s: Annotated[float, "S"] = 60
    """How long an agent may drain before it is killed."""
    min_hosts: int = 1
    """The fewest hosts."""
    max_hosts: int | None = None
    """The most hosts (default: all that the cluster has; needed with --front-end)."""
    front_end: Annotated[str | None, "URL"] = None
    """Address of the front end: as many hosts as its load needs. The key for its metrics is the
    first of the variable INFERPOOL_METRICS_KEYS."""
    objective_p99_ms: Annotated[float, "MS"] = 0.0
    """Ask for more hosts, too, when the 99th percentile of the latency is longer (default:
    never)."""
    ca_file: Path | None = None
    """Trust the certificates in this PEM file."""
    insecure: bool = False
    """Trust any certificate."""
    agent_flags: Sequence[str] = ()
    cluster_keys: str | None = None
    metrics_key: str = ""

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command `inferpool`, for each agent."""
        return ["agent", "--join", self.join or "", *self.agent_flags]

    @property
    def environ(self) -> Mapping[str, str]:
        """Variables of the agents alone: the cluster's keys."""
        return {CLUSTER_KEYS_VARIABLE: self.cluster_keys} if self.cluster_keys else {}

    @property
    def verify(self) -> bool | str:
        """True if certificates are checked, or the file of trusted ones."""
        return False if self.insecure else str(self.ca_file or "") or True


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of `place`."""
    parser.add_argument(
        "agent_flags",
        nargs="*",
        metavar="-- AGENT_FLAGS",
        help="what else each agent is started with: see `inferpool agent --help`",
    )
    add_flags_of(parser, _flags(), {"address": "the Ray cluster", "min_hosts": "how many hosts"})


def plan_of(args: Namespace, environ: Mapping[str, str]) -> PlacePlan:
    """Return the plan from the flags and variables.

    Raises:
        FlagError: They make no sense.
    """
    if args.join is None and not args.stop:
        raise FlagError("--join: where do the agents find the front end? Name HOST:PORT")
    try:
        for each in args.join.split(",") if args.join is not None else ():
            address_of(each.strip())
    except ValueError as error:  # else every agent would repeat it
        raise FlagError(f"--join: {error}") from error
    for flag in ("min_hosts", "max_hosts", "cpus_per_host"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise FlagError(f"--{flag.replace('_', '-')}: {value} is less than 1")
    if args.gpus_per_host < 0:
        raise FlagError(f"--gpus-per-host: {args.gpus_per_host} is less than 0")
    if not args.drain_timeout_s >= 0 or not args.objective_p99_ms >= 0:
        raise FlagError("--drain-timeout-s and --objective-p99-ms must be 0 or more")
    if args.front_end and args.max_hosts is None:
        raise FlagError("--front-end needs --max-hosts: how many hosts may it ask for?")
    if args.max_hosts is not None and args.min_hosts > args.max_hosts:
        raise FlagError(f"--min-hosts: {args.min_hosts} is more than --max-hosts, {args.max_hosts}")
    flags = {each.name: getattr(args, each.name) for each in _flags()}
    if args.front_end:
        flags["front_end"] = url_of(args.front_end)
        flags["metrics_key"] = key_of(None, environ, METRICS_KEY_VARIABLE)
    keys = environ.get(CLUSTER_KEYS_VARIABLE)
    return PlacePlan(agent_flags=args.agent_flags, cluster_keys=keys, **flags)


def _flags() -> Iterator[FieldText]:
    return fields_of(__name__, PlacePlan.__name__)
