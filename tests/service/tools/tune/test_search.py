import asyncio
from collections.abc import Mapping, Sequence

import pytest

from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.tune.candidates import LoadSample
from inferpool.service.tools.tune.knobs import Knob
from inferpool.service.tools.tune.plan import Goal
from inferpool.service.tools.tune.search import BestLostError, Search, SearchOutcome
from tests.service.tools.tune.fake_starter import (
    ROUND_S,
    START_S,
    FakeCandidate,
    FakeStarter,
    Surface,
)


def line(name: str, up: Sequence[int], down: Sequence[int] = ()) -> Knob:
    ways = [[{name: value} for value in way] for way in (up, down)]
    return Knob(name=name, ways=[way for way in ways if way])


KNOBS = [line("batch", (16, 32, 64), (4, 2)), line("credit", (3, 4), (1,))]


def tune(
    starter: FakeStarter,
    goal: Goal | None = None,
    *,
    budget_s: float = 1e6,
    knobs: Sequence[Knob] = KNOBS,
) -> SearchOutcome:
    async def go() -> SearchOutcome:
        search = Search(starter, goal or Goal(), budget_s)
        await search.begin()
        await search.run(knobs)
        return search.outcome

    return asyncio.run(go())


def peak(**best: int) -> Surface:
    """Twice as fast at the best value of each setting as far away from it."""

    def rate(changes: Mapping[str, object]) -> float:
        now = {"batch": 8, "credit": 2, **changes}
        product = 1000.0
        for name, at in best.items():
            value = now[name]
            assert isinstance(value, int)
            product *= 1 + min(value, at) / max(value, at)
        return product

    return rate


