"""`overload`: what becomes of requests at several times the capacity, from an open loop."""

import argparse
import asyncio
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tests.bench import rounds
from tests.bench.open_loop import Answer, Load
from tests.bench.peers import conclude
from tests.bench.processes import HOST, OUT, BenchError, Probe, Server, inferpool
from tests.bench.report import Steps, save, spread, table

HELP = "goodput, refusals and latency at several times the capacity"
_SETTLE_S = 0.5
"""The begin of each phase, which is not counted."""
_NUM_CLIENTS = 32
"""In the closed loop; more than fill two batches of each worker find nothing more."""
_NUM_CONNECTIONS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a server did under overload, and before."""

    peak: float
    """Right answers per second in a closed loop."""
    goodput: float
    """Right answers per second while it was overloaded."""
    answers: Sequence[Answer]
    """Of the overload."""

    @property
    def num_wrong(self) -> int:
        """Predictions that were not the right ones."""
        return sum(not answer.is_right for answer in self.of(200))

    def of(self, status: int) -> list[Answer]:
        """The answers of a status."""
        return [answer for answer in self.answers if answer.status == status]

    def latency_s(self, quantile: float) -> float:
        """Of those that were answered with a prediction."""
        return _quantile([answer.latency_s for answer in self.of(200)], quantile)

    def refusal_ms(self, quantile: float) -> float:
        """What the server took for a 429."""
        return _quantile([answer.total_ms for answer in self.of(429)], quantile)


async def measure(
    host: str, port: int, *, times: float, secs: float, timeout_ms: int | None, peak_s: float = 2.0
) -> Phase:
    """Find the capacity of a service of `FaultModel`, and ask for several times as much.

    Args:
        host: The service's.
        port: The service's.
        times: How many times the capacity.
        secs: For how long.
        timeout_ms: The deadline of each request under overload.
        peak_s: How long the closed loop takes.
    """
    before = Load(host, port)
    await before.connect(_NUM_CLIENTS)
    peak = _rate(await before.closed(_NUM_CLIENTS, peak_s), peak_s)
    before.close()
    load = Load(host, port, timeout_ms=timeout_ms)
    await load.connect(_NUM_CONNECTIONS)
    answers = await load.open(peak * times, secs)
    load.close()
    return Phase(peak=peak, goodput=_rate(answers, secs), answers=answers)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--times", type=float, default=10, help="the capacity (%(default)s)")
    parser.add_argument("--open-secs", type=int, default=10, help="of overload (%(default)s)")
    parser.add_argument("--forward-ms", type=float, default=20, help="of a batch (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="max_batch_size (%(default)s)")
    parser.add_argument("--queue", type=int, default=64, help="max_queue_length (%(default)s)")
    parser.add_argument("--timeout-ms", type=int, help="a deadline for each request; default: none")
    parser.add_argument("--serve-args", default="--replicas 1", help="default: %(default)s")


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Measure, print and save; returns the exit status."""
    config = OUT / "overload.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        f"max_queue_length = {args.queue}\n[models.m]\n"
        f'source = "tests.fault_model:FaultModel"\nmax_batch_size = {args.batch}\n'
        f"options = {{ forward_s = {args.forward_ms / 1000} }}\n"
    )
    serve = ["m", "--config", str(config), *shlex.split(args.serve_args)]
    contender = inferpool(args.inferpool, *serve, env={"PYTHONPATH": "."})
    results = rounds.Results()
    phases: list[Phase] = []
    probe = Probe(path="/predict", body=b'{"instances":[{"n":1}]}', content_type="application/json")
    with Steps(plan.rounds) as steps:
        try:
            for round_ in range(plan.rounds):
                steps.begin(f"round {round_ + 1}: {args.times:g} times the capacity")
                with Server(contender, plan.port, OUT / "logs" / "overload.log") as server:
                    server.wait_ready(probe, 60)
                    phase = measure(
                        HOST,
                        plan.port,
                        times=args.times,
                        secs=args.open_secs,
                        timeout_ms=args.timeout_ms,
                    )
                    phases.append(asyncio.run(phase))
                steps.end()
        except KeyboardInterrupt:
            results.is_complete = False
        except BenchError as error:
            results.failures.append(str(error))
    if phases:
        _print(phases)
        kept = [{"peak": each.peak, "goodput": each.goodput, **_figures(each)} for each in phases]
        save("overload", args.out, {"plan": asdict(plan), "phases": kept})
    return conclude(results)


def _figures(phase: Phase) -> dict[str, float]:
    return {
        "goodput / peak": phase.goodput / phase.peak,
        "predictions": len(phase.of(200)),
        "wrong": phase.num_wrong,
        "refused (429)": len(phase.of(429)),
        "late (504)": len(phase.of(504)),
        "other": len(phase.answers) - sum(len(phase.of(code)) for code in (200, 429, 504)),
        "latency p50 ms": 1000 * phase.latency_s(0.5),
        "latency p99 ms": 1000 * phase.latency_s(0.99),
        "refusal p50 ms": phase.refusal_ms(0.5),
        "refusal p99 ms": phase.refusal_ms(0.99),
        "refusal max ms": phase.refusal_ms(1.0),
    }


def _print(phases: Sequence[Phase]) -> None:
    rows = [
        ("peak, predictions/s", spread(each.peak for each in phases).text()),
        ("goodput, predictions/s", spread(each.goodput for each in phases).text()),
    ]
    for name in _figures(phases[0]):
        values = spread(_figures(each)[name] for each in phases)
        rows.append((name, values.text(2 if "/" in name or "ms" in name else 0)))
    after = Counter(answer.retry_after_s for each in phases for answer in each.of(429))
    rows.append(("Retry-After, s", ", ".join(f"{s}: {n:,}" for s, n in sorted(after.items()))))
    caption = "Latency counts from when a request was due; a refusal's time is the server's own."
    table("Overload, open loop", ("", "median (range over rounds)"), rows, caption)


def _rate(answers: Sequence[Answer], secs: float) -> float:
    began = min(answer.due for answer in answers)
    right = [answer for answer in answers if answer.status == 200 and answer.is_right]
    counted = [each for each in right if _SETTLE_S < each.got - began <= secs]
    return len(counted) / (secs - _SETTLE_S)


def _quantile(values: Sequence[float], quantile: float) -> float:
    return sorted(values)[min(len(values) - 1, int(quantile * len(values)))] if values else 0.0
