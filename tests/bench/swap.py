"""`swap`: the failures, latencies and times of swaps of a model under full load."""

import asyncio
import http.client
import json
import secrets
import shlex
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inferpool.service.tools.trial.connection import Address, connected, post_request
from inferpool.service.tools.trial.load import LoadExchange, LoadGenerator, LoadPlan, judge_status
from inferpool.service.tools.trial.tally import LatencyHistogram, LoadTally
from tests.bench.frame import Benchmark
from tests.bench.server import HOST, BenchError, BenchServer, inferpool
from tests.bench.workloads import photos

HELP = "failures, latencies and times of swaps of a model under full load"
OPTIONS = {
    "rounds": 3,
    "secs": 20,
    "warm": 5,
    "serve-args": "--speed exact",
    "model": ("efficientnet_lite0", "that takes JPEG"),
    "clients": (16, "in a closed loop"),
    "policy": ("verified", "of the swaps; with force nothing is compared"),
}
_ANSWER_S = 300.0
_LOOK_S = 0.05


@dataclass(slots=True)
class PhasedJudge:
    """Keeps the latencies of calls that were under way in a swap apart from those of others."""

    is_swapping: bool = False
    swapped_at: float = 0.0
    latency: defaultdict[str, LatencyHistogram] = field(
        default_factory=lambda: defaultdict(LatencyHistogram)
    )
    versions: set[bytes] = field(default_factory=set)

    def __call__(self, exchange: LoadExchange, tally: LoadTally) -> str:
        error = judge_status(exchange, tally)
        if not error and exchange.answer is not None:
            self.versions.add(exchange.answer.header(b"x-model-version"))
            phase = "during" if self.is_swapping or exchange.sent < self.swapped_at else "before"
            self.latency[phase].record(exchange.ended - exchange.due)
        return error


@dataclass(frozen=True, slots=True)
class Swapper:
    """Swaps the model, and waits until the former version has left."""

    address: Address
    key: str
    path: str
    policy: str

    async def swap(self) -> tuple[float, float, Mapping[str, object]]:
        """Return the time until the answer, until the former version had left, and the figures."""
        began = time.monotonic()
        body = json.dumps({"policy": self.policy, "rollback_s": 0, "max_latency_ratio": 4.0})
        answer = await self._ask("POST", "/versions", body.encode())
        decided_s = time.monotonic() - began
        while (await self._ask("GET", "", b""))["change"]:  # noqa: ASYNC110  # it tells who asks
            await asyncio.sleep(_LOOK_S)
        versions = answer["versions"]
        assert isinstance(versions, list)
        return decided_s, time.monotonic() - began, versions[0]["figures"] or {}

    async def _ask(self, method: str, what: str, body: bytes) -> Mapping[str, object]:
        headers = {"X-API-Key": self.key}
        request = post_request(self.path + what, body, "application/json", headers)
        async with connected(self.address) as connection:
            answer = await connection.ask(request.replace(b"POST", method.encode(), 1), _ANSWER_S)
        if answer.status != 200:
            raise BenchError(f"{method} {self.path}{what}: {answer.body.decode()}")
        found: Mapping[str, object] = json.loads(answer.body)
        return found


async def measure(
    operator: Swapper, requests: Sequence[bytes], *, clients: int, rounds: int, secs: float
) -> tuple[LoadTally, PhasedJudge, list[tuple[float, float, Mapping[str, object]]]]:
    """Load a service, and swap its model after each `secs` seconds."""
    judge = PhasedJudge()
    plan = LoadPlan(address=operator.address, requests=requests, connections=clients, judge=judge)
    load = LoadGenerator(plan)
    running = asyncio.create_task(load.run())
    swaps = []
    try:
        for _ in range(rounds):
            await asyncio.sleep(secs)
            judge.is_swapping = True
            swaps.append(await operator.swap())
            judge.is_swapping, judge.swapped_at = False, time.monotonic()
        await asyncio.sleep(secs)
    finally:
        load.stop()
        tally = await running
    return tally, judge, swaps


def run(bench: Benchmark) -> None:
    """Swap the model of one service again and again."""
    args = bench.args
    key = secrets.token_urlsafe(24)
    command = inferpool(
        args.inferpool, args.model, *shlex.split(args.serve_args),
        env={"INFERPOOL_ADMIN_KEYS": key},
    )  # fmt: skip
    bodies = photos()
    requests = [
        post_request(f"/predict/{args.model}", file.read_bytes(), bodies.content_type)
        for file in bodies.files
    ]
    operator = Swapper((HOST, args.port), key, f"/admin/models/{args.model}", args.policy)
    try:
        with BenchServer(command, args.port) as server:
            server.wait_ready(bodies.probe())
            warm = LoadPlan(
                address=operator.address, requests=requests, connections=args.clients,
                duration_s=args.warm,
            )  # fmt: skip
            asyncio.run(_run(warm))
            began = time.monotonic()
            tally, judge, swaps = asyncio.run(
                measure(operator, requests, clients=args.clients, rounds=args.rounds,
                        secs=args.secs)
            )  # fmt: skip
            seconds = time.monotonic() - began
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"the service was lost: {error!r}") from error
    if tally.num_errors:
        bench.failures.append(f"{tally.num_errors} calls failed: {dict(tally.errors)}")
    rows = []
    for phase, latency in judge.latency.items():
        figures = [f"{1e3 * latency.percentile_s(each):,.1f}" for each in (50, 90, 99, 100)]
        rows.append((phase, f"{latency.num:,}", *figures))
    bench.content |= {
        "calls": tally.num_requests,
        "errors": dict(tally.errors),
        "seconds": seconds,
        "swaps": swaps,
        "latency_ms": {
            phase: {str(each): 1e3 * latency.percentile_s(each) for each in (50, 90, 99, 100)}
            for phase, latency in judge.latency.items()
        },
    }
    bench.add_note(
        f"{tally.num_requests:,} calls in {seconds:.0f} s, {tally.num_errors} failed; "
        f"{len(judge.versions)} versions answered"
    )
    columns = ("calls", "number", "p50 ms", "p90 ms", "p99 ms", "max ms")
    caption = "during: under way between the request for a swap and the end of the former version."
    bench.add_table("Latency before and during swaps", columns, rows, caption)
    times = [
        (str(number), f"{decided_s:.2f}", f"{left_s:.2f}", str(figures.get("num_inputs", "")))
        for number, (decided_s, left_s, figures) in enumerate(swaps, 1)
    ]
    columns = ("swap", "seconds until it was decided", "until the former had left", "compared")
    bench.add_table("Swaps", columns, times)


async def _run(plan: LoadPlan) -> None:
    await LoadGenerator(plan).run()
