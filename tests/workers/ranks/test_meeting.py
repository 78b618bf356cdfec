"""Ranks on several hosts meet at a store and connect to each other; here they are threads."""

import select
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from inferpool.models.spec import Placement
from inferpool.workers.ranks import meeting
from inferpool.workers.ranks.meeting import meet
from inferpool.workers.ranks.wiring import DistantEnds, DistantWiring, RankEnds
from inferpool.workers.shared.config import HostPart

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
            assert reader.poll(60)
            assert reader.recv_bytes() == b"%d to %d" % (other, rank.rank)
    ranks[0].writers[3].close()
    with pytest.raises(EOFError):
        ranks[3].readers[0].recv_bytes()


def test_rank_that_does_not_come_is_not_awaited_for_ever():
    with (
        socket.create_server((HERE, 0)) as door,
        pytest.raises((TimeoutError, RuntimeError), match=r"ranks \[1\] did not connect|timed out"),
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
        with dialled(follower, 0) as stranger:
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
    caplog: pytest.LogCaptureFixture,
):
    with socket.create_server((HERE, 0)) as door, ThreadPoolExecutor(2) as pool:
        lead, follower = ends_of([part_of(door, rank) for rank in range(2)], 2, 60.0)
        leading = pool.submit(meet, replace(lead, greet_s=1.0))
        with dialled(follower, 0) as stranger:
            for _ in range(35):  # one byte less than a greeting has
                if select.select([stranger], [], [], 0.5)[0]:
                    break
                stranger.sendall(b"x")
            else:
                raise AssertionError("it was heard for 17 s")
        meet(follower)
        leading.result(60)
    assert "a stranger at 127.0.0.1 was sent away" in caplog.text


def dialled(ends: DistantEnds, rank: int) -> socket.socket:
    """Connect to a rank like another one, which finds its address in the store."""
    host, _, port = meeting._store_of(ends).get(f"rank {rank}").decode().partition(" ")
    return socket.create_connection((host, int(port)), 60)


@pytest.mark.parametrize("claimed", [0, 2])
def test_rank_that_nobody_awaits_is_sent_away_though_it_knows_the_token(
    caplog: pytest.LogCaptureFixture, claimed: int
):
    with socket.create_server((HERE, 0)) as door, ThreadPoolExecutor(2) as pool:
        lead, follower = ends_of([part_of(door, rank) for rank in range(2)], 2, 60.0)
        leading = pool.submit(meet, lead)
        with dialled(follower, 0) as other:
            nonce = bytes(32)
            other.sendall(nonce + claimed.to_bytes(4))
            answer = other.recv(64, socket.MSG_WAITALL)
            other.sendall(meeting._proof(follower, b"dials", claimed, nonce + answer[:32]))
            assert other.recv(1) == b""
        meet(follower)
        leading.result(60)
    assert "a stranger at 127.0.0.1 was sent away" in caplog.text


def test_rank_trusts_nobody_at_the_address_of_another_who_does_not_know_the_token():
    with (
        socket.create_server((HERE, 0)) as door,
        socket.create_server((HERE, 0)) as impostor,
        ThreadPoolExecutor(1) as pool,
    ):
        impostor.settimeout(60)
        (follower,) = ends_of([part_of(door, 1)], 2, 60.0)
        deadline = time.monotonic() + 60
        dialling = pool.submit(meeting._dial, impostor.getsockname(), follower, 0, deadline)
        with impostor.accept()[0] as sock:
            assert len(sock.recv(36, socket.MSG_WAITALL)) == 36
            sock.sendall(bytes(64))
            with pytest.raises(ConnectionError, match="is not rank 0"):
                dialling.result(60)
            assert sock.recv(1) == b""  # it gives no proof of its own
