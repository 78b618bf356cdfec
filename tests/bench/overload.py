"""`overload`: goodput, refusals and latency at several times the capacity, from an open loop."""

import asyncio
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from inferpool.service.tools.trial.connection import Address, post_request
from inferpool.service.tools.trial.load import LoadExchange, LoadGenerator, LoadPlan, judge_status
from inferpool.service.tools.trial.tally import LatencyHistogram, LoadTally
from tests.bench.frame import Benchmark, Cell, Column
from tests.bench.server import HOST, OUT, BenchServer, Probe, inferpool

HELP = "goodput, refusals and latency at several times the capacity"
OPTIONS = {
    "rounds": 5,
    "secs": 10,
    "serve-args": "--replicas 1",
    "times": (10.0, "the capacity"),
    "forward-ms": (20.0, "of a batch"),
    "batch": (8, "max_batch_size"),
    "queue": (64, "max_queue_length"),
    "timeout-ms": (0, "a deadline for each request; 0: none"),
}
_SETTLE_S = 0.5
"""Begin of each phase, which is not counted."""
_NUM_CLIENTS = 32
"""Clients of the closed loop; more than fill two batches of each worker find nothing more."""
_COLUMNS = (
    Column("peak", "peak/s", 0, "range"),
    Column("goodput", "goodput/s", 0, "range"),
    Column("goodput_share", "goodput / peak", 2, "range"),
    Column("wrong", "wrong", 0, "sum"),
    Column("refused", "429"),
    Column("expired", "504"),
    Column("other", "other", 0, "sum"),
    Column("p50_ms", "p50 ms", 1),
    Column("p99_ms", "p99 ms", 1, "range"),
    Column("refusal_p50_ms", "refusal p50 ms", 2),
    Column("refusal_p99_ms", "p99 ms", 2),
    Column("refusal_max_ms", "max ms", 1, "max"),
    Column("retry_after_least_s", "Retry-After s"),
    Column("retry_after_most_s", "most s", 0, "max"),
)


@dataclass(slots=True)
class FaultJudge:
    """Checks the answers of `tests.fault_model:FaultModel`, and keeps what they say."""

    server_time: defaultdict[int, LatencyHistogram] = field(
        default_factory=lambda: defaultdict(LatencyHistogram)
    )
    """The server's own time (Server-Timing), by status."""
    retry_after_s: set[int] = field(default_factory=set)
    """Seconds of the Retry-After of refusals; 0 without one."""

    def __call__(self, exchange: LoadExchange, tally: LoadTally) -> str:
        if (answer := exchange.answer) is None:
            return exchange.failure
        total_ms = float(answer.header(b"server-timing").rpartition(b"total;dur=")[2])
        self.server_time[answer.status].record(total_ms / 1e3)
        if answer.status == 429:
            self.retry_after_s.add(int(answer.header(b"retry-after") or 0))
        if answer.status == 200 and b'"twice":%d,' % (2 * exchange.number) not in answer.body:
            return "wrong"
        return judge_status(exchange, tally)


async def measure(
    address: Address, *, times: float, secs: float, timeout_ms: int | None, peak_s: float = 2.0
) -> dict[str, float]:
    """Find the capacity of a service of `FaultModel`, and ask for `times` as much.

    Returns:
        Right answers per second in a closed loop (`peak`) and under overload (`goodput`), answers
        by kind, their latencies from when they were due, and the server's own time for refusals.
    """
    before, _ = await ask_numbers(address, secs=peak_s, connections=_NUM_CLIENTS)
    peak = before.num_in_time / peak_s
    tally, judge = await ask_numbers(
        address, rate=peak * times, secs=secs, timeout_ms=timeout_ms, connections=10_000
    )
    num_good, num_refused, num_expired = (tally.statuses[code] for code in ("200", "429", "504"))
    refusal = judge.server_time[429]
    return {
        "peak": peak,
        "goodput": tally.num_in_time / secs,
        "goodput_share": tally.num_in_time / secs / peak,
        "good": num_good,
        "wrong": tally.errors["wrong"],
        "refused": num_refused,
        "expired": num_expired,
        "other": tally.num_requests - num_good - num_refused - num_expired,
        "p50_ms": 1e3 * tally.latency.percentile_s(50),
        "p99_ms": 1e3 * tally.latency.percentile_s(99),
        "refusal_p50_ms": 1e3 * refusal.percentile_s(50),
        "refusal_p90_ms": 1e3 * refusal.percentile_s(90),
        "refusal_p99_ms": 1e3 * refusal.percentile_s(99),
        "refusal_max_ms": 1e3 * refusal.max_s,
        "retry_after_least_s": min(judge.retry_after_s, default=0),
        "retry_after_most_s": max(judge.retry_after_s, default=0),
    }


async def ask_numbers(
    address: Address,
    *,
    secs: float,
    connections: int,
    rate: float | None = None,
    timeout_ms: int | None = None,
) -> tuple[LoadTally, FaultJudge]:
    """Load a service of `FaultModel`: at a rate (even distances), or in a closed loop."""
    judge = FaultJudge()
    headers = {"X-Timeout-Ms": str(timeout_ms)} if timeout_ms else {}

    def request(number: int) -> bytes:
        body = b'{"instances":[{"n":%d}]}' % number
        return post_request("/predict", body, "application/json", headers)

    plan = LoadPlan(
        address=address,
        requests=request,
        connections=connections,
        rate=rate,
        is_even=True,
        warmup_s=_SETTLE_S,
        duration_s=secs,
        judge=judge,
    )
    return await LoadGenerator(plan).run(), judge


def run(bench: Benchmark) -> None:
    """Start the service and overload it, in each round."""
    args = bench.args
    config = OUT / "overload.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        f"max_queue_length = {args.queue}\n[models.m]\n"
        f'source = "tests.fault_model:FaultModel"\nmax_batch_size = {args.batch}\n'
        f"options = {{ forward_s = {args.forward_ms / 1000} }}\n"
    )
    serve = ["m", "--config", str(config), *shlex.split(args.serve_args)]
    command = inferpool(args.inferpool, *serve, env={"PYTHONPATH": "."})
    probe = Probe(path="/predict", body=b'{"instances":[{"n":1}]}', content_type="application/json")

    def take(round_: int) -> Iterator[Cell]:
        with BenchServer(command, args.port) as server:
            server.wait_ready(probe)
            load = measure(
                (HOST, args.port), times=args.times, secs=args.secs, timeout_ms=args.timeout_ms
            )
            figures = asyncio.run(load)
        yield Cell(
            workload=f"{args.times:g} x", contender="inferpool", round=round_, figures=figures
        )

    bench.take_turns({f"{args.times:g} times the capacity": take})


def report(bench: Benchmark) -> None:
    """Print goodput, refusals and latencies."""
    caption = "Latency counts from when a request was due; a refusal's time is the server's own."
    bench.add_cells("Overload, open loop", "", _COLUMNS, caption)
