"""Checks which cores and which memory each worker has near it, and what is left for front ends."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from inferpool.models.spec import Placement
from inferpool.models.speed_names import MOST_GROWN
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, note, ok, warning
from inferpool.service.client.texts import in_words
from inferpool.service.errors import StartError
from inferpool.service.parts.fronts.number import number_of_fronts
from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.settings import Settings
from inferpool.workers.host.gpus import Gpu
from inferpool.workers.host.nodes import cpus_in_words
from inferpool.workers.shared.messages import MORE_AHEAD

_INPUT_BYTES = 3 * 224 * 224 * 4
"""An input of most networks of pictures, in float32."""
_HEADING = ("worker", "device", "node", "cores", "threads", "decoders", "pinned for pictures")


def check_topology(facts: Facts, settings: Settings) -> Iterator[Finding]:
    """Show the cores and the memory node of each worker, and find GPUs that have none near them."""
    used = {uuid for each in facts.placements.values() for p in each for uuid in p.visible}
    for gpu in facts.host.gpus:
        if gpu.uuid in used:
            yield from _problems(facts, gpu)
    num = len(facts.host.nodes)
    message = f"{num or 'unknown'} memory node{'s' if num != 1 else ''}"
    if used and num > 1:
        message += "; a worker is on the cores near its GPU, and has its memory there"
    table = (_HEADING, *_rows(facts, settings))
    yield replace(ok("cores and memory", message), rows=table)


def pinned_bytes(model: ModelSettings, placement: Placement) -> int:
    """Return the host memory that a worker pins for its batches, if they are of usual pictures."""
    if not placement.visible:
        return 0
    size = MOST_GROWN if model.max_batch_size == "auto" else model.max_batch_size
    return (model.credit + placement.num_at_once - 1 + MORE_AHEAD) * size * _INPUT_BYTES


def _problems(facts: Facts, gpu: Gpu) -> Iterator[Finding]:
    host, name = facts.host, f"{gpu.kind}:{gpu.index}"
    if gpu.cpus and not set(gpu.cpus) & set(host.cpus):
        yield warning(
            f"cores near {name}",
            f"this process may use none of {cpus_in_words(gpu.cpus)}: what the worker reads and "
            "writes crosses between sockets",
            "allow these cores (docker's --cpuset-cpus), or name other GPUs in devices",
        )
    elif not gpu.cpus and len(host.nodes) > 1:
        yield note(
            f"cores near {name}",
            "neither the driver nor the kernel says which they are: its worker runs on any",
            "if this is a virtual machine, pass the host's NUMA topology through",
        )
    if gpu.node is not None and facts.memory_nodes and gpu.node not in facts.memory_nodes:
        yield warning(
            f"memory near {name}",
            f"this process may use none of memory node {gpu.node}",
            "allow it (docker's --cpuset-mems), or name other GPUs in devices",
        )


def _rows(facts: Facts, settings: Settings) -> Iterator[tuple[str, ...]]:
    num_busy = 0
    for name, placements in facts.placements.items():
        model = settings.models[name]
        rows = [_row(facts, model, placement) for placement in placements]
        for row, same in groupby(rows):
            num = len(list(same))
            yield (f"{name} x{num}" if num > 1 else name, *row)
        num_busy += sum(_num_busy(model, placement) for placement in placements)
    try:
        num_fronts, _ = number_of_fronts(settings, facts.host.num_cores, len(facts.host.gpus))
    except StartError:
        return
    left = facts.host.num_cores - num_busy - num_fronts
    many = f"{left} of {facts.host.num_cores}" if left >= 0 else f"{-left} too few at full load"
    yield ("front ends", "", "", f"{num_fronts} of any", "", "", "")
    if any(placement.visible for each in facts.placements.values() for placement in each):
        yield ("left", "", "", many, "", "", "")


def _row(facts: Facts, model: ModelSettings, placement: Placement) -> tuple[str, ...]:
    names = {gpu.uuid: f"{gpu.kind}:{gpu.index}" for gpu in facts.host.gpus if not gpu.sliced_from}
    gpus = [names.get(uuid, uuid) for uuid in placement.gpu_of_each_rank]
    nodes = facts.host.nodes_of(placement.cpus or facts.host.cpus)
    pinned = pinned_bytes(model, placement)
    return (
        "+".join(gpus or placement.devices),
        ",".join(map(str, nodes)) or "unknown",
        cpus_in_words(placement.cpus) or "any",
        str(placement.num_threads),
        str(model.num_decoders(placement)),
        f"up to {in_words(pinned)}" if pinned else "",
    )


def _num_busy(model: ModelSettings, placement: Placement) -> int:
    """Return the cores that a worker keeps busy: beside GPUs those of its loops and decoders."""
    if placement.visible:
        return placement.num_ranks + model.num_decoders(placement)
    return placement.num_threads * placement.num_ranks
