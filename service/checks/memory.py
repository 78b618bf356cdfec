"""Checks of memory: its size for the arena and the replicas, and its speed."""

from collections import Counter
from collections.abc import Iterator, Sequence

from inferpool.models.spec import Placement
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.checks.topology import pinned_bytes
from inferpool.service.checks.weights import weights_file
from inferpool.service.client.texts import in_words
from inferpool.service.errors import StartError
from inferpool.service.parts.fronts.number import number_of_fronts
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.device_memory import HOST
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.host.placing import CONTEXT_BYTES

# From /proc/PID/smaps_rollup on x86-64 with torch 2.15, two workers, efficientnet_lite0.
FRONT_END_BYTES = 70 << 20
FORKSERVER_BYTES = 540 << 20
"""Memory of the forkserver with torch, which the workers share."""
WORKER_BYTES = 180 << 20
"""Memory of a worker that is not shared, without the weights."""
_DECODER_BYTES = 80 << 20
"""Memory of a decoder that is not shared; measured likewise, with photographs of 451 x 300."""
_CUDA_WORKER_BYTES = 1 << 30
"""Host memory of a worker with a CUDA context; an estimate."""
_TIGHT = 0.8
_MIN_SHM_BYTES = 64 << 20


def check_shared_memory(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check /dev/shm, which the service does not use but a model may."""
    about = "the arena does not use it (a memfd counts as ordinary memory)"
    if facts.shm is None:
        yield note("/dev/shm", f"there is none; {about}")
    elif facts.shm.free_bytes < _MIN_SHM_BYTES:
        yield note(
            "/dev/shm",
            f"{in_words(facts.shm.free_bytes)} free of {in_words(facts.shm.total_bytes)}; {about}",
            "only a model that starts processes (a DataLoader, say) needs more: "
            "docker run --shm-size=1g",
        )
    else:
        yield ok("/dev/shm", f"{in_words(facts.shm.free_bytes)} free; {about}")


def check_replicas(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Compare the host's memory with the needs of all processes."""
    need = settings.arena_bytes + FRONT_END_BYTES + FORKSERVER_BYTES
    need += _bytes_of_fronts(facts, settings) + _DECODER_BYTES * facts.num_decoders
    unknown = []
    for name, placements in facts.placements.items():
        size = _weight_bytes(settings.models[name])
        if size is None:
            unknown.append(name)
        for placement in placements:
            each = _CUDA_WORKER_BYTES if placement.visible else WORKER_BYTES
            is_apart = bool(placement.visible) and not facts.is_unified(placement)
            need += each * placement.num_ranks + (0 if is_apart else size or 0)
            need += pinned_bytes(settings.models[name], placement)
    least = "at least " if unknown else "about "
    more = f" and the weights of {', '.join(unknown)}" if unknown else ""
    message = (
        f"{_count(facts)} and the front end need "
        f"{least}{in_words(need)}{more}; {in_words(facts.free_bytes)} are free"
    )
    advice = "lower replicas, free some memory, or raise the container's limit"
    if facts.num_decoders:
        advice = f"lower decoders, {advice}"
    if need > facts.free_bytes:
        yield error("memory", message, f"the kernel would kill them: {advice}")
    elif need > _TIGHT * facts.free_bytes:
        yield warning("memory", message, advice)
    elif unknown:
        yield note("memory", message, "--measure loads the models and measures them")
    else:
        yield ok("memory", message)


def check_gpu_memory(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Compare each GPU's memory with the weights of its models."""
    need: dict[str, int] = {}
    for name, placements in facts.placements.items():
        size = _weight_bytes(settings.models[name]) or 0
        for placement in placements:
            for uuid in placement.gpu_of_each_rank:  # each holds one part
                need[uuid] = need.get(uuid, 0) + size // placement.num_ranks
    for gpu in facts.host.gpus:
        if need.get(gpu.uuid, 0) > gpu.memory_bytes:
            yield error(
                "GPU memory",
                f"{in_words(need[gpu.uuid])} of weights for {gpu}",
                "lower replicas, give devices with more memory, or split the model over several "
                '(placement = "pipeline")',
            )


def check_swap(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check for swapped memory, which slows down every worker."""
    if facts.swap_used_bytes > 256 << 20:
        yield warning(
            "swap",
            f"{in_words(facts.swap_used_bytes)} are swapped out: a batch may wait for the disk",
            "free memory, then run `swapoff -a`, or set vm.swappiness to 1",
        )
    else:
        yield ok("swap", "almost none in use")


def check_huge_pages(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Check transparent huge pages: large models get faster, small ones use more memory."""
    if facts.huge_pages == "never":
        yield note(
            "huge pages",
            "transparent huge pages are off, which makes large CPU models slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif facts.huge_pages:
        yield ok("huge pages", f"transparent huge pages: {facts.huge_pages}")


def needs_of_worker(
    model: ModelSettings, placement: Placement, gpus: Sequence[Gpu]
) -> dict[str, int]:
    """Return the least memory that a worker will need, by place; see `DeviceMemory`.

    The memory that workers share on the host is not included.
    """
    weights = _weight_bytes(model) or 0
    if not placement.visible:
        return {HOST: WORKER_BYTES * placement.num_ranks + weights}
    needs = Counter({HOST: _CUDA_WORKER_BYTES * placement.num_ranks})
    unified = {gpu.uuid for gpu in gpus if gpu.is_unified}
    for uuid in placement.gpu_of_each_rank:  # each holds one part
        place = HOST if uuid in unified else uuid
        needs[place] += CONTEXT_BYTES + weights // placement.num_ranks
    return needs


def _count(facts: Facts) -> str:
    workers = f"{facts.num_workers} worker{'s' if facts.num_workers != 1 else ''}"
    is_split = facts.num_processes > facts.num_workers
    if is_split:
        workers += f" of {facts.num_processes} processes"
    return f"{workers}, {facts.num_decoders} decoders" if facts.num_decoders else workers


def _weight_bytes(model: ModelSettings) -> int | None:
    """Return the size of a model's weights; None if it is unknown without loading them."""
    if model.source == "echo" or model.weights.lower() == "none":
        return 0
    path = weights_file(model)
    try:
        return path.stat().st_size if path else None
    except OSError:
        return 0  # another check reports it


def _bytes_of_fronts(facts: Facts, settings: Settings) -> int:
    """Return the memory of front end processes besides the main one."""
    try:
        num, _ = number_of_fronts(settings, facts.host.num_cores, len(facts.host.gpus))
    except StartError:
        return 0
    return num * FRONT_END_BYTES if num > 1 else 0
