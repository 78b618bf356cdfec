"""The memory, descriptors, threads and processes of a service, seen from outside. Linux only."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from inferpool.service.tools.trial.connection import TrialConnection
from inferpool.service.tools.trial.processes import pss_of

_TIMEOUT_S = 10.0
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ (\S+) (\d+)\s+(/memfd:|/dev/shm/)", re.MULTILINE
)
"""proc_pid_maps(5): address range, permissions, offset, device, inode, path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Resources that the processes of a service hold at one moment."""

    descriptors: int
    """Open files of the front end, without those of the job store that still exist: its threads
    keep all connections that were once needed at the same time."""
    threads: int
    processes: int
    pss_bytes: int
    """Memory of the front end, in which shared pages count by share."""
    others_pss_bytes: int
    shared_bytes: int
    """Shared memory that any of them maps: anonymous (memfd) or in /dev/shm."""
    shared_files: int
    dev_shm_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReading:
    """Counters of /metrics, for all models together."""

    accepted: int
    succeeded: int
    failed: int
    expired: int
    cancelled: int
    rejected: int
    arena_used_bytes: int
    restarts: int
    retried: int
    """Instances sent again because their worker was lost."""

    @property
    def in_flight(self) -> int:
        """Instances that are accepted and have no end."""
        return self.accepted - self.succeeded - self.failed - self.expired - self.cancelled

    def since(self, before: "LedgerReading") -> "LedgerReading":
        """Return what was added since; bytes in use are as they are now."""
        changes = {
            each.name: getattr(self, each.name) - getattr(before, each.name)
            for each in fields(self)
            if each.name != "arena_used_bytes"
        }
        return LedgerReading(**changes, arena_used_bytes=self.arena_used_bytes)


def holdings_of(
    front_end_pid: int, family: Sequence[psutil.Process], job_store: Path | None = None
) -> Holdings:
    """Return what the processes of a service hold; `job_store` is the folder of its jobs."""
    front_end = psutil.Process(front_end_pid)
    others = [each.pid for each in family if each.pid != front_end_pid]
    shared: dict[str, int] = {}
    for process in family:
        for inode, num_bytes in _shared_of(process.pid).items():
            shared[inode] = max(shared.get(inode, 0), num_bytes)
    return Holdings(
        descriptors=front_end.num_fds() - _num_open_below(job_store, front_end_pid),
        threads=front_end.num_threads(),
        processes=len(family),
        pss_bytes=pss_of(front_end_pid).total,
        others_pss_bytes=sum(pss_of(pid).total for pid in others),
        shared_bytes=sum(shared.values()),
        shared_files=len(shared),
        dev_shm_files=len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0,
    )


def _num_open_below(folder: Path | None, pid: int) -> int:
    """Return how many files that are in a folder now a process has open."""
    if folder is None:
        return 0
    num, path = 0, os.path.realpath(folder)
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed by now
            target = os.readlink(each)
            num += target.startswith(f"{path}/") and not target.endswith(" (deleted)")
    return num


async def read_ledger(connection: TrialConnection) -> LedgerReading:
    """Read the counters of a service."""
    page = await connection.read("/metrics", _TIMEOUT_S)
    totals: Counter[str] = Counter()
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            outcome = sample.labels.get("outcome", "")
            totals[f"{sample.name} {outcome}".strip()] += int(sample.value)
    instances = "inferpool_instances_total"
    return LedgerReading(
        accepted=totals[f"{instances} accepted"],
        succeeded=totals[f"{instances} succeeded"],
        failed=totals[f"{instances} failed"],
        expired=totals[f"{instances} expired"],
        cancelled=totals[f"{instances} cancelled"],
        rejected=totals["inferpool_rejected_total"],
        arena_used_bytes=totals["inferpool_arena_used_bytes"],
        restarts=totals["inferpool_worker_restarts_total"],
        retried=totals["inferpool_instances_retried_total"],
    )


def _shared_of(pid: int) -> dict[str, int]:
    """Return the bytes of each piece of shared memory a process maps, by device and inode."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return {}
    found: Counter[str] = Counter()
    for start, end, device, inode, _ in _MAPPING.findall(maps):
        found[f"{device}:{inode}"] += int(end, 16) - int(start, 16)
    return found
