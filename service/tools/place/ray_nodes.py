"""All calls of Ray: nodes, drains, placement, actors, requests for more hosts.

Only this module imports Ray, and only inside functions. It runs in a process of its own, since Ray
terminates a driver if its GCS is gone.

Errors::

    NoRayError                  Ray cannot be spoken to now; a later try may succeed
    └── VersionsError           nor will it be later: the versions of Ray or Python differ
"""

import contextlib
import json
import logging
import os
import platform
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module, metadata
from typing import Any

from inferpool.service.tools.place.keeper import Keeper

logger = logging.getLogger(__name__)

_PREFIX = "inferpool-agent-"
"""Prefix of the names of actors and placement groups, before the id of their node."""
_NODE_LABEL = "ray.io/node-id"
"""Ray gives each node this label."""
_LOOK_S = 0.5
"""How long one call of `look` waits for actors that have not answered yet."""
_CALL_S = 10.0
"""How long calls to the GCS or to an actor may take."""
_VERSIONS = re.compile(
    r"cluster was started with:\s*Ray: (\S+)\s*Python: (\S+).*?"
    r"was started with:\s*Ray: (\S+)\s*Python: (\S+)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNode:
    """A living node of the cluster that an agent can run on."""

    id: str
    hostname: str
    num_gpus: int
    is_draining: bool = False
    """It will leave soon, or Ray has been asked to empty it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperState:
    """State of an agent, as its actor reports it."""

    pid: int | None = None
    """None if no agent runs."""
    exit_status: int | None = None
    is_stopping: bool = False
    problem: str = ""
    order: str = ""
    """Digest of the order that it was started with; empty before the first."""
    niceness: int = 0
    python: str = ""


class Gone(Enum):
    """Why an actor does not report its state."""

    SILENT = "silent"
    """It has not started yet, or does not answer now."""
    DEAD = "dead"


class NoRayError(Exception):
    """Ray cannot be reached now."""


class VersionsError(NoRayError):
    """The versions of Ray or Python differ from those of the cluster."""


class RayNodes:
    """The nodes of a Ray cluster, and the actors on them. Used by one thread.

    Every call returns within seconds.
    """

    def __init__(
        self, address: str, namespace: str, cpus_per_host: int, gpus_per_host: int
    ) -> None:
        """Store what to reserve, and where.

        Args:
            address: Where the cluster's GCS listens, as HOST:PORT, or "auto".
            namespace: Ray's namespace of the actors.
            cpus_per_host: CPUs to reserve on each host.
            gpus_per_host: GPUs that a node must have; all of its GPUs are reserved.
        """
        self._address = address
        self._namespace = namespace
        self._cpus_per_host = cpus_per_host
        self._gpus_per_host = gpus_per_host
        self._gcs: Any = None
        self._looks: dict[str, Any] = {}
        """Calls of `look` that have not been answered, by node."""
        self._warned = False

    def connect(self) -> None:
        """Connect as a driver of the cluster.

        Raises:
            VersionsError: It has other versions of Ray or Python.
            NoRayError: It cannot be reached.
        """
        # For this process, before Ray is imported: it sends no statistics, and copies nothing to
        # the workers when `uv run` has started us.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        with _restored():
            import ray

            gcs_client = import_module("ray._raylet").GcsClient  # its stub does not have it
            try:
                ray.init(
                    address=self._address,
                    namespace=self._namespace,
                    log_to_driver=False,
                    configure_logging=False,
                )
            except RuntimeError as error:
                raise _init_error(str(error)) from error
            except (ConnectionError, ValueError, OSError) as error:
                raise NoRayError(f"no Ray cluster at {self._address}: {_short(error)}") from error
            self._gcs = gcs_client(address=ray.get_runtime_context().gcs_address)

    def nodes(self) -> Sequence[HostNode]:
        """Return the living nodes that are large enough for an agent."""
        import ray

        with _as_no_ray():
            seen = [node for node in ray.nodes() if node["Alive"]]
            draining = self._gcs.get_draining_nodes(timeout=_CALL_S)
        hosts = [
            HostNode(
                id=str(node["NodeID"]),
                hostname=str(node["NodeManagerHostname"]),
                num_gpus=int(node["Resources"].get("GPU", 0)),
                is_draining=node["NodeID"] in draining,
            )
            for node in seen
            if node["Resources"].get("CPU", 0) >= self._cpus_per_host
            and node["Resources"].get("GPU", 0) >= self._gpus_per_host
        ]
        if not hosts and not self._warned:
            logger.warning(
                "none of the cluster's %d nodes has %d CPUs and %d GPUs: --cpus-per-host and "
                "--gpus-per-host say what a host must have",
                *(len(seen), self._cpus_per_host, self._gpus_per_host),
            )
        self._warned = not hosts
        return hosts

    def keepers(self) -> Sequence[str]:
        """Return the ids of the nodes for which there is an actor."""
        import ray.util

        with _as_no_ray():
            names = ray.util.list_named_actors()
        return [name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)]

    def place(self, node: HostNode) -> None:
        """Reserve the node's GPUs, unless they are, and begin to start an actor there."""
        import ray
        from ray.util.placement_group import get_placement_group, placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        name = _PREFIX + node.id
        self._looks.pop(node.id, None)
        bundle = self._bundle(node.num_gpus)
        with _as_no_ray():
            try:
                group = get_placement_group(name)
            except ValueError:
                group = placement_group(
                    [bundle],
                    strategy="STRICT_SPREAD",
                    name=name,
                    lifetime="detached",
                    bundle_label_selector=[{_NODE_LABEL: node.id}],
                )
            with contextlib.suppress(ValueError):  # the name of a killed actor is not free yet
                ray.remote(Keeper).options(
                    name=name,
                    lifetime="detached",
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=0
                    ),
                ).remote()

    def look(self, ids: Sequence[str]) -> Mapping[str, KeeperState | Gone]:
        """Return the states that the actors of these nodes report, within half a second."""
        import ray

        states: dict[str, KeeperState | Gone] = {}
        with _as_no_ray():
            for id in ids:
                if id not in self._looks:
                    actor = self._actor(id)
                    if actor is None:
                        states[id] = Gone.DEAD
                    else:
                        self._looks[id] = actor.look.remote()
            asked = {ref: id for id, ref in self._looks.items() if id in ids}
            if not asked:
                return states
            answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_LOOK_S)
            states |= {asked[ref]: Gone.SILENT for ref in silent}
            for ref in answered:
                del self._looks[asked[ref]]
                try:
                    told = json.loads(ray.get(ref, timeout=_CALL_S))
                except ray.exceptions.RayActorError:
                    states[asked[ref]] = Gone.DEAD
                else:
                    states[asked[ref]] = KeeperState(**told)
        return states

    def start(self, id: str, order: bytes) -> None:
        """Start the agent of an actor."""
        self._tell(id, "start", order)

    def stop(self, id: str) -> None:
        """Stop the agent of an actor; it drains first."""
        self._tell(id, "stop")

    def remove(self, id: str) -> None:
        """End the actor of a node and its agent, and free the GPUs."""
        import ray
        from ray.util.placement_group import get_placement_group, remove_placement_group

        self._looks.pop(id, None)
        with _as_no_ray():
            actor = self._actor(id)
            if actor is not None:
                ray.kill(actor, no_restart=True)
            with contextlib.suppress(ValueError):  # there is none
                remove_placement_group(get_placement_group(_PREFIX + id))

    def ask_for(self, num_hosts: int) -> None:
        """Request a number of hosts from the cluster's autoscaler, if there is one."""
        from ray.autoscaler.sdk import request_resources

        with _as_no_ray():
            request_resources(bundles=[self._bundle(self._gpus_per_host)] * num_hosts)

    def _bundle(self, num_gpus: int) -> dict[str, int]:
        gpus = {"GPU": num_gpus} if num_gpus else {}
        return {"CPU": self._cpus_per_host, **gpus}

    def _actor(self, id: str) -> Any:
        """Return the handle of a node's actor; None if there is none."""
        import ray

        try:
            return ray.get_actor(_PREFIX + id)
        except ValueError:
            return None

    def _tell(self, id: str, method: str, *arguments: bytes) -> None:
        import ray

        with _as_no_ray():
            actor = self._actor(id)
            if actor is None:
                return  # the next call of `look` reports it
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                ray.get(getattr(actor, method).remote(*arguments), timeout=_CALL_S)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Undo what Ray changes in this process: the handler of SIGTERM, and how records are made."""
    handler, factory = signal.getsignal(signal.SIGTERM), logging.getLogRecordFactory()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        logging.setLogRecordFactory(factory)


@contextlib.contextmanager
def _as_no_ray() -> Iterator[None]:
    """Raise errors of the connection as `NoRayError`."""
    import ray

    try:
        yield
    except (ray.exceptions.RayError, ray.exceptions.RpcError, ConnectionError) as error:
        raise NoRayError(f"Ray does not answer: {_short(error)}") from error
    except RuntimeError as error:  # Ray's error for failed RPCs
        raise NoRayError(f"Ray cannot do it: {_short(error)}") from error


def _init_error(text: str) -> NoRayError:
    if match := _VERSIONS.search(text):
        ray_there, python_there, ray_here, python_here = match.groups()
        return VersionsError(
            f"the cluster runs Ray {ray_there} on Python {python_there}, and this is Ray "
            f"{ray_here} on Python {python_here}: both must be the same, to the last number"
        )
    return NoRayError(f"Ray cannot be joined: {text.strip().splitlines()[0] if text else ''}")


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def versions() -> str:
    """Return the versions of Ray and Python, for a log line."""
    return f"Ray {metadata.version('ray')}, Python {platform.python_version()}"
