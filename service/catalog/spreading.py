"""Plans replicas that are spread over several hosts of a cluster: which ranks go to which host."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from inferpool.models.spec import Placement
from inferpool.workers.host.devices import DeviceError, Host
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.host.placing import PlacementRequest, place, units_of
from inferpool.workers.shared.config import HostShare, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPlan:
    """The place of one replica."""

    host: str
    """Names of its hosts with "+" between them; the first one runs the lead."""
    placement: Placement
    """Placement of all ranks, for people and for what counts ranks."""
    shares: tuple[HostShare, ...]
    """Ranks of each host; empty if one host has all of them."""


class SpreadPlanner:
    """Finds devices for replicas on the hosts that are connected, on as few hosts as possible."""

    def __init__(
        self, request: PlacementRequest, hosts: Mapping[str, Host], taken: Sequence[WorkerConfig]
    ) -> None:
        """Count the devices that are left.

        On CPUs, each host counts as one device, or as many as `devices` names: more processes of a
        replica on the same cores would gain nothing.

        Args:
            request: Settings of the model; `ranks` is the number of devices of a replica.
            hosts: The hosts that are connected, by name.
            taken: Workers of the model that have devices already.
        """
        assert request.split is not None, "only a split replica can be spread"
        assert request.ranks is not None, "the settings give it"
        self._request = request
        self._num_ranks = request.ranks
        self._hosts = hosts
        self._all = dict(_of_best_kind(hosts, request.devices))
        self._left = {name: list(units) for name, units in self._all.items()}
        self._num_taken = len(taken)
        for config in taken:
            for host, placement in _places_of(config):
                self._take(host, placement)

    def plan(self) -> list[SpreadPlan]:
        """Return the places of the replicas that can be added.

        Raises:
            DeviceError: A host cannot run a part.
        """
        plans: list[SpreadPlan] = []
        most = self._request.replicas
        while most is None or self._num_taken + len(plans) < most:
            chosen = self._choose()
            if not chosen:
                break
            plans.append(self._plan_on(chosen))
        return plans

    def shortage(self) -> str:
        """Return how many devices a replica needs and which are left, for people."""
        left = ", ".join(f"{len(self._left.get(name, ()))} on {name}" for name in self._hosts)
        return f"it needs {self._num_ranks} devices, and there are {left or 'no hosts'}"

    def _choose(self) -> list[tuple[str, int]]:
        """Return hosts and their numbers of ranks, the most first; empty if devices are missing."""
        missing = self._num_ranks
        if sum(map(len, self._left.values())) < missing:
            return []
        chosen: list[tuple[str, int]] = []
        names = sorted(self._left)

        def size(name: str) -> int:
            return len(self._left[name])

        while missing:
            # The smallest host that has enough leaves the larger ones whole.
            enough = [name for name in names if size(name) >= missing]
            name = min(enough, key=size) if enough else max(names, key=size)
            num = min(missing, size(name))
            chosen.append((name, num))
            names.remove(name)
            missing -= num
        return chosen

    def _plan_on(self, chosen: Sequence[tuple[str, int]]) -> SpreadPlan:
        placements = [self._place(name, num) for name, num in chosen]
        shares = tuple(
            HostShare(host=name, placement=placement)
            for (name, _), placement in zip(chosen, placements, strict=True)
        )
        return SpreadPlan(
            host="+".join(name for name, _ in chosen),
            placement=_joined(placements),
            shares=shares if len(shares) > 1 else (),
        )

    def _place(self, name: str, num: int) -> Placement:
        """Take devices of a host, and place so many ranks there."""
        host, units = self._hosts[name], self._left[name]
        gpus = [unit for unit in units[:num] if unit is not None]
        share = max(1, host.num_cores * num // len(self._all[name]))
        placement = place(
            replace(host, gpus=tuple(gpus), num_cores=share) if gpus else host,
            replace(
                self._request,
                devices="auto" if gpus else ",".join(["cpu"] * num),
                replicas=1,
                ranks=num,
            ),
        )[0]
        self._take(name, placement)
        return placement

    def _take(self, host: str, placement: Placement) -> None:
        units = self._left.get(host, [])
        taken = Counter(placement.gpu_of_each_rank)
        num_cpus = 0 if taken else placement.num_ranks
        left: list[Gpu | None] = []
        for unit in units:
            if unit is None and num_cpus:
                num_cpus -= 1
            elif unit is not None and taken[unit.uuid]:
                taken[unit.uuid] -= 1
            else:
                left.append(unit)
        if host in self._left:
            self._left[host] = left


def _of_best_kind(
    hosts: Mapping[str, Host], devices: str
) -> Iterator[tuple[str, Sequence[Gpu | None]]]:
    """Yield the devices of each host that has some: CPUs only if no host has an accelerator."""
    found: dict[str, Sequence[Gpu | None]] = {}
    for name, host in hosts.items():
        try:
            found[name] = units_of(host, devices)
        except DeviceError:  # none of these devices is there
            continue
    has_gpus = any(unit is not None for units in found.values() for unit in units)
    for name, units in found.items():
        own = [unit for unit in units if (unit is not None) == has_gpus]
        if own:
            yield name, own


def _places_of(config: WorkerConfig) -> Iterator[tuple[str, Placement]]:
    if not config.shares:
        yield config.host, config.placement
    for share in config.shares:
        yield share.host, share.placement


def _joined(placements: Sequence[Placement]) -> Placement:
    """Return the placement of all ranks; that of the lead's host with the devices of all."""
    kind = placements[0].devices[0].partition(":")[0]
    uuids = [uuid for placement in placements for uuid in placement.gpu_of_each_rank]
    visible = tuple(dict.fromkeys(uuids))
    devices = tuple(f"{kind}:{visible.index(uuid)}" for uuid in uuids)
    if not uuids:
        devices = tuple(each for placement in placements for each in placement.devices)
    return replace(placements[0], devices=devices, visible=visible)
