"""Alternating rounds, A B C A B C: each is started, warmed, loaded and ended in its turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.bench.load import Bodies, Cell, measure, warm
from tests.bench.processes import OUT, BenchError, Contender, Server
from tests.bench.report import NOISY_CORES, Spread, Steps, paired, spread, table

_READY_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One workload, and all that compete in it."""

    workload: str
    bodies: Bodies
    contenders: Sequence[Contender]

    def asked_of(self, contender: Contender) -> "Match":
        """The same, its bodies sent to the path of this contender."""
        if not contender.path:
            return self
        return replace(self, bodies=replace(self.bodies, path=contender.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how often."""

    connections: Sequence[int]
    secs: int
    """Of each cell."""
    warm_s: int
    rounds: int
    port: int


@dataclass(slots=True)
class Results:
    """What has been measured so far."""

    cells: list[Cell] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Turns that gave nothing, and why."""
    answers: dict[str, str] = field(default_factory=dict)
    """What each answered first: a look at whether all do the same work."""
    is_complete: bool = True


def run(matches: Sequence[Match], plan: Plan) -> Results:
    """Measure everything; a turn that fails is noted, and Ctrl-C ends early with what there is."""
    results = Results()
    num_turns = plan.rounds * sum(len(match.contenders) for match in matches)
    with Steps(num_turns * len(plan.connections)) as steps:
        try:
            for round_ in range(plan.rounds):
                for match in matches:
                    for contender in match.contenders:
                        _take_turn(match, contender, round_, plan, results, steps)
        except KeyboardInterrupt:
            results.is_complete = False
    return results


def _take_turn(
    match: Match, contender: Contender, round_: int, plan: Plan, results: Results, steps: Steps
) -> None:
    what = f"round {round_ + 1}: {match.workload}, {contender.name}"
    match = match.asked_of(contender)
    num_done = 0
    try:
        with Server(contender, plan.port, OUT / "logs" / f"{contender.name}.log") as server:
            steps.begin(f"{what}, starting")
            answer = server.wait_ready(match.bodies.probe(), _READY_TIMEOUT_S)
            key = f"{match.workload}, {contender.name}"
            results.answers.setdefault(key, answer[:200].decode(errors="replace"))
            warm(server, match.bodies, 16, plan.warm_s)
            for connections in plan.connections:
                steps.begin(f"{what}, {connections} connections")
                cell = measure(server, match.workload, match.bodies, connections, plan.secs, round_)
                results.cells.append(cell)
                steps.end()
                num_done += 1
    except BenchError as error:
        results.failures.append(f"{what}: {error}")
        for _ in range(len(plan.connections) - num_done):
            steps.end()


Figure = Callable[[Cell], float]


def over_rounds(
    cells: Sequence[Cell], workload: str, connections: int, contender: str, figure: Figure
) -> Mapping[int, float]:
    """One figure of one contender, by round."""
    return {
        cell.round: figure(cell)
        for cell in cells
        if (cell.workload, cell.connections, cell.contender) == (workload, connections, contender)
    }


def keys(cells: Sequence[Cell]) -> Sequence[tuple[str, int, str]]:
    """Workload, connections and contender of each row, in the order of measuring."""
    found = dict.fromkeys((cell.workload, cell.connections, cell.contender) for cell in cells)
    workloads = list(dict.fromkeys(workload for workload, _, _ in found))
    return sorted(found, key=lambda key: (workloads.index(key[0]), key[1]))


def print_cells(title: str, cells: Sequence[Cell]) -> None:
    """The table of everything: medians, and the range of the requests per second."""
    columns = (
        "workload", "conns", "server", "requests/s (range)", "p50 ms", "p90 ms", "p99 ms",
        "max ms", "errors", "CPU s/1000", "PSS MiB", "wrk cores", "noise", "rounds",
    )  # fmt: skip
    rows = []
    for workload, connections, contender in keys(cells):
        those = [
            cell
            for cell in cells
            if (cell.workload, cell.connections, cell.contender)
            == (workload, connections, contender)
        ]

        def median(figure: Figure, digits: int, those: Sequence[Cell] = those) -> str:
            return f"{spread(map(figure, those)).median:,.{digits}f}"

        num_noisy = sum(cell.other_cores + cell.stolen_cores > NOISY_CORES for cell in those)
        rows.append((
            workload,
            str(connections),
            contender,
            spread(cell.requests_per_s for cell in those).text(),
            median(lambda cell: cell.p50_ms, 2),
            median(lambda cell: cell.p90_ms, 2),
            median(lambda cell: cell.p99_ms, 2),
            f"{max(cell.max_ms for cell in those):,.1f}",
            str(sum(cell.errors for cell in those)),
            median(lambda cell: cell.cpu_s_per_1000, 3),
            median(lambda cell: cell.pss_mib, 0),
            median(lambda cell: cell.generator_cores, 2),
            median(lambda cell: cell.other_cores + cell.stolen_cores, 2)
            + ("!" if num_noisy else " "),
            f"{len(those)}" + (f", {num_noisy} noisy" if num_noisy else ""),
        ))  # fmt: skip
    caption = (
        f"Medians over the rounds; max and errors over all. noise: cores taken by others, "
        f"marked above {NOISY_CORES}."
    )
    table(title, columns, rows, caption)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One contender's figures divided by another's, round by round."""

    workload: str
    connections: int
    ours: str
    theirs: str
    requests_per_s: Spread | None
    p50_ms: Spread | None
    cpu_s_per_1000: Spread | None
    pss_mib: Spread | None


def ratios(cells: Sequence[Cell], ours: str) -> Sequence[Ratio]:
    """Ours against each of the others."""
    found = []
    for workload, connections, theirs in keys(cells):
        if theirs == ours:
            continue

        def of(
            figure: Figure, place: tuple[str, int] = (workload, connections), other: str = theirs
        ) -> Spread | None:
            mine = over_rounds(cells, *place, ours, figure)
            return paired(mine, over_rounds(cells, *place, other, figure))

        found.append(
            Ratio(
                workload=workload,
                connections=connections,
                ours=ours,
                theirs=theirs,
                requests_per_s=of(lambda cell: cell.requests_per_s),
                p50_ms=of(lambda cell: cell.p50_ms),
                cpu_s_per_1000=of(lambda cell: cell.cpu_s_per_1000),
                pss_mib=of(lambda cell: cell.pss_mib),
            )
        )
    return found


def print_ratios(found: Sequence[Ratio]) -> None:
    """The table of ratios, if there are any."""
    if not found:
        return
    columns = ("workload", "conns", "ratio", "requests/s x", "p50 x", "CPU/request x", "PSS x")
    rows = [
        (
            each.workload,
            str(each.connections),
            f"{each.ours} / {each.theirs}",
            *(
                value.text(2) if value else "-"
                for value in (
                    each.requests_per_s,
                    each.p50_ms,
                    each.cpu_s_per_1000,
                    each.pss_mib,
                )
            ),
        )
        for each in found
    ]
    caption = (
        "Median (lowest-highest) of the ratios of the rounds. Only requests/s is better above 1."
    )
    table("Side by side", columns, rows, caption)
