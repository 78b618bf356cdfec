"""Places the replicas of models: decides the devices, cores and threads of each. Front end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from inferpool.models.accelerator.kinds import accelerator_of
from inferpool.models.spec import Placement, Split
from inferpool.workers.host.devices import (
    DEVICE_FORMS,
    DeviceError,
    Host,
    called,
    parse_devices,
)
from inferpool.workers.host.gpus import Gpu

_MAX_CPU_REPLICAS = 8
"""Replicas on the CPUs of one host; with more cores they get more threads instead."""
_MIN_RANKS = 2
CONTEXT_BYTES = 800 << 20
"""GPU memory that each process takes besides torch's allocations: CUDA's context and the kernels.
On an H200 with CUDA 13 it was 616 MiB for the context, and 793 with the kernels of networks."""
_FAR = 50
"""NVML_TOPOLOGY_SYSTEM, the assumed distance of GPUs if the host does not tell it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Settings for the placement of the replicas of one model."""

    devices: str = "auto"
    """Devices in the form of `parse_devices`; "auto": every GPU, else the CPU."""
    replicas: int | None = None
    """Number of replicas. None: one for each GPU or group of GPUs; without GPUs one for each group
    of cores, and only one if the model is split."""
    threads: int | None = None
    """Intra-op threads of each process; None: an equal share of the cores."""
    split: Split | None = None
    """Way to split each replica; None keeps it on one device."""
    ranks: int | None = None
    """Number of devices of each split replica; None: as many as there are, and two on CPUs."""
    memory_fraction: float | None = None
    """Largest share of its GPU's memory that each process may allocate; None: an equal share if
    several processes of this model share a GPU, else all."""


def place(host: Host, request: PlacementRequest) -> list[Placement]:
    """Place the replicas of one model.

    Returns:
        One placement per replica. The threads of all processes add up to the host's cores at most,
        unless there are more processes than cores.

    Raises:
        DeviceError: A device does not exist on this host, or there are too few.
    """
    units = _units_of(host, request.devices)
    gpus = [unit for unit in units if unit is not None]
    if request.split and gpus:
        placements = _place_groups_of_gpus(host, units, gpus, request)
    elif request.split:
        placements = _place_groups_of_cores(host, len(units), request)
    elif gpus or len(units) > 1:
        placements = _place_round(host, units, request)
    else:
        placements = _place_on_cores(host, request.replicas, request.threads)
    if gpus and request.threads is None:
        placements = _share_near_cores(host, placements)
    return _share_memory(host, placements, request.memory_fraction)


def share_cores(host: Host, asked: Sequence[int | None]) -> list[Host]:
    """Divide the cores of a host among models that are loaded side by side.

    Args:
        host: The whole host.
        asked: Cores of each model by its settings; None: an equal share of the cores that are left,
            and at least one.

    Returns:
        The part of the host for each model; the whole host if there is only one.
    """
    if len(asked) == 1:
        return [host]
    left = max(0, host.num_cores - sum(each for each in asked if each is not None))
    share, rest = divmod(left, asked.count(None) or 1)
    counts = []
    for each in asked:
        counts.append(max(1, share + (rest > 0)) if each is None else each)
        rest -= each is None
    # With GPUs all models keep all cores: each process uses those near its GPU.
    has_own = not host.gpus and sum(counts) <= len(host.cpus) == host.num_cores
    ends = accumulate(counts)
    return [
        replace(host, num_cores=count, cpus=host.cpus[end - count : end] if has_own else host.cpus)
        for count, end in zip(counts, ends, strict=True)
    ]


def _units_of(host: Host, devices: str) -> list[Gpu | None]:
    """Return the devices that get replicas in turn: GPUs, and None for the CPU.

    Raises:
        DeviceError: A device does not exist on this host.
    """
    try:
        names = parse_devices(devices)
    except ValueError:
        raise DeviceError(f'devices = "{devices}": say {DEVICE_FORMS}') from None
    if names == ("auto",):
        if host.problem and host.is_told_gpus and not host.gpus:
            raise DeviceError(host.problem)  # the CPU would not be what was meant
        return list(host.gpus) or [None]
    units: list[Gpu | None] = []
    for name in names:
        if name == "cpu":
            units.append(None)
        else:
            units += _gpus_called(host, name, devices)
    return units


def _gpus_called(host: Host, name: str, devices: str) -> Sequence[Gpu]:
    have = ", ".join(map(str, host.gpus)) or "no GPU"
    if not host.gpus:
        raise DeviceError(f'devices = "{devices}", but {host.problem or f"this host has {have}"}')
    kind, _, index = name.partition(":")
    if accelerator_of(kind):
        gpus = [gpu for gpu in host.gpus if gpu.kind == kind]
        found = called(gpus, index) if index else gpus
    else:
        found = called(host.gpus, name)
    if not found:
        raise DeviceError(f"there is no {name} on this host: it has {have}")
    return found


def _place_round(
    host: Host, units: Sequence[Gpu | None], request: PlacementRequest
) -> list[Placement]:
    """Place whole replicas on the devices in turn."""
    replicas = request.replicas or len(units)
    share = request.threads or max(1, host.num_cores // replicas)
    placements = []
    for replica in range(replicas):
        gpu = units[replica % len(units)]
        if gpu is None:
            placements.append(Placement(devices=("cpu",), num_threads=share))
        else:
            placements.append(_on_gpus(host, (gpu,), None, share))
    return placements


def _place_groups_of_gpus(
    host: Host, units: Sequence[Gpu | None], gpus: Sequence[Gpu], request: PlacementRequest
) -> list[Placement]:
    if len(gpus) < len(units):
        raise DeviceError(
            f'devices = "{request.devices}": a model is split over GPUs or over CPUs, not over both'
        )
    if any(gpu.sliced_from for gpu in gpus):
        raise DeviceError(
            f'placement = "{request.split}": a model cannot be split over MIG slices, of which '
            f"CUDA shows one to a process ({', '.join(map(str, gpus))}): name whole GPUs in "
            'devices, take them out of MIG mode (nvidia-smi -mig 0), or set placement = "replicate"'
        )
    ranks = request.ranks or max(_MIN_RANKS, len(gpus) // (request.replicas or 1))
    replicas = request.replicas or max(1, len(gpus) // ranks)
    if replicas * ranks > len(gpus):
        each = f"{replicas} replicas on {ranks} each" if replicas > 1 else f"{ranks}"
        raise DeviceError(
            f'placement = "{request.split}" needs {replicas * ranks} GPUs ({each}), and there are '
            f"{len(gpus)} ({', '.join(map(str, gpus))}): lower replicas or devices_per_replica, "
            'name a GPU for each, which may be the same one ("cuda:0,0"), or set '
            'placement = "replicate"'
        )
    share = request.threads or max(1, host.num_cores // (replicas * ranks))
    is_named = parse_devices(request.devices) not in (("auto",), (host.accelerator.kind,))
    ordered = gpus if is_named else _near_ones_together(gpus, ranks)
    groups = [ordered[replica * ranks : (replica + 1) * ranks] for replica in range(replicas)]
    return [_on_gpus(host, group, request.split, share) for group in groups]


def _near_ones_together(gpus: Sequence[Gpu], size: int) -> list[Gpu]:
    """Order GPUs so that each group of `size` contains GPUs that are near each other."""
    left, ordered = list(gpus), []
    while left:
        group = [left.pop(0)]
        while left and len(group) < size:
            nearest = min(
                left, key=lambda gpu: sum(gpu.distances.get(each.uuid, _FAR) for each in group)
            )
            left.remove(nearest)
            group.append(nearest)
        ordered += group
    return ordered


def _on_gpus(host: Host, gpus: Sequence[Gpu], split: Split | None, num_threads: int) -> Placement:
    visible = tuple(dict.fromkeys(gpu.uuid for gpu in gpus))
    near = {cpu for gpu in gpus for cpu in gpu.cpus}
    knows_all = all(gpu.cpus for gpu in gpus)
    return Placement(
        devices=tuple(f"{gpu.kind}:{visible.index(gpu.uuid)}" for gpu in gpus),
        split=split,
        visible=visible,
        cpus=tuple(cpu for cpu in host.cpus if cpu in near) if knows_all else (),
        num_threads=num_threads,
    )


def _place_groups_of_cores(
    host: Host, num_named: int, request: PlacementRequest
) -> list[Placement]:
    """Place split replicas on the CPU, which counts as any number of devices."""
    replicas = request.replicas or max(1, num_named // (request.ranks or num_named))
    ranks = request.ranks or max(_MIN_RANKS, num_named // replicas)
    return _share_out_cores(host, replicas, request.threads, ranks, request.split)


def _place_on_cores(host: Host, replicas: int | None, threads: int | None) -> list[Placement]:
    if replicas is None:
        replicas = max(1, host.num_cores // threads) if threads else host.num_cores
        replicas = min(replicas, _MAX_CPU_REPLICAS)
    return _share_out_cores(host, replicas, threads)


def _share_out_cores(
    host: Host, replicas: int, threads: int | None, ranks: int = 1, split: Split | None = None
) -> list[Placement]:
    share, rest = divmod(host.num_cores, replicas)
    counts = [threads or max(1, (share + (i < rest)) // ranks) for i in range(replicas)]
    # Without a quota each process gets a group of cores of its own. Single cores are not assigned:
    # the front end needs a core now and then, and the scheduler handles that better.
    num_used = ranks * sum(counts)
    has_groups = min(counts) > 1 and num_used <= len(host.cpus) == host.num_cores
    placements = []
    start = 0
    for count in counts:
        end = start + ranks * count
        placements.append(
            Placement(
                devices=("cpu",) * ranks,
                split=split,
                cpus=host.cpus[start:end] if has_groups else (),
                num_threads=count,
            )
        )
        start = end
    return placements


def _share_near_cores(host: Host, placements: Sequence[Placement]) -> list[Placement]:
    """Give processes beside GPUs no more threads than they have near cores, which they share."""
    users = Counter(cpu for each in placements for cpu in each.cpus for _ in each.devices)
    shared = []
    for each in placements:
        near = sum(1 / users[cpu] for cpu in each.cpus) if each.cpus else inf
        most = max(1, int(min(near + 1e-6, host.num_cores)))
        shared.append(replace(each, num_threads=min(each.num_threads, most)))
    return shared


def _share_memory(
    host: Host, placements: Sequence[Placement], fraction: float | None
) -> list[Placement]:
    """Limit the GPU memory of processes that share a GPU, so that none takes another's share."""
    users = Counter(uuid for placement in placements for uuid in placement.gpu_of_each_rank)
    gpus = {gpu.uuid: gpu for gpu in host.gpus}
    for uuid, num in users.items():
        if fraction is not None and fraction * num > 1:
            raise DeviceError(
                f"gpu_memory_fraction = {fraction:g} for each of {num} processes is more than "
                f"{gpus[uuid]} has: set at most {1000 // num / 1000:g}, or auto"
            )
    if not users:
        return list(placements)
    shared = []
    for placement in placements:
        shares = [
            max(0.5 / users[uuid], 1 / users[uuid] - CONTEXT_BYTES / gpus[uuid].memory_bytes)
            for uuid in placement.gpu_of_each_rank
            if users[uuid] > 1
        ]
        most = fraction if fraction is not None else min(shares, default=None)
        shared.append(replace(placement, memory_fraction=most if placement.visible else None))
    return shared
