import msgspec
import pytest

import inferpool.workers.remote.wire
from inferpool.workers.host.engine import Ending, WorkerId
from inferpool.workers.remote.wire import (
    LENGTHS,
    BatchOutcomes,
    Beat,
    FrameTooLargeError,
    Hello,
    HostVitals,
    Message,
    Pulse,
    RunBatch,
    StartWorker,
    ToAgent,
    ToFrontEnd,
    Welcome,
    WorkerEnded,
    WorkerStarted,
    found,
    frame_start,
    placed,
)
from inferpool.workers.shared.messages import BatchDone, ItemError, Stored, TensorBlob
from tests.fakes import ref_to
from tests.workers.contract import config_of
from tests.workers.remote.cluster import facts_of, ready_of


def blob(data: bytes) -> TensorBlob:
    return TensorBlob("y", "uint8", (len(data),), data)


def done_of(*outcomes: object) -> BatchDone:
    return BatchDone(3, list(outcomes), 0.1, 0.2, 1, 50.0, 60.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ToAgent, Welcome(b"proof", 5, 6, True)),
        (ToAgent, StartWorker(1, WorkerId(model="m", slot=2), config_of(options={"a": [1, "b"]}))),
        (ToAgent, RunBatch(1, 2, 3.5, [ref_to(b"x"), ref_to(b"yz")])),
        (ToFrontEnd, Hello(1, "agent", b"n", b"p", 3, facts_of("h"))),
        (ToFrontEnd, Pulse(1.5, HostVitals(wall_time=3.0), [])),
        (ToFrontEnd, WorkerStarted(1, 3, ready_of())),
        (ToFrontEnd, WorkerEnded(1, Ending(cause="hang", reason="hung", was_at_work=True))),
        (ToFrontEnd, BatchOutcomes(1, done_of(b"{}", [blob(b"x")], ItemError("exhausted", "no")))),
    ],
)
def test_message_comes_back_as_it_was(kind: object, message: Message):
    frame = frame_start(message, 7)
    assert LENGTHS.unpack_from(frame) == (len(frame) - LENGTHS.size, 7)
    assert msgspec.msgpack.decode(frame[LENGTHS.size :], type=kind) == message


def test_message_that_the_other_side_would_not_take_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inferpool.workers.remote.wire, "MAX_BODY_BYTES", 100)
    frame_start(Beat(1.0), 100)
    with pytest.raises(FrameTooLargeError, match="a body of 101 bytes; 100 are allowed"):
        frame_start(Beat(1.0), 101)
    size = len(frame_start(Beat(1.0), 0)) - LENGTHS.size
    monkeypatch.setattr(inferpool.workers.remote.wire, "MAX_HEAD_BYTES", size)
    frame_start(Beat(1.0), 0)
    monkeypatch.setattr(inferpool.workers.remote.wire, "MAX_HEAD_BYTES", size - 1)
    with pytest.raises(FrameTooLargeError):
        frame_start(Beat(1.0), 0)


def test_large_outputs_travel_in_the_body_and_times_by_the_other_clock():
    large = [bytes([n]) * (4096 + n) for n in range(2)]
    done = done_of([blob(large[0]), blob(b"small")], b"{}", [blob(large[1])], [blob(b"")])
    told, body = placed(done, 9, ahead_s=10.0)
    assert [bytes(piece) for piece in body] == large
    assert len(frame_start(BatchOutcomes(1, told), 0)) < 500
    assert (told.id, told.num_stored, told.prepare_began, told.compute_began) == (9, 0, 40.0, 50.0)
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=BatchDone)
    back = found(there, memoryview(b"".join(large)))
    tensors = [outcome for outcome in back.outcomes if isinstance(outcome, list)]
    assert [[bytes(each.buffer) for each in outcome] for outcome in tensors] == [
        [large[0], b"small"],
        [large[1]],
        [b""],
    ]
    assert back.outcomes[1] == b"{}"
    unknown = msgspec.structs.replace(done, prepare_began=0.0, compute_began=0.0)
    assert placed(unknown, 9, ahead_s=10.0)[0].compute_began == 0.0


@pytest.mark.parametrize("place", [(0, 11), (10, 1), (-1, 2), (5, -1), (2**70, 1)])
@pytest.mark.parametrize("body", [b"", b"ten bytes."])
def test_place_outside_of_the_body_makes_no_sense(place: tuple[int, int], body: bytes):
    done = done_of([TensorBlob("y", "uint8", (1,), Stored(*place))])
    with pytest.raises(ValueError, match="an output of"):
        found(done, memoryview(body))
