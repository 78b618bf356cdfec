"""`sweep`: latency against the arrival rate, open loop, up to collapse and beyond."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from tests.bench import peers, plots, rounds
from tests.bench.load import Bodies, measure, require_wrk, warm
from tests.bench.processes import OUT, ROOT, BenchError, Contender, Server
from tests.bench.report import Steps, save, spread, table
from tests.load.charts import Chart, Line

HELP = "latency against the arrival rate, open loop, up to collapse"
SHARES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5)
"""The rates, as shares of what the same server answers in a closed loop."""
_READY_TIMEOUT_S = 180
_WAIT_S = 3.0
"""For the last answers of a rate."""
_COLLAPSED = 0.8
"""Where less of what is due is answered in time, and that twice, higher rates show nothing new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one server did in one round at one rate. Latencies count from when requests were due."""

    contender: str
    workload: str
    round: int
    rate: float
    """Requests that became due, per second."""
    good_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    refused: int
    """Answers that were no success."""
    unanswered: int
    """No answer 3 s after the end; in the latencies with the time until then."""
    broken: int
    lateness_p99_ms: float
    """What the generator itself held requests back, or a lack of free connections did."""
    server_cores: float
    generator_cores: float
    other_cores: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    peers.add_arguments(parser)
    parser.add_argument(
        "--rates",
        type=_rates,
        metavar="RATE,RATE,...",
        help="requests per second for all; default: shares of what each can do in a closed loop",
    )
    parser.add_argument(
        "--max-connections", type=int, default=512, help="of the open loop (%(default)s)"
    )
    parser.add_argument("--p99-ms", type=float, help="an objective, to be drawn into the plots")


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers with commas between") from None


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Measure, print and save; returns the exit status."""
    require_wrk()
    matches, settings = peers.make_matches(args)
    num_turns = plan.rounds * sum(len(match.contenders) for match in matches)
    sweep = Sweep(plan, args.rates, args.max_connections)
    results = sweep.results
    with Steps(num_turns * len(args.rates or SHARES)) as sweep.steps:
        try:
            for round_ in range(plan.rounds):
                for match in matches:
                    for contender in match.contenders:
                        sweep.take_turn(match, contender, round_)
        except KeyboardInterrupt:
            results.is_complete = False
    if sweep.points:
        _print(sweep.points)
        content = {
            "peers": {name: asdict(peer) for name, peer in settings.items()},
            "plan": asdict(plan),
            "rates": {" ".join(key): rates for key, rates in sweep.rates.items()},
            "failures": results.failures,
            "points": [asdict(point) for point in sweep.points],
        }
        saved = save("sweep", args.out, content)
        charts = _charts(sweep.points, args.p99_ms)
        plots.write(
            saved, "Latency against the arrival rate", charts, "open loop, Poisson arrivals"
        )
    return peers.conclude(results)


class Sweep:
    """What has been measured so far."""

    steps: Steps

    def __init__(
        self, plan: rounds.Plan, rates: Sequence[float] | None, max_connections: int
    ) -> None:
        self.results = rounds.Results()
        self.points: list[Point] = []
        self.rates: dict[tuple[str, str], Sequence[float]] = {}
        """By workload and contender: found in the first round, the same in all."""
        self._plan = plan
        self._given = rates
        self._max_connections = max_connections

    def take_turn(self, match: rounds.Match, contender: Contender, round_: int) -> None:
        """Start one server, and ask it at one rate after another."""
        what = f"round {round_ + 1}: {match.workload}, {contender.name}"
        match = match.asked_of(contender)
        num_left = len(self._given or SHARES)
        log = OUT / "logs" / f"{contender.name}.log"
        try:
            with Server(contender, self._plan.port, log) as server:
                self.steps.begin(f"{what}, starting")
                server.wait_ready(match.bodies.probe(), _READY_TIMEOUT_S)
                num_collapsed = 0
                for rate in self._rates_of(match, server):
                    self.steps.begin(f"{what}, {rate:,.0f} requests/s")
                    point = self._measure(match, server, rate, round_)
                    self.points.append(point)
                    self.steps.end()
                    num_left -= 1
                    num_collapsed += point.good_per_s < _COLLAPSED * rate
                    if num_collapsed == 2:
                        break
        except BenchError as error:
            self.results.failures.append(f"{what}: {error}")
        for _ in range(num_left):
            self.steps.end()

    def _rates_of(self, match: rounds.Match, server: Server) -> Sequence[float]:
        plan = self._plan
        warm(server, match.bodies, 16, plan.warm_s)
        if self._given:
            return self._given
        # Settings of one server are asked at the same rates: those that suit the first.
        name = server.contender.name
        key = match.workload, peers.OURS if name.startswith(peers.OURS) else name
        if key not in self.rates:
            connections = max(plan.connections)
            cell = measure(server, match.workload, match.bodies, connections, plan.secs, 0)
            self.rates[key] = [round(share * cell.requests_per_s, 1) for share in SHARES]
        return self.rates[key]

    def _measure(self, match: rounds.Match, server: Server, rate: float, round_: int) -> Point:
        before = server.usage()
        told = arrivals(server.port, match.bodies, rate, self._plan, self._max_connections, round_)
        after = server.usage()
        # The wait at the end belongs to the span too: cores are those of all of it.
        server_s = after.front_s + after.rest_s - before.front_s - before.rest_s
        known_s = server_s + told["cpu_s"] + after.own_s - before.own_s
        others_s = after.machine_s - before.machine_s - known_s
        span_s = told["span_s"]
        return Point(
            contender=server.contender.name,
            workload=match.workload,
            round=round_,
            rate=rate,
            good_per_s=told["good_per_s"],
            p50_ms=told["p50_ms"],
            p90_ms=told["p90_ms"],
            p99_ms=told["p99_ms"],
            max_ms=told["max_ms"],
            refused=int(told["num_refused"]),
            unanswered=int(told["num_unanswered"]),
            broken=int(told["num_broken"]),
            lateness_p99_ms=told["lateness_p99_ms"],
            server_cores=server_s / span_s,
            generator_cores=told["cpu_s"] / span_s,
            other_cores=max(0.0, others_s) / span_s,
        )


