from models.spec import TensorHeader
from service.quarantine import Quarantine

HEADERS = (TensorHeader("x", "uint8", (4,), 0),)


def left_s(quarantine: Quarantine, *chunks: bytes, now: float = 0.0, **changes: object) -> float:
    asked = {"kind": "bytes", "headers": (), "parameters": b"", **changes}
    return quarantine.left_s(**asked, chunks=chunks, now=now)  # type: ignore[arg-type]


def test_input_stays_for_its_time_and_not_longer():
    quarantine = Quarantine(duration_s=10)
    quarantine.add("bytes", (), b"", b"poison", now=100)
    assert left_s(quarantine, b"poison", now=103) == 7
    assert quarantine.num_inputs(103) == 1
    assert left_s(quarantine, b"poison", now=110) == 0
    assert quarantine.num_inputs(110) == 0
    assert not quarantine.lengths


def test_all_of_an_input_counts():
    quarantine = Quarantine(duration_s=10)
    quarantine.add("tensors", HEADERS, b"{}", b"abcd", now=0)
    same = {"kind": "tensors", "headers": HEADERS, "parameters": b"{}"}
    assert left_s(quarantine, b"abcd", **same) == 10
    assert left_s(quarantine, b"a", b"", b"bcd", **same) == 10
    assert left_s(quarantine, b"abce", **same) == 0
    assert left_s(quarantine, b"abcde", **same) == 0
    assert left_s(quarantine, b"abcd", **{**same, "kind": "bytes"}) == 0
    assert left_s(quarantine, b"abcd", **{**same, "parameters": b"[]"}) == 0
    other = (TensorHeader("x", "uint8", (2, 2), 0),)
    assert left_s(quarantine, b"abcd", **{**same, "headers": other}) == 0


def test_payloads_that_differ_only_between_the_samples_are_told_apart():
    quarantine = Quarantine(duration_s=10)
    poison = bytes(10_000)
    quarantine.add("bytes", (), b"", poison, now=0)
    innocent = bytearray(poison)
    innocent[1000] = 1
    assert left_s(quarantine, bytes(innocent)) == 0
    assert left_s(quarantine, poison) == 10


def test_the_oldest_makes_room_and_whoever_comes_again_stays_longer():
    quarantine = Quarantine(duration_s=10, max_inputs=2)
    for now, payload in enumerate([b"a", b"b", b"a", b"c"]):
        quarantine.add("bytes", (), b"", payload, now=now)
    assert left_s(quarantine, b"b", now=3) == 0
    assert left_s(quarantine, b"a", now=3) == 9
    assert left_s(quarantine, b"c", now=3) == 10
    assert quarantine.num_inputs(12) == 1


def test_quarantine_of_no_length_keeps_nothing():
    quarantine = Quarantine(duration_s=0)
    assert quarantine.add("bytes", (), b"", b"poison", now=0)
    assert not quarantine.lengths
