"""Which replica goes where: the devices, cores and threads of each. Decided in the front end."""

from collections.abc import Sequence
from dataclasses import dataclass

from models.spec import Placement, Split
from workers.device_names import FORMS, parse_devices
from workers.devices import DeviceError, Gpu, Host

_MAX_CPU_REPLICAS = 8
"""Beyond this many, replicas on one host take more threads rather than more memory."""
_MIN_RANKS = 2


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
        return _place_groups_of_gpus(host, units, gpus, wish)
    if wish.split:
        return _place_groups_of_cores(host, len(units), wish)
    if gpus or len(units) > 1:
        return _place_round(host, units, wish)
    return _place_on_cores(host, wish.replicas, wish.threads)


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
    found = [gpu for gpu in host.gpus if name == f"cuda:{gpu.index}" or gpu.uuid.startswith(name)]
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
    groups = [gpus[replica * ranks : (replica + 1) * ranks] for replica in range(replicas)]
    return [_on_gpus(host, group, wish.split, share) for group in groups]


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
