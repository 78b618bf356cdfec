"""The trace of a pipeline shows what overlaps."""

import asyncio
import itertools
import json

import pytest

from inferpool.service.api.codecs.body import Payload
from inferpool.workers.host.local import start_forkserver
from tests.bench.trace import Span, busy, events, overlap, picture, traced
from tests.workers.contract import config_of


@pytest.fixture(scope="module")
def spans() -> list[Span]:
    """Batches of a model that prepares each for 40 ms, and computes it for 60 ms."""
    start_forkserver()
    config = config_of(max_batch_size=1, options={"prepare_s": 0.04, "forward_s": 0.06})
    payloads = [Payload("json", (json.dumps({"n": 1}).encode(),))]
    for _ in range(5):  # a pause of the machine leaves a gap between batches
        spans = asyncio.run(
            asyncio.wait_for(traced(config, payloads, workers=1, at_once=4, secs=0.8), 30)
        )
        if len(spans) >= 5 and overlap(spans[2:]) > 0.5 and is_without_gaps(spans[2:]):
            break
    return spans


def is_without_gaps(spans: list[Span]) -> bool:
    """Each batch is prepared before the one before it is computed."""
    pairs = itertools.pairwise(spans)
    return all(following.prepare[0] < one.compute[1] for one, following in pairs)


def test_next_batch_is_prepared_while_one_is_computed(spans: list[Span]):
    assert len(spans) >= 5
    warm = spans[2:]  # a worker learns by its first batches that overlapping pays
    assert is_without_gaps(warm)
    assert overlap(warm) > 0.5


def test_stages_of_a_batch_follow_one_another(spans: list[Span]):
    for span in spans:
        moments = [moment for _, begin, end in span.stages() for moment in (begin, end)]
        assert moments == sorted(moments)
        assert span.prepare[1] - span.prepare[0] >= 0.04
        assert span.compute[1] - span.compute[0] >= 0.06


def test_overlap_is_the_share_of_preparing_that_other_batches_hide():
    def span(prepare: float, compute: float) -> Span:
        return Span(
            worker=0,
            num_items=1,
            sent=0.0,
            prepare=(prepare, prepare + 1),
            compute=(compute, compute + 2),
            answered=compute + 2,
        )

    spans = [span(0, 1), span(2.5, 3.5)]
    assert overlap(spans) == 0.25
    assert busy(spans) == 4 / 5.5


def test_trace_and_picture_show_every_stage(spans: list[Span]):
    written = json.loads(json.dumps(events(spans)))
    assert {event["cat"] for event in written if "cat" in event} == {
        "queued",
        "prepare",
        "compute",
        "answer",
    }
    lanes = [json.loads(json.dumps(lane)) for lane in picture(spans).data]
    assert [len(lane["x"]) for lane in lanes] == [len(spans)] * 4
