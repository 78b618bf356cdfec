import json
from collections import Counter
from dataclasses import replace

import pytest

from inferpool.service.tools.chaos.resources import Holdings, LedgerReading
from tests.bench.__main__ import main
from tests.bench.soak import failures_of
from tests.bench.soak_load import Counts, kinds
from tests.bench.trend import Trend
from tests.ports import free_port

pytestmark = [pytest.mark.measures, pytest.mark.slow]

_HOLDINGS = Holdings(
    descriptors=30,
    threads=5,
    processes=5,
    pss_bytes=1,
    others_pss_bytes=1,
    shared_bytes=1,
    shared_files=3,
    dev_shm_files=0,
)
_LEDGER = LedgerReading(
    accepted=3,
    succeeded=1,
    failed=0,
    expired=1,
    cancelled=1,
    rejected=0,
    arena_used_bytes=0,
    restarts=0,
    retried=0,
)
_GROWTH = Trend(slope=3.0, low=2.0, high=4.0, mean=60.0)


def test_kinds_of_requests_are_mixed_by_their_percentages():
    found = kinds(1, bad=3, hang_up=4, late=5)
    assert Counter(found) == {"bad": 3, "hang_up": 4, "late": 5, "right": 88}
    assert found == kinds(1, bad=3, hang_up=4, late=5) != sorted(found)


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({}, None),
        ({"counts": Counts(unexpected=Counter({"a wrong answer": 2}))}, "2 times a wrong answer"),
        ({"trends": {"front end, own": _GROWTH}}, "front end, own grows by 3.00 MiB/h"),
        ({"trends": {"front end, all": _GROWTH, "process 7, own": None}}, None),
        ({"after": replace(_HOLDINGS, threads=6)}, "threads: 5 before, 6 after"),
        ({"ledger": replace(_LEDGER, expired=0)}, "1 instances in flight"),
        ({"ledger": replace(_LEDGER, arena_used_bytes=64)}, "64 bytes of the arena"),
    ],
)
def test_what_is_not_as_it_should_be_is_named(change, failure):
    whole = {
        "counts": Counts(),
        "trends": {},
        "before": _HOLDINGS,
        "after": _HOLDINGS,
        "ledger": _LEDGER,
        "max_slope": 1.0,
    }
    found = failures_of(**{**whole, **change})
    assert len(found) == (failure is not None)
    assert failure is None or failure in found[0]


@pytest.mark.alone
def test_short_soak_has_every_kind_of_request_answered_as_it_should_be(tmp_path):
    file = tmp_path / "soak.json"
    arguments = ["--requests", "400", "--port", str(free_port()), "--out", str(file)]
    assert main(["soak", *arguments, "--serve-args", "--replicas 1"]) == 0
    saved = json.loads(file.read_text())
    counts = saved["counts"]
    assert counts["unexpected"] == {}
    assert (counts["bad"], counts["hung_up"], sum(counts["late"].values())) == (12, 12, 12)
    assert counts["right"] == counts["sent"] - 36
    assert saved["before"]["descriptors"] >= saved["after"]["descriptors"]
    assert file.with_suffix(".png").exists()