def chosen(outcome: SearchOutcome) -> Mapping[str, object]:
    assert outcome.best is not None
    return outcome.best.changes


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("best", "changes"),
    [
        ({"batch": 32, "credit": 1}, {"batch": 32, "credit": 1}),
        ({"batch": 2, "credit": 4}, {"batch": 2, "credit": 4}),
        ({"batch": 64}, {"batch": 64}),
        ({"batch": 8, "credit": 2}, {}),
    ],
)
def test_climbs_to_the_best_value_of_each_knob_though_the_machine_drifts(
    best: dict[str, int], changes: dict[str, int], seed: int
):
    starter = FakeStarter(peak(**best), seed=seed)
    outcome = tune(starter)
    assert (starter.most_alive, starter.alive) == (2, [])
    assert chosen(outcome) == changes
    assert outcome.is_confirmed
    peak_rate, base_rate = peak(**best)(changes), peak(**best)({})
    assert outcome.best is not None
    assert outcome.best.gain == pytest.approx(peak_rate / base_rate, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_keeps_the_settings_as_they_are_in_a_tie_or_for_a_slight_gain(seed: int):
    outcome = tune(FakeStarter(lambda _: 1000.0, noise=0.03, seed=seed))
    assert chosen(outcome) == {}
    assert outcome.best is not None
    assert outcome.best.gain == 1.0
    assert all(each.verdict in ("default", "no better", "worse") for each in outcome.tried)
    slight = FakeStarter(lambda changes: 1020.0 if "batch" in changes else 1000.0, noise=0.001)
    assert chosen(tune(slight)) == {}, "two percent are not worth a setting"


def test_candidate_that_is_not_better_in_the_end_is_not_recommended():
    def rate(changes: Mapping[str, object]) -> float:
        if not changes and len(starter.started) > 1:  # the settings as they were, once more
            for each in starter.alive:
                each.rate *= 0.9
        return 1100.0 if changes else 1000.0

    starter = FakeStarter(rate, noise=0.0)
    outcome = tune(starter)
    assert chosen(outcome) == {}
    assert outcome.is_confirmed
    assert "not when it was measured again" in {each.reason for each in outcome.tried}


def test_budget_limits_what_is_tried_and_the_rest_is_named():
    starter = FakeStarter(peak(batch=64, credit=4))
    outcome = tune(starter, budget_s=90.0)
    assert len(outcome.tried) > 2
    assert outcome.untried
    assert outcome.is_confirmed
    assert starter.now() <= 90.0
    assert outcome.needed_s > 90.0
    with_more = tune(FakeStarter(peak(batch=64, credit=4)), budget_s=outcome.needed_s)
    assert len(with_more.tried) == len(outcome.tried) + 1


def test_one_candidate_is_tried_however_small_the_budget_is():
    outcome = tune(FakeStarter(peak(batch=64, credit=4)), budget_s=1.0)
    assert len(outcome.tried) == 2
    assert outcome.untried
    assert outcome.is_confirmed


def test_hopeless_candidate_gets_one_pair_of_rounds():
    starter = FakeStarter(lambda changes: 500.0 if changes else 1000.0)
    tune(starter, knobs=[line("batch", (16,))])
    assert starter.now() == pytest.approx(2 * START_S + (1 + 2) * ROUND_S)


@pytest.mark.parametrize(
    ("goal", "least", "most"),
    [(Goal(connections=64, p99_ms=20), 10, 63), (Goal(connections=4, p99_ms=1000), 4, 4)],
)
def test_objective_is_held_by_fewer_clients_where_all_are_too_many(
    goal: Goal, least: int, most: int
):
    outcome = tune(FakeStarter(peak(batch=64), noise=0.001, drift=0.0), goal)
    assert chosen(outcome) == {"batch": 64}
    assert least <= outcome.connections <= most
    assert outcome.best is not None
    assert goal.is_met(outcome.best.p99_s)


def test_candidate_that_breaks_the_objective_loses_however_fast_it_is():
    def spoil(candidate: FakeCandidate, sample: LoadSample) -> None:
        if candidate.changes:
            sample.tally.num_in_time *= 2
            sample.tally.latency.record(1.0, sample.tally.latency.num)

    starter = FakeStarter(lambda _: 1000.0, spoil=spoil)
    outcome = tune(starter, Goal(connections=8, p99_ms=100))
    assert chosen(outcome) == {}
    assert {each.verdict for each in outcome.tried[1:]} == {"late"}


def test_objective_out_of_reach_makes_latency_what_counts():
    outcome = tune(FakeStarter(peak(batch=32)), Goal(connections=64, p99_ms=0.001))
    assert outcome.connections == 1
    assert chosen(outcome) == {"batch": 32}


def test_candidate_that_does_not_start_is_reported_and_skipped():
    starter = FakeStarter(lambda changes: 0.0 if "batch" in changes else peak(credit=4)(changes))
    outcome = tune(starter)
    assert chosen(outcome) == {"credit": 4}
    failed = [each for each in outcome.tried if each.verdict == "fails"]
    assert {each.reason for each in failed} == {"the service ended with exit code 3"}
    with pytest.raises(TrialError, match="exit code 3"):
        tune(FakeStarter(lambda _: 0.0))  # the settings as they are


def test_best_that_stops_answering_ends_the_search_and_is_not_held_against_others():
    def spoil(candidate: FakeCandidate, _: LoadSample) -> None:
        if not candidate.changes and starter.now() > 2 * START_S:
            raise TrialError("no answer has come for 60 s")

    starter = FakeStarter(lambda _: 1000.0, spoil=spoil)
    with pytest.raises(BestLostError):
        tune(starter)
    assert starter.alive == []


def test_interrupted_search_leaves_no_service_and_keeps_what_it_found():
    starter = FakeStarter(peak(batch=64, credit=4))

    async def go() -> SearchOutcome:
        task = asyncio.current_task()
        assert task is not None

        def on_trial(_: str) -> None:
            if len(starter.started) == 4:
                task.cancel()

        search = Search(starter, Goal(), 1e6, on_trial)
        await search.begin()

        with pytest.raises(asyncio.CancelledError):
            await search.run(KNOBS)
        return search.outcome

    outcome = asyncio.run(go())
    assert starter.alive == []
    assert chosen(outcome) == {"batch": 64}
    assert not outcome.is_confirmed
