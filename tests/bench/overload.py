"""`overload`: goodput, refusals and latency at several times the capacity, from an open loop."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from inferpool.service.tools.trial.connection import post_request
from inferpool.service.tools.trial.load import LoadExchange, LoadGenerator, judge_status
from inferpool.service.tools.trial.tally import LatencyHistogram, LoadTally
from tests.bench.frame import Benchmark, Cell, benchmark
from tests.bench.server import BenchServer, inferpool, plan_for
from tests.e2e.running import FAULTY

_SETTLE_S = 0.5
"""Begin of each phase, which is not counted."""


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


async def ask_numbers(
    port: int, *, secs: float, rate: float | None = None, timeout_ms: int = 0
) -> tuple[LoadTally, FaultJudge]:
    """Load a service of `FaultModel`: at a rate (even distances), or in a closed loop."""
    judge = FaultJudge()
    headers = {"X-Timeout-Ms": str(timeout_ms)} if timeout_ms else {}

    def request(number: int) -> bytes:
        body = b'{"instances":[{"n":%d}]}' % number
        return post_request("/predict", body, "application/json", headers)

    plan = plan_for(
        port, request, rate, is_even=True, warmup_s=_SETTLE_S, duration_s=secs, judge=judge
    )
    return await LoadGenerator(plan).run(), judge


async def measure(
    port: int, *, times: float, secs: float, timeout_ms: int = 0, peak_s: float = 2.0
) -> dict[str, float]:
    """Find the capacity of a service of `FaultModel`, and ask for `times` as much.

    Returns:
        Right answers per second in a closed loop (`peak`) and under overload (`goodput`), answers
        by kind, their latencies from when they were due, and the server's own time for refusals.
    """
    before, _ = await ask_numbers(port, secs=peak_s)
    peak = before.num_in_time / peak_s
    tally, judge = await ask_numbers(port, rate=peak * times, secs=secs, timeout_ms=timeout_ms)
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
        **{f"p{each}_ms": 1e3 * tally.latency.percentile_s(each) for each in (50, 99)},
        **{f"refusal_p{each}_ms": 1e3 * refusal.percentile_s(each) for each in (50, 90, 99)},
        "refusal_max_ms": 1e3 * refusal.max_s,
        "retry_after_least_s": min(judge.retry_after_s, default=0),
        "retry_after_most_s": max(judge.retry_after_s, default=0),
    }


@benchmark(
    "goodput, refusals and latency at several times the capacity",
    rounds=5,
    secs=10,
    serve_args="--replicas 1",
    times=(10.0, "the capacity"),
    forward_ms=(20.0, "of a batch"),
    queue=(64, "max_queue_length"),
    timeout_ms=(0, "a deadline for each request; 0: none"),
)
def overload(bench: Benchmark) -> None:
    """Start the service and overload it, in each round."""
    args = bench.args
    settings = {
        "max_queue_length": args.queue,
        "models.m.source": FAULTY,
        "models.m.max_batch_size": 8,
        "models.m.options.forward_s": args.forward_ms / 1000,
    }

    def take(_: int) -> Iterator[Cell]:
        with BenchServer(inferpool(args, settings=settings), args.port) as server:
            server.wait_ready()
            load = measure(args.port, times=args.times, secs=args.secs, timeout_ms=args.timeout_ms)
            yield Cell(f"{args.times:g} x", "inferpool", 0, asyncio.run(load))

    bench.take_turns({f"{args.times:g} times the capacity": take})
    caption = "Latency counts from when a request was due; a refusal's time is the server's own."
    bench.report(caption=caption)
