"""`model`: images per second of the service, against plain processes that do the same in a loop."""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from inferpool.models.spec import Placement
from inferpool.workers.host.devices import find_host
from inferpool.workers.host.placing import Wish, place
from tests.bench import rounds
from tests.bench.load import Bodies, Cell, measure, require_wrk, warm
from tests.bench.peers import conclude
from tests.bench.photos import photos
from tests.bench.processes import (
    MALLOC,
    OUT,
    ROOT,
    BenchError,
    Contender,
    Probe,
    Server,
    ask,
    inferpool,
    machine_s,
    signals_held,
)
from tests.bench.report import Spread, Steps, paired, save, spread, table

HELP = "the model under load, against plain processes that do the same with no service"
_LOAD_TIMEOUT_S = 180
PLAIN: Mapping[str, Mapping[str, str]] = {"plain": {}, "plain+malloc": MALLOC}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the service and the plain processes have in common."""

    source: str
    weights: str
    batch_size: int
    placements: Sequence[Placement]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", default="efficientnet_lite0", help="default: %(default)s")
    parser.add_argument("--weights", default="DEFAULT", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--processes", type=int, help="replicas; default: what the service chooses")
    parser.add_argument("--threads", type=int, help="of each; default: what the service chooses")


def run(args: argparse.Namespace, plan: rounds.Plan) -> int:
    """Measure, print and save; returns the exit status."""
    require_wrk()
    host = find_host(os.environ.get("CUDA_VISIBLE_DEVICES"))
    setting = Setting(
        source=args.source,
        weights=args.weights,
        batch_size=args.batch,
        placements=place(host, Wish(replicas=args.processes, threads=args.threads)),
    )
    bodies = Bodies(files=photos(), content_type="image/jpeg")
    contender = _service(args.inferpool, setting)
    results = rounds.Results()
    plain: list[Plain] = []
    with Steps(plan.rounds * (len(PLAIN) + len(plan.connections))) as steps:
        try:
            for round_ in range(plan.rounds):
                for name, env in PLAIN.items():
                    steps.begin(f"round {round_ + 1}: {name}")
                    plain.append(_run_plain(name, env, setting, bodies, plan.secs, round_))
                    steps.end()
                _load_service(contender, setting, bodies, plan, round_, results, steps)
        except KeyboardInterrupt:
            results.is_complete = False
        except BenchError as error:
            results.failures.append(str(error))
            results.is_complete = False
    if plain and results.cells:
        rounds.print_cells("The service under load", results.cells)
        ratios = _print_ratios(plain, results.cells)
        content = {
            "plan": asdict(plan),
            "setting": asdict(setting),
            "plain": [asdict(each) for each in plain],
            "results": asdict(results),
            "ratios": ratios,
        }
        save("model", args.out, content)
    return conclude(results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What the plain processes did together in one round."""

    name: str
    round: int
    images_per_s: float
    cpu_s_per_1000: float
    other_cores: float


def _run_plain(
    name: str, env: Mapping[str, str], setting: Setting, bodies: Bodies, secs: int, round_: int
) -> Plain:
    with _plain_processes(env, setting, bodies, secs) as processes:
        for process in processes:
            if _line(process) != "ready":
                raise BenchError(
                    f"{name}: a process ended while it was loading, or took too long (see above)"
                )
        busy_s, stolen_s = machine_s()
        began = time.monotonic()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(f"{secs}\n")
            process.stdin.flush()
        told = [json.loads(_line(process) or "null") for process in processes]
        wall_s = time.monotonic() - began
        busy_after_s, stolen_after_s = machine_s()
    if None in told:
        raise BenchError(f"{name}: a process ended in the middle (see above)")
    cpu_s = sum(each["cpu_s"] for each in told)
    others_s = busy_after_s - busy_s - cpu_s + stolen_after_s - stolen_s
    return Plain(
        name=name,
        round=round_,
        images_per_s=sum(each["num_images"] / each["duration_s"] for each in told),
        cpu_s_per_1000=cpu_s / sum(each["num_images"] for each in told) * 1000,
        other_cores=max(0.0, others_s) / wall_s,
    )


