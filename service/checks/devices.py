"""Checks of devices: which are visible, and which are shared."""

from collections import Counter
from collections.abc import Iterator

from inferpool.models.spec import Placement
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, note, ok, warning
from inferpool.service.settings.settings import Settings


def check_visible(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check CUDA_VISIBLE_DEVICES; CUDA stops at the first name that it does not know."""
    visible = settings.cuda_visible_devices
    if visible is None:
        return
    names = [name.strip() for name in visible.split(",") if name.strip()]
    num_found = len(facts.host.gpus)
    if not names or names == ["-1"]:
        yield note("CUDA_VISIBLE_DEVICES", "hides every GPU", "unset it to use them")
    elif num_found < len(names):
        yield warning(
            "CUDA_VISIBLE_DEVICES",
            f"{visible!r} names {len(names)}, and {names[num_found]!r} is not on this host: CUDA "
            "ignores it and those after it",
            "name GPUs by the index or the UUID that `nvidia-smi -L` prints",
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


def all_placements(facts: Facts) -> Iterator[Placement]:
    """Yield the placements of all models."""
    for placements in facts.placements.values():
        yield from placements
