import pytest

from inferpool.models.spec import TensorHeader
from inferpool.service.queue.quarantine import MAX_CRASHES, InputContent, Quarantine

HEADERS = (TensorHeader("x", "uint8", (4,), 0),)
TENSORS = InputContent("tensors", HEADERS, b"{}", b"abcd")


def plain(payload: bytes) -> InputContent:
    return InputContent("bytes", (), b"", payload)


def make(duration_s: float = 10.0, max_inputs: int = 8) -> Quarantine:
    return Quarantine(name="m", duration_s=duration_s, max_inputs=max_inputs)


def put_into_quarantine(quarantine: Quarantine, input: InputContent, now: float = 0.0) -> None:
    num_crashes, _ = quarantine.record_death_alone(input, MAX_CRASHES - 1, now)
    assert num_crashes >= MAX_CRASHES
    quarantine.record_success()


def test_input_stays_for_its_time_and_not_longer():
    quarantine = make()
    put_into_quarantine(quarantine, plain(b"poison"), now=100)
    assert quarantine.left_s(plain(b"poison"), 103) == 7
    assert quarantine.num_inputs(103) == 1
    assert quarantine.left_s(plain(b"poison"), 110) == 0
    assert quarantine.num_inputs(110) == 0
    assert not quarantine.lengths
    assert not quarantine.is_suspect(plain(b"poison"), 110)
    assert not quarantine.suspect_lengths
    none = make(duration_s=0)
    put_into_quarantine(none, plain(b"poison"))
    none.record_death(plain(b"poison"), 0)
    assert not none.lengths
    assert not none.suspect_lengths


@pytest.mark.parametrize(
    "other",
    [
        TENSORS._replace(payload=b"abce"),
        TENSORS._replace(payload=b"abcde"),
        TENSORS._replace(kind="bytes"),
        TENSORS._replace(parameters=b"[]"),
        TENSORS._replace(headers=(TensorHeader("x", "uint8", (2, 2), 0),)),
    ],
)
def test_every_part_of_an_input_counts(other: InputContent):
    quarantine = make()
    put_into_quarantine(quarantine, TENSORS)
    for same in (TENSORS, TENSORS._replace(payload=memoryview(b"abcd"))):
        assert quarantine.left_s(same, 0) == 10
        assert quarantine.is_suspect(same, 0)
    assert quarantine.left_s(other, 0) == 0
    assert not quarantine.is_suspect(other, 0)


def test_payloads_that_differ_only_between_the_samples_are_told_apart():
    quarantine = make()
    poison = bytes(10_000)
    put_into_quarantine(quarantine, plain(poison))
    innocent = bytearray(poison)
    innocent[1000] = 1
    assert quarantine.left_s(plain(bytes(innocent)), 0) == 0
    assert not quarantine.is_suspect(plain(bytes(innocent)), 0)
    assert quarantine.left_s(plain(poison), 0) == 10


def test_long_payload_that_looks_like_a_poison_is_at_most_computed_alone():
    quarantine = make()
    poison = bytes(10_000_000)
    lookalike = bytearray(poison)
    lookalike[5000] = 1
    put_into_quarantine(quarantine, plain(poison))
    assert quarantine.is_suspect(plain(bytes(lookalike)), 0)
    assert quarantine.left_s(plain(bytes(lookalike)), 0) == 0
    assert quarantine.record_death_alone(plain(bytes(lookalike)), 1, 0)[0] == 2


def test_the_oldest_makes_room_and_a_repeated_one_stays_longer():
    quarantine = make(max_inputs=2)
    for now, payload in enumerate([b"a", b"b", b"a", b"c"]):
        put_into_quarantine(quarantine, plain(payload), now)
    assert quarantine.left_s(plain(b"b"), 3) == 0
    assert quarantine.left_s(plain(b"a"), 3) == 9
    assert quarantine.left_s(plain(b"c"), 3) == 10
    assert quarantine.num_inputs(12) == 1


def test_deaths_in_a_batch_make_suspects_and_only_deaths_alone_the_verdict():
    quarantine = make()
    input = plain(b"in bad company")
    for now in range(9):
        quarantine.record_death(input, now)
        assert quarantine.is_suspect(input, now)
    assert quarantine.record_death_alone(input, 1, 9)[0] == 2
    assert quarantine.num_inputs(9) == 0
    quarantine.record_death(input, 9)
    assert quarantine.record_death_alone(input, 1, 10)[0] == 3
    assert quarantine.num_inputs(10) == 1


def test_deaths_alone_are_forgotten_in_time():
    quarantine = make()
    for now in (0, 10):
        assert quarantine.record_death_alone(plain(b"x"), 1, now)[0] == 2
    assert quarantine.num_inputs(10) == 0
