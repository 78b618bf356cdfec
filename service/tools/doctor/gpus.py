"""Checks of the NVIDIA driver and the GPUs."""

from collections import Counter
from collections.abc import Iterator

from inferpool.models.accelerator.kinds import CUDA
from inferpool.service.checks.devices import all_placements
from inferpool.service.checks.facts import Facts
from inferpool.service.checks.findings import Finding, error, note, ok, warning
from inferpool.service.client.texts import in_words
from inferpool.workers.host.nvml import GpuState, NvmlState

_IN_USE = 0.1
"""Share of a GPU's memory in use that is worth a warning; an idle desktop takes less."""


def check_driver(facts: Facts, nvml: NvmlState) -> Iterator[Finding]:
    """Check the driver against the CUDA version that torch was built for.

    A driver runs all minor versions of a CUDA major version that it knows (CUDA Compatibility,
    "Minor Version Compatibility").
    """
    if nvml.is_broken:
        yield error("GPU driver", nvml.problem, "see what `nvidia-smi` says")
        return
    if not nvml.gpus:
        yield ok("GPU", f"none ({nvml.problem or 'the driver lists no device'}): CPUs compute")
        return
    if facts.host.accelerator is not CUDA:
        yield ok("GPU driver", nvml.driver)
        return
    built = facts.torch.cuda if facts.torch else ""
    message = f"{nvml.driver}, for CUDA up to {nvml.cuda[0]}.{nvml.cuda[1]}"
    if built and int(built.partition(".")[0]) > nvml.cuda[0]:
        yield error(
            "GPU driver",
            f"{message}; torch was built for CUDA {built}",
            "update the driver, or install a torch built for an older CUDA",
        )
    else:
        yield ok("GPU driver", message)


def check_gpus(facts: Facts, nvml: NvmlState) -> Iterator[Finding]:
    """Check the state of each GPU that the service will use."""
    users = Counter(uuid for p in all_placements(facts) for uuid in p.gpu_of_each_rank)
    for index, reason in nvml.failed.items():
        yield error(
            f"{facts.host.accelerator.kind}:{index}",
            f"cannot be used: NVML says {reason}",
            "see `nvidia-smi -q` and the kernel's log; a reset or a restart may bring it back",
        )
    for gpu in nvml.gpus:
        name = f"{facts.host.accelerator.kind}:{gpu.index}"
        num_processes = sum(users[uuid] for uuid in (gpu.uuid, *gpu.slices))
        if gpu.is_mig and not gpu.slices:
            yield warning(
                name,
                "is in MIG mode without slices: nothing can run on it",
                f"run nvidia-smi mig -i {gpu.uuid} -cgi 19 -C to make slices (-lgip lists the "
                f"sizes), or nvidia-smi -i {gpu.uuid} -mig 0",
            )
        elif num_processes:
            found = list(_problems(name, gpu, num_processes, is_mps_running=facts.is_mps_running))
            yield from found
            if not any(finding.level in ("warning", "error") for finding in found):
                cut = f", {len(gpu.slices)} MIG slices" if gpu.is_mig else ""
                yield ok(name, f"{gpu.name}{cut}{_free(gpu)}, no errors")


def _free(gpu: GpuState) -> str:
    if gpu.total_bytes is None or gpu.used_bytes is None:
        return ""
    return f", {in_words(gpu.total_bytes - gpu.used_bytes)} free"


def _problems(
    check: str, gpu: GpuState, num_processes: int, *, is_mps_running: bool
) -> Iterator[Finding]:
    if gpu.is_prohibited:
        yield error(
            check, "its compute mode allows no process", f"nvidia-smi -i {gpu.uuid} -c DEFAULT"
        )
    # The one allowed process may be that of MPS, which has any number of clients.
    if gpu.is_exclusive and not is_mps_running and (num_processes > 1 or gpu.num_processes):
        yield error(
            check,
            f"its compute mode allows one process, but {num_processes} of ours will use it, and "
            f"{gpu.num_processes or 0} of others do",
            f"nvidia-smi -i {gpu.uuid} -c DEFAULT, nvidia-cuda-mps-control -d, or one replica for "
            "each GPU",
        )
    elif gpu.is_exclusive and not is_mps_running:
        yield note(
            check,
            "its compute mode allows one process: a worker must leave before its successor comes",
            f"restart workers with old_first=true, or nvidia-smi -i {gpu.uuid} -c DEFAULT",
        )
    if gpu.is_fabric_up is False:
        yield warning(
            check,
            "its NVSwitches are not set up: CUDA may refuse it (error 802)",
            "systemctl start nvidia-fabricmanager, of the same version as the driver",
        )
    if gpu.num_ecc_errors:
        yield warning(
            check,
            f"{gpu.num_ecc_errors} uncorrected memory errors: its results may be wrong",
            f"nvidia-smi -i {gpu.uuid} -r resets it; if they come back, replace it",
        )
    if gpu.total_bytes and gpu.used_bytes and gpu.used_bytes > _IN_USE * gpu.total_bytes:
        yield warning(
            check,
            f"{in_words(gpu.used_bytes)} of {in_words(gpu.total_bytes)} are in use by others",
            "see `nvidia-smi`, end processes that are not needed, or choose other devices",
        )
    if gpu.is_persistent is False:
        yield note(
            check,
            "the driver unloads when idle, so starts take longer",
            "nvidia-smi -pm 1",
        )
