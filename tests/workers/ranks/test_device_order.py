"""Nothing that the ranks of a pipeline tell their devices waits in a circle. A model, no device.

See `recorded_ranks`: real code makes the orders that are checked here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import inferpool.workers.ranks.group
from tests.workers.ranks.recorded_ranks import (
    Channels,
    order_of_pipeline,
    without_own_streams,
)

SIZES = [
    (num_ranks, num_batches, num_pieces)
    for num_ranks in (2, 3, 4)
    for num_batches in (1, 2, 3, 4)
    for num_pieces in (1, 2, 3, 4)
]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # what a group sets is taken back
    return monkeypatch


@pytest.mark.parametrize("channels", get_args(Channels))
@pytest.mark.parametrize("all_in_flight", [True, False])
def test_no_device_waits_in_a_circle(
    patch: pytest.MonkeyPatch, tmp_path: Path, channels: Channels, all_in_flight: bool
):
    for num_ranks, num_batches, num_pieces in SIZES:
        order = order_of_pipeline(
            patch,
            tmp_path,
            num_ranks=num_ranks,
            num_batches=num_batches,
            num_pieces=num_pieces,
            channels=channels,
            all_in_flight=all_in_flight,
        )
        assert order.names.count("stage 1") == num_batches * num_pieces
        assert order.circle() == []


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_transfers_on_the_stream_that_computes_wait_in_a_circle(
    patch: pytest.MonkeyPatch, tmp_path: Path, num_ranks: int
):
    without_own_streams(patch)
    for num_batches, num_pieces in [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (2, 2)]:
        order = order_of_pipeline(
            patch,
            tmp_path,
            num_ranks=num_ranks,
            num_batches=num_batches,
            num_pieces=num_pieces,
        )
        circle = order.circle()
        # Each rank holds one piece before the lead, which takes none until it has sent all.
        assert bool(circle) == (num_batches * num_pieces >= num_ranks)
        assert not circle or "wait for what is sent" in circle


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_transfers_of_all_stages_in_one_group_wait_in_a_circle(
    patch: pytest.MonkeyPatch, tmp_path: Path, num_ranks: int
):
    patch.setattr(inferpool.workers.ranks.group, "way_from", lambda source, split, size: 0)
    order = order_of_pipeline(patch, tmp_path, num_ranks=num_ranks, num_batches=1, num_pieces=4)
    circle = order.circle()
    assert any("send" in name for name in circle)
    assert any("receive" in name for name in circle)