def arrivals(
    port: int, bodies: Bodies, rate: float, plan: rounds.Plan, max_connections: int, seed: int
) -> dict[str, float]:
    told = {
        "port": port,
        "path": bodies.path,
        "content_type": bodies.content_type,
        "files": [str(file) for file in bodies.files],
        "rate": rate,
        "warm_s": min(1.0, plan.warm_s),
        "secs": plan.secs,
        "wait_s": _WAIT_S,
        "max_connections": max_connections,
        "seed": seed,
    }
    argv = [sys.executable, "-m", "tests.bench.arrivals", json.dumps(told)]
    timeout_s = plan.secs + _WAIT_S + 60
    try:
        result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"the arrivals at {rate:g}/s did not end") from error
    if result.returncode:
        raise BenchError(f"the arrivals at {rate:g}/s: {result.stderr[-300:]}")
    found: dict[str, float] = json.loads(result.stdout)
    return found


def _print(points: Sequence[Point]) -> None:
    columns = (
        "workload", "server", "due/s", "good/s (range)", "p50 ms", "p99 ms (range)", "refused",
        "no answer", "late ms", "cores", "generator", "noise", "rounds",
    )  # fmt: skip
    rows = []
    for workload, contender, rate in dict.fromkeys(
        (point.workload, point.contender, point.rate) for point in points
    ):
        those = [
            point
            for point in points
            if (point.workload, point.contender, point.rate) == (workload, contender, rate)
        ]
        rows.append((
            workload,
            contender,
            f"{rate:,.0f}",
            spread(point.good_per_s for point in those).text(),
            f"{spread(point.p50_ms for point in those).median:,.2f}",
            spread(point.p99_ms for point in those).text(1),
            str(sum(point.refused for point in those)),
            str(sum(point.unanswered + point.broken for point in those)),
            f"{spread(point.lateness_p99_ms for point in those).median:,.1f}",
            f"{spread(point.server_cores for point in those).median:.2f}",
            f"{spread(point.generator_cores for point in those).median:.2f}",
            f"{spread(point.other_cores for point in those).median:.2f}",
            str(len(those)),
        ))  # fmt: skip
    caption = (
        "Latency counts from when a request was due. late: p99 of the delay before it was sent, by "
        "the generator or for want of a free connection."
    )
    table("Arrival rates, open loop", columns, rows, caption)


def _charts(points: Sequence[Point], objective_ms: float | None) -> list[Chart]:
    """p99 and good answers of each contender against the rate; two plots for each workload."""
    charts = []
    for workload in dict.fromkeys(point.workload for point in points):
        those = [point for point in points if point.workload == workload]
        names = list(dict.fromkeys(point.contender for point in those))
        for title, y_label, is_latency, figure in (
            ("p99 of the latency", "ms, median over rounds", True, _p99_ms),
            ("good answers", "per second, median over rounds", False, _good_per_s),
        ):
            lines = [
                Line(name=name, points=_curve(those, name, figure), marks=True) for name in names
            ]
            charts.append(
                Chart(
                    title=f"{workload}: {title}",
                    x_label="requests that become due, per second",
                    y_label=y_label,
                    lines=lines,
                    log_x=True,
                    log_y=True,
                    limit=(objective_ms, "objective") if objective_ms and is_latency else None,
                )
            )
    return charts


def _p99_ms(point: Point) -> float:
    return point.p99_ms


def _good_per_s(point: Point) -> float:
    return point.good_per_s


def _curve(
    points: Sequence[Point], contender: str, figure: Callable[[Point], float]
) -> list[tuple[float, float]]:
    those = [point for point in points if point.contender == contender]
    rates = sorted({point.rate for point in those})
    return [
        (rate, spread(figure(point) for point in those if point.rate == rate).median)
        for rate in rates
    ]
