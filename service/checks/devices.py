"""Checks of devices: which are visible, and which are shared."""

from collections import Counter
from collections.abc import Iterator

from inferpool.models.accelerator.kinds import CUDA
from inferpool.models.attached import SOURCES
from inferpool.models.spec import Placement
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.settings.settings import Settings


def check_visible(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check CUDA_VISIBLE_DEVICES, and that existing GPUs can be used."""
    host, visible = facts.host, settings.cuda_visible_devices
    if host.problem:
        finding = warning if host.gpus else error
        yield finding("GPUs", host.problem, "see `nvidia-smi -L`, which prints each GPU's UUID")
    elif visible in (None, "all") or host.accelerator is not CUDA:
        return
    elif not host.is_told_gpus:
        yield note("CUDA_VISIBLE_DEVICES", "hides every GPU", "unset it to use them")
    elif not host.gpus:
        yield warning(
            "CUDA_VISIBLE_DEVICES",
            f"{visible!r} names GPUs, and this host has none: CPUs compute",
            "unset it, or install NVIDIA's driver",
        )
    else:
        yield ok("CUDA_VISIBLE_DEVICES", visible)


def check_sharing(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check for processes that share a GPU, or a slice of one."""
    users = Counter(uuid for p in all_placements(facts) for uuid in p.gpu_of_each_rank)
    bounds: Counter[str] = Counter()
    for placement in all_placements(facts):
        for uuid in placement.gpu_of_each_rank:
            bounds[uuid] += round(100 * (placement.memory_fraction or 0))
    for gpu in facts.host.gpus:
        num = users[gpu.uuid]
        if num < 2:
            continue
        if facts.is_mps_running:
            yield ok("GPU sharing", f"{num} processes share {gpu} through CUDA MPS")
        else:
            yield note(
                "GPU sharing",
                f"{num} processes share {gpu} by turns: one waits while another computes",
                "run `nvidia-cuda-mps-control -d` before the service starts, so that they compute "
                "side by side; MIG slices keep them apart",
            )
        if bounds[gpu.uuid] > 100:
            yield warning(
                "GPU memory",
                f"the processes on {gpu} may allocate {bounds[gpu.uuid]} % of its memory together",
                "set gpu_memory_fraction of each model on it",
            )


def check_replicas_on_gpus(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check for models with several replicas on one GPU, or on one slice.

    A worker keeps several batches in flight. So a second replica on its GPU only costs memory and
    cores. The exception is a model whose own Python code takes longer than the GPU does, since a
    process runs one line of Python at a time.
    """
    for name, placements in facts.placements.items():
        users = Counter(each.visible for each in placements if each.visible and not each.split)
        shared = [gpu for gpu in facts.host.gpus if users[(gpu.uuid,)] > 1]
        if not shared:
            continue
        check, where = f"replicas of {name}", ", ".join(map(str, shared))
        message = f"{max(users.values())} replicas share {where}; one keeps a GPU busy by itself"
        one = 'replicas = "auto" makes one for each GPU'
        if _is_own_class(settings.models[name].source):
            yield note(
                check,
                f"{message}, unless the model's own Python code takes longer than the GPU",
                f"{one}; `inferpool tune` measures whether several pay",
            )
        else:
            yield warning(check, f"{message}, and more cost memory and cores", one)


def _is_own_class(source: str) -> bool:
    """Return True for `package.module:Class`."""
    return ":" in source and f"{source.partition(':')[0]}:" not in SOURCES


def all_placements(facts: Facts) -> Iterator[Placement]:
    """Yield the placements of all models."""
    for placements in facts.placements.values():
        yield from placements
