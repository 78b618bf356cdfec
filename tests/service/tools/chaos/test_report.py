import io
import json
from dataclasses import replace
from typing import get_args

import pytest
from msgspec.structs import replace as replace_struct

from inferpool.service.tools.chaos.faults import Poisonings
from inferpool.service.tools.chaos.load import ChaosTally
from inferpool.service.tools.chaos.plan import ChaosPlan, Fault
from inferpool.service.tools.chaos.report import ChaosReport, spread_ms
from inferpool.service.tools.chaos.resources import Holdings, LedgerReading
from inferpool.service.tools.chaos.stores import StoreFaults
from inferpool.service.tools.chaos.swaps import Swaps
from inferpool.service.tools.chaos.watch import Recovery
from inferpool.service.tools.trial.tally import LatencyHistogram

_HOLDINGS = Holdings(
    descriptors=30, threads=5, processes=5, pss_bytes=60 << 20, others_pss_bytes=300 << 20,
    shared_bytes=1 << 20, shared_files=3, dev_shm_files=0,
)  # fmt: skip
_LEDGER = LedgerReading(
    accepted=111, succeeded=110, failed=1, expired=0, cancelled=0, rejected=1, arena_used_bytes=0,
    restarts=4, retried=3,
)  # fmt: skip
_RECOVERY = Recovery(kind="kill", worker="echo/0", incarnation=1, began=1, noticed=2, recovered=3)
_PLAN = ChaosPlan(kills=1, clients=4, every_s=dict.fromkeys(get_args(Fault), 0.0) | {"kill": 2.0})
_SWAPS = Swaps(address=("h", 1), models=["echo"], key="")


def tally(count: int, **changes: int) -> ChaosTally:
    made = ChaosTally(
        num_sent=count, num_instances_sent=count, num_instances_right=count, right=count
    )
    made.latency.record(0.001, count)
    return replace(made, **changes)  # type: ignore[arg-type]


def report(**changes: object) -> ChaosReport:
    whole = ChaosReport(
        plan=_PLAN, models=["echo"], workers=2, seconds=2.0,
        is_complete=True, is_interrupted=False,
        quiet=tally(10), chaos=tally(100), greedy=tally(0), faults={"kill": 1, "poison": 1},
        poisonings=Poisonings(num_sent=1, right=1, num_attempts=2), swaps=_SWAPS,
        stores=StoreFaults(address=("h", 1), folder=None, questions=[]),
        recoveries=[_RECOVERY], ledger=_LEDGER, before=_HOLDINGS, after=_HOLDINGS,
        exit_code=0, left_over=0,
    )  # fmt: skip
    return replace(whole, **changes)  # type: ignore[arg-type]


def written(**changes: object) -> str:
    stream = io.StringIO()
    report(**changes).write(stream)
    return stream.getvalue()


def test_greedy_key_may_be_refused_and_the_watched_one_only_if_workers_are_struck_too():
    greedy = tally(5)
    greedy.refused[429] = 9
    told = {"greedy": greedy, "ledger": replace(_LEDGER, accepted=116, succeeded=115)}
    assert report(faults={"greed": 1}, **told).problems() == []
    assert "5 sent, 5 right, 9 refusals" in written(faults={"greed": 1}, **told)
    watched = tally(100)
    watched.refused[503] = 2
    (problem,) = report(faults={"greed": 1}, chaos=watched, **told).problems()
    assert problem == "2 were refused for the greed of another key"
    assert report(faults={"greed": 1, "kill": 1}, chaos=watched, **told).problems() == []
    assert report(greedy=tally(5, wrong=1), ledger=told["ledger"]).problems() == ["1 wrong"]


