"""Which replica goes where: the devices, cores and threads of each. Decided in the front end."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from inferpool.models.spec import Placement, Split
from inferpool.workers.host.device_names import FORMS, parse_devices
from inferpool.workers.host.devices import DeviceError, Gpu, Host, called

_MAX_CPU_REPLICAS = 8
"""Beyond this many, replicas on one host take more threads rather than more memory."""
_MIN_RANKS = 2
_CONTEXT_BYTES = 512 << 20
"""Of a GPU's memory, what each process takes beside what torch allocates: CUDA's context and the
kernels. An estimate: no GPU has been measured yet."""
_FAR = 50
"""NVML_TOPOLOGY_SYSTEM: what is taken for the distance of GPUs that the host does not tell of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Where the replicas of one model are to go."""

    devices: str = "auto"
    """As `parse_devices` takes them; "auto": every GPU, else the CPU."""
    replicas: int | None = None
    """None: one for each GPU or each group of GPUs. Without GPUs, one for each group of cores, and
    of a split model one."""
    threads: int | None = None
    """Intra-op threads of each process; None: an equal share of the cores."""
    split: Split | None = None
    """How each replica is split; None where it lies on one device."""
    ranks: int | None = None
    """The devices of each split replica; None: as many as each can have, and on CPUs two."""
    memory_fraction: float | None = None
    """Of its GPU's memory, the most that each process may allocate; None: an equal share where
    several processes of this model share a GPU, else all."""


def place(host: Host, wish: Wish) -> list[Placement]:
    """Decide where the replicas of one model go.

    Returns:
        One placement per replica. What their processes compute with adds up to the host's cores at
        most, where there are as many cores as processes.

    Raises:
        DeviceError: A device asked for is not on this host, or there are too few.
    """
    units = _units(host, wish.devices)
    gpus = [unit for unit in units if unit is not None]
    if wish.split and gpus:
        placements = _place_groups_of_gpus(host, units, gpus, wish)
    elif wish.split:
        placements = _place_groups_of_cores(host, len(units), wish)
    elif gpus or len(units) > 1:
        placements = _place_round(host, units, wish)
    else:
        placements = _place_on_cores(host, wish.replicas, wish.threads)
    return _share_memory(host, placements, wish.memory_fraction)


def share_cores(host: Host, asked: Sequence[int | None]) -> list[Host]:
    """Divide the cores of a host among models, which are loaded side by side.

    Args:
        host: All of it.
        asked: The cores that each model is to have by its settings; None: as many as the others
            that do not say, of what is left, and at least one.

    Returns:
        What each model may take for its host. A model that is alone has all.
    """
    if len(asked) == 1:
        return [host]
    left = max(0, host.num_cores - sum(each for each in asked if each is not None))
    share, rest = divmod(left, asked.count(None) or 1)
    counts = []
    for each in asked:
        counts.append(max(1, share + (rest > 0)) if each is None else each)
        rest -= each is None
    # Near which cores a GPU is does not depend on the model.
    has_own = not host.gpus and sum(counts) <= len(host.cpus) == host.num_cores
    ends = accumulate(counts)
    return [
        replace(host, num_cores=count, cpus=host.cpus[end - count : end] if has_own else host.cpus)
        for count, end in zip(counts, ends, strict=True)
    ]


def _units(host: Host, devices: str) -> list[Gpu | None]:
    """What replicas are dealt out to: GPUs, and None for the CPU."""
    try:
        names = parse_devices(devices)
    except ValueError:
        raise DeviceError(f'devices = "{devices}": say {FORMS}') from None
    if names == ("auto",):
        return list(host.gpus) or [None]
    units: list[Gpu | None] = []
    for name in names:
        if name == "cpu":
            units.append(None)
        else:
            units += _gpus_called(host, name, devices)
    return units


def _gpus_called(host: Host, name: str, devices: str) -> Sequence[Gpu]:
    have = ", ".join(map(str, host.gpus)) or "no CUDA device"
    if not host.gpus:
        raise DeviceError(f'devices = "{devices}", but this host has {have}')
    if name == "cuda":
        return host.gpus
    found = called(host.gpus, name.removeprefix("cuda:"))
    if not found:
        raise DeviceError(f"there is no {name} on this host: it has {have}")
    return found


def _place_round(host: Host, units: Sequence[Gpu | None], wish: Wish) -> list[Placement]:
    """Whole replicas, dealt out in turns."""
    replicas = wish.replicas or len(units)
    share = wish.threads or max(1, host.num_cores // replicas)
    placements = []
    for replica in range(replicas):
        gpu = units[replica % len(units)]
        if gpu is None:
            placements.append(Placement(devices=("cpu",), num_threads=share))
        else:
            placements.append(_on_gpus(host, (gpu,), None, share))
    return placements


def _place_groups_of_gpus(
    host: Host, units: Sequence[Gpu | None], gpus: Sequence[Gpu], wish: Wish
) -> list[Placement]:
    if len(gpus) < len(units):
        raise DeviceError(
            f'devices = "{wish.devices}": a model is split over GPUs or over CPUs, not over both'
        )
    if any(gpu.sliced_from for gpu in gpus):
        raise DeviceError(
            f'placement = "{wish.split}": a model cannot be split over MIG slices, of which CUDA '
            f"shows one to a process ({', '.join(map(str, gpus))}): name whole GPUs in devices, "
            'take them out of MIG mode (nvidia-smi -mig 0), or set placement = "replicate"'
        )
    ranks = wish.ranks or max(_MIN_RANKS, len(gpus) // (wish.replicas or 1))
    replicas = wish.replicas or max(1, len(gpus) // ranks)
    if replicas * ranks > len(gpus):
        each = f"{replicas} replicas on {ranks} each" if replicas > 1 else f"{ranks}"
        raise DeviceError(
            f'placement = "{wish.split}" needs {replicas * ranks} GPUs ({each}), and there are '
            f"{len(gpus)} ({', '.join(map(str, gpus))}): lower replicas or devices_per_replica, "
            'name a GPU for each, which may be the same one ("cuda:0,0"), or set '
            'placement = "replicate"'
        )
    share = wish.threads or max(1, host.num_cores // (replicas * ranks))
    is_named = parse_devices(wish.devices) not in (("auto",), ("cuda",))
    ordered = gpus if is_named else _near_ones_together(gpus, ranks)
    groups = [ordered[replica * ranks : (replica + 1) * ranks] for replica in range(replicas)]
    return [_on_gpus(host, group, wish.split, share) for group in groups]


def _near_ones_together(gpus: Sequence[Gpu], size: int) -> list[Gpu]:
    """The GPUs in such an order that each group of a size has some that are near each other."""
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
        devices=tuple(f"cuda:{visible.index(gpu.uuid)}" for gpu in gpus),
        split=split,
        visible=visible,
        cpus=tuple(cpu for cpu in host.cpus if cpu in near) if knows_all else (),
        num_threads=num_threads,
    )


def _place_groups_of_cores(host: Host, num_named: int, wish: Wish) -> list[Placement]:
    """Split replicas on the CPU, which is as many devices as one likes."""
    replicas = wish.replicas or max(1, num_named // (wish.ranks or num_named))
    ranks = wish.ranks or max(_MIN_RANKS, num_named // replicas)
    return _share_out_cores(host, replicas, wish.threads, ranks, wish.split)


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
    # Without a quota each process may keep a group of cores to itself; the scheduler does better
    # where the groups are single cores, since the front end needs a core now and then.
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


def _share_memory(
    host: Host, placements: Sequence[Placement], fraction: float | None
) -> list[Placement]:
    """Bound what each process allocates of a GPU, so that none takes what others count on."""
    users = Counter(uuid for placement in placements for uuid in placement.gpu_of_each_rank)
    gpus = {gpu.uuid: gpu for gpu in host.gpus}
    for uuid, num in users.items():
        if fraction is not None and fraction * num > 1:
            raise DeviceError(
                f"gpu_memory_fraction = {fraction:g} for each of {num} processes is more than "
                f"{gpus[uuid]} has: set at most {1000 // num / 1000:g}, or auto"
            )
    shared = []
    for placement in placements:
        shares = [
            max(0.5 / users[uuid], 1 / users[uuid] - _CONTEXT_BYTES / gpus[uuid].memory_bytes)
            for uuid in placement.gpu_of_each_rank
            if users[uuid] > 1
        ]
        most = fraction if fraction is not None else min(shares, default=None)
        shared.append(replace(placement, memory_fraction=most if placement.visible else None))
    return shared