@contextmanager
def _plain_processes(
    env: Mapping[str, str], setting: Setting, bodies: Bodies, secs: int
) -> Iterator[Sequence[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def kill() -> None:
        for process in processes:
            process.kill()

    # Whoever waits for a line of theirs then reads the end of the file instead.
    watchdog = threading.Timer(_LOAD_TIMEOUT_S + secs, kill)
    watchdog.start()
    try:
        for number, placement in enumerate(setting.placements):
            # Each begins with another photograph, as the service's workers would.
            start = number * len(bodies.files) // len(setting.placements)
            files = [str(file) for file in [*bodies.files[start:], *bodies.files[:start]]]
            told = {
                "source": setting.source,
                "weights": None if setting.weights == "none" else setting.weights,
                "batch_size": setting.batch_size,
                "devices": placement.devices,
                "cpus": placement.cpus,
                "num_threads": placement.num_threads,
                "files": files,
            }
            with signals_held():
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.bench.plain_loop", json.dumps(told)],
                    cwd=ROOT,
                    env={**os.environ, **env, **_visible(placement)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                processes.append(process)
        yield processes
    finally:
        watchdog.cancel()
        kill()
        for process in processes:
            process.communicate()


def _visible(placement: Placement) -> Mapping[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(placement.visible)} if placement.visible else {}


def _line(process: subprocess.Popen[str]) -> str:
    """The next line that it writes; "" if it ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _service(command: str, setting: Setting) -> Contender:
    threads = setting.placements[0].num_threads
    variable = f"INFERPOOL_MODELS__{_variable_part(setting.source)}__THREADS_PER_REPLICA"
    return inferpool(
        command,
        setting.source,
        "--weights",
        setting.weights,
        "--speed",
        "exact",
        "--max-batch-size",
        str(setting.batch_size),
        "--replicas",
        str(len(setting.placements)),
        env={variable: str(threads)},
    )


def _variable_part(source: str) -> str:
    return source.rpartition(":")[2].upper().replace("-", "_").replace(".", "_")


def _load_service(
    contender: Contender,
    setting: Setting,
    bodies: Bodies,
    plan: rounds.Plan,
    round_: int,
    results: rounds.Results,
    steps: Steps,
) -> None:
    with Server(contender, plan.port, OUT / "logs" / "model.log") as server:
        steps.begin(f"round {round_ + 1}: the service, starting")
        answer = server.wait_ready(bodies.probe(), _LOAD_TIMEOUT_S)
        results.answers.setdefault(setting.source, answer[:300].decode(errors="replace"))
        _await_workers(server, len(setting.placements))
        warm(server, bodies, max(plan.connections), plan.warm_s)
        for connections in plan.connections:
            steps.begin(f"round {round_ + 1}: the service, {connections} connections")
            results.cells.append(
                measure(server, setting.source, bodies, connections, plan.secs, round_)
            )
            steps.end()


def _await_workers(server: Server, num_expected: int) -> None:
    """Compare only with as many processes as the service has; it is ready with the first of them.

    Raises:
        BenchError: It does not come to have that many.
    """
    until = time.monotonic() + _LOAD_TIMEOUT_S
    while True:
        _, health = ask(server.port, Probe(path="/health"))
        workers = json.loads(health)["models"][0]["workers"]
        num_ready = sum(worker["state"] == "ready" for worker in workers)
        if num_ready == num_expected == len(workers):
            return
        if len(workers) != num_expected or time.monotonic() > until:
            found = f"{num_ready} ready workers of {len(workers)}"
            raise BenchError(f"the service has {found}; {num_expected} are to be compared")
        time.sleep(0.05)


def _print_ratios(plain: Sequence[Plain], cells: Sequence[Cell]) -> list[dict[str, object]]:
    ratios: list[dict[str, object]] = []
    rows = []
    for name in PLAIN:
        bare = {each.round: each.images_per_s for each in plain if each.name == name}
        noise = spread(each.other_cores for each in plain if each.name == name)
        cpu = spread(each.cpu_s_per_1000 for each in plain if each.name == name)
        rows.append((name, spread(bare.values()).text(1), "", cpu.text(2), f"{noise.median:.2f}"))
    for connections in dict.fromkeys(cell.connections for cell in cells):
        those = [cell for cell in cells if cell.connections == connections]
        ours = {cell.round: cell.requests_per_s for cell in those}
        against: dict[str, Spread | None] = {}
        for name in PLAIN:
            bare = {each.round: each.images_per_s for each in plain if each.name == name}
            against[name] = paired(ours, bare)
            ratios.append({
                "connections": connections,
                "against": name,
                "ratio": (value := against[name]) and asdict(value),
            })  # fmt: skip
        rows.append((
            f"service, {connections} connections",
            spread(ours.values()).text(1),
            "  ".join(f"{value.text(3)} of {name}" for name, value in against.items() if value),
            spread(cell.cpu_s_per_1000 for cell in those).text(2),
            f"{spread(cell.other_cores for cell in those).median:.2f}",
        ))  # fmt: skip
    columns = ("", "images/s (range)", "ratio, paired by round", "CPU s/1000", "noise")
    caption = (
        "plain: as many processes and threads, the same photographs and batches; decoding, "
        "batching and forward passes only. plain+malloc: with the allocator set as in the "
        "service's workers."
    )
    table("The service against plain processes", columns, rows, caption)
    return ratios