def test_what_swaps_compare_is_counted_by_the_service_alone():
    assert report().problems() == []
    swaps = replace(_SWAPS, num_done=1)
    compared = replace(_LEDGER, accepted=111 + 12, succeeded=110 + 12)
    assert report(ledger=compared).problems()
    assert report(ledger=compared, swaps=swaps).problems() == []
    assert report(ledger=replace(_LEDGER, accepted=110), swaps=swaps).problems()
    assert "1 done, 1 refused" in written(swaps=replace(swaps, refused=["no worker came up"]))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"chaos": tally(100, wrong=1)}, "1 wrong"),
        ({"chaos": tally(100, lost=2)}, "2 lost"),
        ({"quiet": tally(10, duplicated=3)}, "3 duplicated"),
        ({"chaos": tally(100, late=1)}, "1 answered long after"),
        ({"is_complete": False}, "ended before its time"),
        ({"ledger": replace(_LEDGER, failed=0)}, "does not balance: 1 have no end"),
        ({"ledger": replace(_LEDGER, accepted=112, expired=1)}, "112 accepted and 1 refused"),
        ({"ledger": replace(_LEDGER, succeeded=109, failed=2)}, "and the service counted 109"),
        ({"ledger": replace(_LEDGER, arena_used_bytes=64)}, "64 bytes of the arena"),
        ({"ledger": None}, "could not be read"),
        ({"after": replace(_HOLDINGS, descriptors=31)}, "descriptors: 30 before, 31 after"),
        ({"after": replace(_HOLDINGS, shared_bytes=2 << 20)}, "shared bytes"),
        ({"exit_code": None}, "did not stop"),
        ({"exit_code": 1}, "exited with 1"),
        ({"left_over": 1}, "1 processes outlived"),
        ({"recoveries": [replace_struct(_RECOVERY, num_left_behind=1)]}, "outlived the worker"),
        ({"recoveries": [replace_struct(_RECOVERY, recovered=None)]}, "hosts did not come back"),
        ({"swaps": replace(_SWAPS, failed=["a swap had no answer"])}, "a swap had no answer"),
        ({"agent_complaints": ["the agent a exited with 1"]}, "the agent a exited with 1"),
    ],
)
def test_each_way_of_breaking_the_promise_is_named(changes: dict[str, object], problem: str):
    (found,) = report(**changes).problems()
    assert problem in found


def test_report_says_the_figures_and_the_verdict():
    text = written(
        plan=replace(_PLAN, kills=5),
        faults={"kill": 1, "stop": 0, "poison": 1, "forkserver": 2, "decoder": 3},
    )
    for piece in (
        "until there are at least 10,000 requests and 5 kills",
        "1 SIGKILLs of 5 planned",
        "2 signals to the forkserver, 3 to decoders",
        "(but stop did not come about",
        "2,000.0 / 2,000.0 / 2,000.0 ms",
        "111 accepted = 110 succeeded + 1 failed",
        "The promise was kept",
    ):
        assert piece in text
    broken = written(chaos=tally(100, lost=2, wrong=1))
    assert "The promise was broken: 1 wrong; 2 lost" in broken


def test_interrupted_run_is_no_broken_promise():
    interrupted = {"is_complete": False, "is_interrupted": True, "exit_code": -2}
    assert report(**interrupted).problems() == []
    assert "kept until the interruption" in written(**interrupted)
    assert report(**interrupted, chaos=tally(100, lost=1)).problems() == ["1 lost"]


def test_report_says_which_ranks_of_split_workers_were_struck():
    recoveries = [replace_struct(_RECOVERY, rank=rank) for rank in (1, 0, 1)]
    assert "  SIGKILL        rank 0 1 times, rank 1 2 times" in written(recoveries=recoveries)
    document = json.loads(json.dumps(report(recoveries=recoveries).as_dict()))
    assert document["struck"] == {"kill": {"0": 1, "1": 2}}
    assert (document["problems"], document["chaos"]["right"]) == ([], 100)
    assert document["recovery_ms"]["kill"]["recovered"]["worst"] == 2000


def test_spread_is_in_milliseconds():
    times = LatencyHistogram()
    assert spread_ms(times) is None
    for each in range(1, 201):
        times.record(each / 1000)
    expected = {"median": 100, "p99": 198, "worst": 200}
    assert spread_ms(times) == pytest.approx(expected, rel=0.01)


def test_hosts_come_back_from_their_start_on():
    stopped = Recovery(
        kind="host stop", worker="a", host="a", incarnation=1,
        began=1.0, noticed=4.5, freed=6.0, recovered=6.25,
    )  # fmt: skip
    changes = {
        "plan": replace(_PLAN, hosts=3),
        "recoveries": [stopped],
        "faults": {"kill": 1, "poison": 1, "host": 1},
    }
    times = report(**changes).as_dict()["recovery_ms"]["host stop"]  # type: ignore[index]
    assert (times["noticed"]["worst"], times["recovered"]["worst"]) == (3500.0, 250.0)
    text = written(**changes)
    for piece in ("2 workers on 3 hosts", "host SIGSTOP noticed", ", 1 hosts\n", "after SIGCONT"):
        assert piece in text
