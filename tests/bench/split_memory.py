"""A model that no process is allowed to hold: unsplit it cannot load, and split it serves."""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.bench import rounds
from tests.bench.load import Bodies
from tests.bench.processes import OUT, BenchError, Contender, Probe, Server, ask
from tests.bench.report import Steps, console, table
from tests.bench.split_placements import PLACEMENTS, STACK, contender, stack_bodies

_TIMEOUT_S = 600.0
_MIB = 1 << 20
_TOLERANCE = 1e-4
"""Of the largest number of the reference."""
_LIMITS = {"memory": "memory.limit_in_bytes", "": "memory.max"}
"""What bounds a control group, by its controller in /proc/PID/cgroup: version 1, and 2."""
_PEAKS = ("memory.max_usage_in_bytes", "memory.peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process, while it serves."""

    rank: int
    part: str
    part_mib: float
    """Of the parameters that it holds."""
    uss_mib: float
    pss_mib: float
    peak_mib: float
    """The most that its control group was charged with at a time; 0 where there is none."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one placement under the limit."""

    placement: str
    is_limited: bool
    start_s: float | None = None
    """Until it was ready; None if it never was."""
    deviation: float | None = None
    """From the reference, relative to its largest number."""
    reason: str = ""
    """Why it did not serve."""
    ranks: list[Rank] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return self.deviation is not None and self.deviation <= _TOLERANCE


def measure_memory(args: argparse.Namespace, plan: rounds.Plan, results: rounds.Results) -> object:
    """Serve the large model by each placement, each process under the limit."""
    from tests.bench.stack import BLOCK_BYTES, write_stack

    num_blocks = max(2, round(args.gib * 2**30 / BLOCK_BYTES))
    limit_bytes = int(args.limit_share * num_blocks * BLOCK_BYTES)
    bodies = stack_bodies()
    outcomes = []
    with Steps(2 + len(PLACEMENTS)) as steps:
        steps.begin(f"{num_blocks} blocks of {BLOCK_BYTES / _MIB:.0f} MiB, to files")
        index = write_stack(OUT / "weights" / f"stack-{num_blocks}", num_blocks)
        steps.end()
        steps.begin("the reference, block by block")
        right = _reference(index, num_blocks, bodies)
        steps.end()
        for place, is_limited in (
            ("replicate 1", False),
            ("replicate 1", True),
            ("pipeline 2", True),
            ("tensor 2", True),
        ):
            steps.begin(f"{place}{', limited' if is_limited else ''}")
            with _groups(args.limit_by, limit_bytes if is_limited else 0) as groups:
                by = "control groups" if groups else "RLIMIT_DATA"
                options = {"num_blocks": num_blocks, "groups": groups}
                options["limit_bytes"] = limit_bytes if is_limited else 0
                settings = {"weights": str(index), "load_timeout_s": _TIMEOUT_S, "max_restarts": 1}
                server = contender(args, place, STACK, PLACEMENTS[place] | settings, options)
                outcome = Outcome(placement=place, is_limited=is_limited)
                _try(server, outcome, plan.port, bodies, right, groups)
                outcomes.append(outcome)
            steps.end()
    _print(outcomes, num_blocks * BLOCK_BYTES, limit_bytes, by)
    for outcome in outcomes:
        wanted = not outcome.is_limited or outcome.placement != "replicate 1"
        if wanted != outcome.is_right:
            text = outcome.reason or f"its deviation is {outcome.deviation}"
            results.failures.append(f"{outcome.placement}, limited: {outcome.is_limited}: {text}")
    return {
        "model_bytes": num_blocks * BLOCK_BYTES,
        "limit_bytes": limit_bytes,
        "limited_by": by,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def _try(
    contender: Contender,
    outcome: Outcome,
    port: int,
    bodies: Bodies,
    right: Sequence[Sequence[float]],
    groups: str,
) -> None:
    log = OUT / "logs" / f"split-memory-{outcome.placement.replace(' ', '-')}.log"
    with Server(contender, port, log) as server:
        began = time.monotonic()
        try:
            server.wait_ready(bodies.probe(), _TIMEOUT_S)
        except BenchError:
            outcome.reason = _reason_in(log)
            return
        outcome.start_s = time.monotonic() - began
        outcome.deviation = max(
            _deviation(server, bodies, file, wanted)
            for file, wanted in zip(bodies.files, right, strict=True)
        )
        outcome.ranks = _ranks(server, groups)


def _deviation(server: Server, bodies: Bodies, file: Path, wanted: Sequence[float]) -> float:
    probe = Probe(path=bodies.path, body=file.read_bytes(), content_type=bodies.content_type)
    status, body = ask(server.port, probe, _TIMEOUT_S)
    if status != 200:
        raise BenchError(f"{status}: {body[:200]!r}")
    (row,) = json.loads(body)["predictions"]
    largest = max(map(abs, wanted))
    return max(abs(a - b) for a, b in zip(row, wanted, strict=True)) / largest


def _reference(index: Path, num_blocks: int, bodies: Bodies) -> list[list[float]]:
    import torch

    from tests.bench.stack import compute_by_blocks

    rows = [
        torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32) for file in bodies.files
    ]
    found: list[list[float]] = compute_by_blocks(index, num_blocks, torch.stack(rows)).tolist()
    return found


def _ranks(server: Server, groups: str) -> list[Rank]:
    _, body = ask(server.port, Probe(path="/health"))
    worker: Mapping[str, Any] = json.loads(body)["models"][0]["workers"][0]
    ranks = worker["ranks"] or [{"rank": 0, "pid": worker["pid"], "part": "whole", "part_bytes": 0}]
    found = []
    for rank in ranks:
        info = psutil.Process(rank["pid"]).memory_full_info()
        found.append(
            Rank(
                rank=rank["rank"],
                part=rank["part"],
                part_mib=rank["part_bytes"] / _MIB,
                uss_mib=info.uss / _MIB,
                pss_mib=info.pss / _MIB,
                peak_mib=_peak_mib(groups, rank["rank"]),
            )
        )
    return found


def _peak_mib(groups: str, rank: int) -> float:
    files = [Path(groups, str(rank), name) for name in _PEAKS] if groups else []
    return next((int(file.read_text()) / _MIB for file in files if file.exists()), 0.0)


def _reason_in(log: Path) -> str:
    """The last that the service said of a worker."""
    said = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    told = [entry for line in said if (entry := json.loads(line)).get("level") != "info"]
    return str(told[-1]["message"])[:200] if told else "it was not ready in time"


@contextlib.contextmanager
def _groups(limit_by: str, limit_bytes: int) -> Iterator[str]:
    """A folder of control groups for two ranks, or "" where there can be none; 0: no limit."""
    folder = None if limit_by == "rlimit" else _make_groups(limit_bytes)
    if folder is None and limit_by == "cgroup":
        raise BenchError("no control group with a bound of memory can be made here")
    try:
        yield str(folder or "")
    finally:
        for each in (folder / "0", folder / "1", folder) if folder else ():
            with contextlib.suppress(OSError):
                each.rmdir()


def _make_groups(limit_bytes: int) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controller, path = line.split(":", 2)
        if controller not in _LIMITS:
            continue
        folder = Path("/sys/fs/cgroup", controller, path.lstrip("/"), f"bench-{os.getpid()}")
        try:
            for rank in range(2):
                (folder / str(rank)).mkdir(parents=True)
                if limit_bytes:
                    (folder / str(rank) / _LIMITS[controller]).write_text(str(limit_bytes))
        except OSError:
            for each in (folder / "0", folder / "1", folder):
                with contextlib.suppress(OSError):
                    each.rmdir()
            continue
        return folder
    return None


def _print(outcomes: Sequence[Outcome], model_bytes: int, limit_bytes: int, by: str) -> None:
    rows = []
    for outcome in outcomes:
        name = f"{outcome.placement}{'' if outcome.is_limited else ', no limit'}"
        if outcome.start_s is None:
            rows.append((name, "", "", "", "", "", "", "does not load"))
        rows += [
            (
                name if rank.rank == 0 else "",
                str(rank.rank),
                f"{rank.part_mib:,.0f}" if rank.part_mib else f"{model_bytes / _MIB:,.0f}",
                f"{rank.uss_mib:,.0f}",
                f"{rank.pss_mib:,.0f}",
                f"{rank.peak_mib:,.0f}" if rank.peak_mib else "",
                f"{outcome.start_s:.1f}",
                f"serves, off by {outcome.deviation:.0e}",
            )
            for rank in outcome.ranks
        ]
    columns = (
        "placement",
        "rank",
        "parameters MiB",
        "USS MiB",
        "PSS MiB",
        "peak MiB",
        "start s",
        "outcome",
    )
    title = f"A model of {model_bytes / 2**30:.2f} GiB; {limit_bytes / 2**30:.2f} GiB for a process"
    caption = f"Bounded by {by}; deviation from the reference computed block by block."
    table(title, columns, rows, caption)
    for outcome in outcomes:
        if outcome.reason:
            console.print(f"{outcome.placement}: {outcome.reason}", markup=False, highlight=False)
