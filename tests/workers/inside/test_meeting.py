"""Ranks on several hosts meet at a store and connect to each other; here they are threads."""

import select
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.config import HostPart
from inferpool.workers.inside import meeting
from inferpool.workers.inside.meeting import meet
from inferpool.workers.wiring import DistantEnds, DistantWiring, RankEnds

HERE = "127.0.0.1"


def part_of(door: socket.socket, rank: int, token: str = "secret") -> HostPart:
    return HostPart(
        first=rank,
        placement=Placement(devices=("cpu",), split="pipeline"),
        token=token,
        address=HERE,
        port=door.getsockname()[1],
        door=door.fileno() if rank == 0 else -1,
        own_address=HERE,
        interface="lo",
    )


def ends_of(parts: Sequence[HostPart], num_ranks: int, timeout_s: float) -> list[DistantEnds]:
    wirings = [DistantWiring(part, num_ranks, timeout_s) for part in parts]
    return [wiring.ends_of(part.first) for wiring, part in zip(wirings, parts, strict=True)]


def met(ends: Sequence[DistantEnds]) -> list[RankEnds]:
    with ThreadPoolExecutor(len(ends)) as pool:
        # With the stores: the other ranks need the lead's until all have met.
        found = [*pool.map(meet, ends)]
    return [each for each, _ in found]


def test_each_rank_is_connected_to_the_lead_and_to_those_beside_it():
    with socket.create_server((HERE, 0)) as door:
        ranks = met(ends_of([part_of(door, rank) for rank in range(4)], 4, 60.0))
    for number, others in enumerate(({1, 2, 3}, {0, 2}, {0, 1, 3}, {0, 2})):
        assert set(ranks[number].readers) == set(ranks[number].writers) == others
        for other in others:
            ranks[number].writers[other].send_bytes(b"%d to %d" % (number, other))
    for rank in ranks:
        for other, reader in rank.readers.items():
            assert reader.poll(30)
            assert reader.recv_bytes() == b"%d to %d" % (other, rank.rank)
    ranks[0].writers[3].close()
    with pytest.raises(EOFError):
        ranks[3].readers[0].recv_bytes()


def test_rank_that_does_not_come_is_not_awaited_for_ever():
    with (
        socket.create_server((HERE, 0)) as door,
        pytest.raises(TimeoutError, match=r"ranks \[1\] did not connect|timed out"),
    ):
        met(ends_of([part_of(door, 0)], 2, 1.0))


def test_rank_of_another_group_finds_nobody_at_the_same_place():
    with socket.create_server((HERE, 0)) as door:
        parts = [part_of(door, 0), part_of(door, 1, "another secret")]
        with pytest.raises((OSError, RuntimeError)):
            met(ends_of(parts, 2, 2.0))


def test_stranger_who_connects_is_sent_away(caplog: pytest.LogCaptureFixture):
    with socket.create_server((HERE, 0)) as door, ThreadPoolExecutor(2) as pool:
        lead, follower = ends_of([part_of(door, rank) for rank in range(2)], 2, 60.0)
        leading = pool.submit(meet, lead)
        # The lead's second port is known only in the store, as to one who knows the token.
        store = meeting._store_of(follower)
        host, _, port = store.get("rank 0").decode().partition(" ")
        with socket.create_connection((host, int(port)), 30) as stranger:
            stranger.sendall(bytes(36))
            assert len(stranger.recv(64)) == 64
            stranger.sendall(bytes(32))
            assert stranger.recv(1) == b""
        met_by_follower, _ = meet(follower)
        met_by_lead, _ = leading.result(60)
    met_by_lead.writers[1].send_bytes(b"hello")
    assert met_by_follower.readers[0].recv_bytes() == b"hello"
    assert "does not know the token" in caplog.text


def test_stranger_who_says_little_by_little_is_not_heard_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(meeting, "_GREET_S", 0.2)
    with socket.create_server((HERE, 0)) as door, ThreadPoolExecutor(2) as pool:
        lead, follower = ends_of([part_of(door, rank) for rank in range(2)], 2, 60.0)
        leading = pool.submit(meet, lead)
        host, _, port = meeting._store_of(follower).get("rank 0").decode().partition(" ")
        with socket.create_connection((host, int(port)), 30) as stranger:
            num_bytes = 0
            while not select.select([stranger], [], [], 0.05)[0]:
                stranger.sendall(b"x")
                num_bytes += 1
        assert num_bytes < 36
        meet(follower)
        leading.result(60)
    assert "a stranger at 127.0.0.1 was sent away" in caplog.text
