"""The report of `inferpool chaos`: was the promise kept, and the figures."""

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from inferpool.service.client.texts import table
from inferpool.service.telemetry.versions import version_of
from inferpool.service.tools.chaos.faults import Poisonings
from inferpool.service.tools.chaos.load import ChaosTally
from inferpool.service.tools.chaos.plan import EXTRA, PLURALS, ChaosPlan, Fault
from inferpool.service.tools.chaos.resources import Holdings, LedgerReading
from inferpool.service.tools.chaos.stores import StoreFaults
from inferpool.service.tools.chaos.swaps import MOST_COMPARED, Swaps
from inferpool.service.tools.chaos.watch import Kind, Recovery
from inferpool.service.tools.trial.report import machine
from inferpool.service.tools.trial.tally import LatencyHistogram

_MIB = 2**20
_COUNTS = ("right", "wrong", "lost", "duplicated", "expired", "late")
_OF_PLAN = ("hosts", "clients", "seed", "planned_kills")
_PLAIN = ("workers", "is_complete", "is_interrupted", "exit_code", "left_over")
_DEADLY: Sequence[Fault] = (
    "kill", "stop", "poison", "forkserver", "decoder", "swap", "host", "scribble", "burst",
)  # fmt: skip
"""Faults that cost workers, so that any client may be refused for a while."""
_SIGNALS: Mapping[Kind, str] = {
    "kill": "SIGKILL", "stop": "SIGSTOP", "forkserver": "forkserver", "decoder": "decoder",
    "host kill": "host SIGKILL", "host stop": "host SIGSTOP", "host end": "host SIGTERM",
}  # fmt: skip
_BACK: Mapping[Kind, str] = {
    "host kill": "  back after its start",
    "host stop": "  back after SIGCONT",
    "host end": "  back after its start",
}
"""Recovery of a host is timed from the moment when it may come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """Results of a run of `inferpool chaos`."""

    plan: ChaosPlan
    models: Sequence[str]
    workers: int
    seconds: float
    is_complete: bool
    is_interrupted: bool
    quiet: ChaosTally
    chaos: ChaosTally
    faults: Mapping[Fault, int]
    poisonings: Poisonings
    greedy: ChaosTally
    """Requests with the second key."""
    stores: StoreFaults
    swaps: Swaps
    recoveries: Sequence[Recovery]
    ledger: LedgerReading | None
    """The service's counters since the quiet part began; None if they could not be read."""
    before: Holdings
    after: Holdings | None
    exit_code: int | None
    """Exit code of the service after it was asked to stop; None if it did not stop."""
    left_over: int
    notes: Sequence[str] = ()
    agent_complaints: Sequence[str] = ()
    """Problems of agents that were asked to end."""

    @property
    def attempts(self) -> int:
        """Instances that were sent in all, refused ones included."""
        return self.poisonings.num_attempts + sum(each.num_instances_sent for each in self._tallies)

    def _sum_of(self, name: str) -> int:
        return sum(getattr(each, name) for each in self._tallies)

    @property
    def _tallies(self) -> Sequence[ChaosTally]:
        return self.quiet, self.chaos, self.greedy

    @property
    def untried(self) -> list[str]:
        """Kinds of faults that were planned and did not happen."""
        return [kind for kind, count in self.faults.items() if not count]

    def problems(self) -> list[str]:
        """Return what broke the promise; empty if it was kept."""
        counts = {name: self._sum_of(name) for name in ("wrong", "lost", "duplicated")}
        found = [f"{count} {name}" for name, count in counts.items() if count]
        if num_late := self._sum_of("late"):
            found.append(f"{num_late} answered long after their deadline")
        num_refused = sum(self.chaos.refused.values())
        if num_refused and self.faults.get("greed") and not any(map(self.faults.get, _DEADLY)):
            found.append(f"{num_refused} were refused for the greed of another key")
        if not self.is_complete and not self.is_interrupted:
            found.append("the run ended before its time")
        found += self.swaps.failed + self.stores.failed
        found += self.agent_complaints
        found += self._of_ledger()
        found += self._of_holdings()
        if self.exit_code != 0 and self.is_complete:
            how = "did not stop" if self.exit_code is None else f"exited with {self.exit_code}"
            found.append(f"the service {how} when it was told to")
        if self.left_over:
            found.append(f"{self.left_over} processes outlived the service")
        return found

    def as_dict(self) -> dict[str, object]:
        """Return everything for JSON."""
        return {
            "problems": self.problems(),
            "command": " ".join(["inferpool", *sys.argv[1:]]),
            "version": version_of(),
            "torch": version_of("torch"),
            "machine": machine(),
            "models": list(self.models),
            "seconds": round(self.seconds, 3),
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: getattr(self.plan, name) for name in _OF_PLAN},
            "faults": dict(self.faults),
            "struck": self._struck(),
            "poisonings": {
                "sent": self.poisonings.num_sent,
                "right": self.poisonings.right,
                "attempts": self.poisonings.num_attempts,
                "quarantined": self.poisonings.num_quarantined,
            },
            "swaps": {"done": self.swaps.num_done, "refused": self.swaps.refused},
            "greedy": _tally_dict(self.greedy),
            "quiet": _tally_dict(self.quiet),
            "chaos": _tally_dict(self.chaos),
            "recovery_ms": {
                kind: {"noticed": spread_ms(noticed), "recovered": spread_ms(recovered)}
                for kind, (noticed, recovered) in self._recovery().items()
            },
            "ledger": asdict(self.ledger) if self.ledger else None,
            "before": asdict(self.before),
            "after": asdict(self.after) if self.after else None,
            "notes": list(self.notes),
        }

    def write(self, stream: TextIO) -> None:
        """Write the report as text."""
        stream.write(table(list(self._rows())))
        for text in itertools.chain(*(each.examples for each in self._tallies)):
            stream.write(f"  {text}\n")
        problems = self.problems()
        kept = "kept until the interruption" if self.is_interrupted else "kept"
        if self.untried:
            kept += f" (but {', '.join(self.untried)} did not come about: let it run for longer)"
        verdict = f"broken: {'; '.join(problems)}" if problems else f"{kept}: one right answer each"
        stream.write(f"The promise was {verdict}.\n")

    def _rows(self) -> Iterator[tuple[str, str]]:
        chaos, quiet = self.chaos, self.quiet
        on_hosts = f" on {self.plan.hosts} hosts" if self.plan.hosts else ""
        yield "service", f"{', '.join(self.models)}; {self.workers} workers{on_hosts}"
        yield "machine", ", ".join(str(value) for value in machine().values())
        yield "versions", f"inferpool {version_of()}, torch {version_of('torch')}"
        yield "seed", str(self.plan.seed)
        rate = chaos.num_settled / self.seconds if self.seconds else 0.0
        yield "went on", self.plan.text
        yield (
            "sent",
            f"{chaos.num_sent:,} by {self.plan.clients} clients in {self.seconds:.1f} s "
            f"({rate:,.0f} a second); {quiet.num_sent:,} before, undisturbed",
        )
        yield "right", f"{chaos.right:,}"
        for name in ("wrong", "lost", "duplicated"):
            yield name, f"{self._sum_of(name):,}"
        refused = chaos.refused + quiet.refused
        by_status = ", ".join(f"{count:,} with {status}" for status, count in refused.items())
        yield "refused", f"{sum(refused.values()):,}" + (f": {by_status}" if by_status else "")
        yield "expired, late", f"{chaos.expired + quiet.expired:,}, {chaos.late + quiet.late:,}"
        if chaos.broken:
            yield "streams broken off", f"{chaos.broken:,}, said so after right parts; asked again"
        if (greedy := self.greedy).num_sent:
            num_refused = sum(greedy.refused.values())
            yield (
                "greedy",
                (f"{greedy.num_sent:,} sent, {greedy.right:,} right, {num_refused:,} refusals"),
            )
        yield "faults", self._faults_text()
        if (swaps := self.swaps).num_begun:
            yield "swaps", f"{swaps.num_done} done, {len(swaps.refused)} refused"
        for kind, by_rank in self._struck().items():
            text = ", ".join(f"rank {rank} {count} times" for rank, count in by_rank.items())
            yield f"  {_SIGNALS[kind]}", text
        for kind, (noticed, recovered) in self._recovery().items():
            yield f"{_SIGNALS[kind]} noticed", f"{_spread_text(noticed)}  (median / p99 / worst)"
            yield _BACK.get(kind, "  full capacity"), _spread_text(recovered)
        yield "latency before", f"{_spread_text(quiet.latency)}  (median / p99 / worst)"
        yield "latency during", _spread_text(chaos.latency)
        if self.ledger is not None:
            ledger = self.ledger
            yield (
                "ledger",
                f"{ledger.accepted:,} accepted = {ledger.succeeded:,} succeeded + "
                f"{ledger.failed:,} failed + {ledger.expired:,} expired + "
                f"{ledger.cancelled:,} cancelled + {ledger.in_flight:,} in flight",
            )
            yield (
                "lost workers",
                f"{ledger.restarts:,} restarts; {ledger.retried:,} instances were sent again",
            )
        if self.after is not None:
            yield from self._holdings_rows(self.before, self.after)
        for note in self.notes:
            yield "note", note

    def _faults_text(self) -> str:
        kills = self.faults.get("kill", 0)
        num_planned = self.plan.planned_kills
        planned = f" of {num_planned} planned" if kills < num_planned else ""
        decoders, hosts = self.faults.get("decoder"), self.faults.get("host")
        return (
            f"{kills} SIGKILLs{planned}, {self.faults.get('stop', 0)} SIGSTOPs, "
            f"{self.poisonings.num_sent} poisoned inputs, "
            f"{self.faults.get('forkserver', 0)} signals to the forkserver"
            + (f", {decoders} to decoders" if decoders is not None else "")
            + (f", {hosts} hosts" if hosts is not None else "")
            + "".join(f", {n} {PLURALS[kind]}" for kind, n in self.faults.items() if kind in EXTRA)
        )

    def _holdings_rows(self, before: Holdings, after: Holdings) -> Iterator[tuple[str, str]]:
        yield (
            "front end",
            f"descriptors {before.descriptors} -> {after.descriptors}, "
            f"threads {before.threads} -> {after.threads}, "
            f"PSS {before.pss_bytes / _MIB:.1f} -> {after.pss_bytes / _MIB:.1f} MiB",
        )
        yield (
            "all processes",
            f"{before.processes} -> {after.processes}, PSS of the others "
            f"{before.others_pss_bytes / _MIB:.0f} -> {after.others_pss_bytes / _MIB:.0f} MiB",
        )
        yield (
            "shared memory",
            f"{before.shared_bytes / _MIB:.1f} -> {after.shared_bytes / _MIB:.1f} MiB in "
            f"{before.shared_files} -> {after.shared_files} pieces; files in /dev/shm "
            f"{before.dev_shm_files} -> {after.dev_shm_files}",
        )

    def _recovery(self) -> dict[Kind, tuple[LatencyHistogram, LatencyHistogram]]:
        found: dict[Kind, tuple[LatencyHistogram, LatencyHistogram]] = {}
        for kind in _SIGNALS:
            if those := [each for each in self.recoveries if each.kind == kind]:
                found[kind] = (
                    _times((each.began, each.noticed) for each in those),
                    _times((each.freed or each.began, each.recovered) for each in those),
                )
        return found

    def _struck(self) -> dict[Kind, dict[int, int]]:
        found: dict[Kind, dict[int, int]] = {}
        for kind in _SIGNALS:
            ranks = [r.rank for r in self.recoveries if r.kind == kind and r.rank is not None]
            if ranks:
                found[kind] = dict(sorted(Counter(ranks).items()))
        return found

    def _of_ledger(self) -> Iterator[str]:
        ledger = self.ledger
        if ledger is None:
            yield "the service's counters could not be read"
            return
        if ledger.in_flight:
            yield f"the service's ledger does not balance: {ledger.in_flight} have no end"
        most_compared = MOST_COMPARED * self.swaps.num_begun + self.stores.most_computed
        num_compared = ledger.accepted + ledger.rejected - self.attempts
        if not 0 <= num_compared <= most_compared:
            yield (
                f"{self.attempts} instances were sent, and the service counted "
                f"{ledger.accepted} accepted and {ledger.rejected} refused"
            )
        succeeded = sum(each.num_instances_right for each in self._tallies)
        is_so = 0 <= ledger.succeeded - succeeded <= most_compared
        if not is_so and not any(each.wrong for each in self._tallies):
            yield f"{succeeded} were answered right, and the service counted {ledger.succeeded}"
        if ledger.arena_used_bytes:
            yield f"{ledger.arena_used_bytes} bytes of the arena were not given back"

    def _of_holdings(self) -> Iterator[str]:
        before, after = self.before, self.after
        if after is None:
            return
        for name in ("descriptors", "processes", "shared_bytes", "shared_files"):
            was, now = getattr(before, name), getattr(after, name)
            if now > was:
                yield f"{name.replace('_', ' ')}: {was} before, {now} after"
        left_behind = sum(each.num_left_behind for each in self.recoveries)
        if left_behind:
            yield f"{left_behind} processes outlived the worker that they were of"
        unrecovered = sum(each.recovered is None for each in self.recoveries)
        if unrecovered and not self.is_interrupted:
            yield f"{unrecovered} workers or hosts did not come back"


def spread_ms(times: LatencyHistogram) -> dict[str, float] | None:
    """Return median, 99th percentile and worst in milliseconds; None without a time."""
    named = {"median": 50, "p99": 99, "worst": 100}
    found = {name: 1000 * times.percentile_s(percent) for name, percent in named.items()}
    return found if times.num else None


def _spread_text(times: LatencyHistogram) -> str:
    spread = spread_ms(times)
    return " / ".join(f"{each:,.1f}" for each in spread.values()) + " ms" if spread else "-"


def _times(moments: Iterable[tuple[float, float | None]]) -> LatencyHistogram:
    found = LatencyHistogram()
    for began, ended in moments:
        if ended is not None:
            found.record(ended - began)
    return found


def _tally_dict(tally: ChaosTally) -> dict[str, object]:
    return {
        "sent": tally.num_sent,
        **{name: getattr(tally, name) for name in _COUNTS},
        "refused": {str(status): count for status, count in tally.refused.items()},
        "latency_ms": spread_ms(tally.latency),
        "examples": tally.examples,
    }
