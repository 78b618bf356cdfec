import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferpool.workers.shared.arena import MIN_BLOCK_BYTES, Arena, OpenSlot, Slots, slot_bytes
from inferpool.workers.shared.memory import SharedMemoryError


def read(arena: Arena, offset: int, num_bytes: int) -> bytes:
    return arena.memory.map[offset : offset + num_bytes]


def test_payload_in_pieces_lies_in_one_piece():
    arena = Arena(64 * 1024)
    offset = arena.put([b"abc", b"", memoryview(b"defg")], 7)
    assert offset is not None
    assert read(arena, offset, 7) == b"abcdefg"
    arena.close()


def test_full_arena_refuses_and_takes_again_after_a_free():
    arena = Arena(8 * MIN_BLOCK_BYTES)
    offsets = [arena.put([b"x"], 1) for _ in range(8)]
    assert None not in offsets
    assert arena.put([b"x"], 1) is None
    assert arena.used_bytes == arena.num_bytes
    arena.free(offsets[3])
    assert arena.put([b"x"], 1) == offsets[3]
    arena.close()


def test_small_slots_merge_into_a_large_one_when_that_is_needed():
    arena = Arena(256 * MIN_BLOCK_BYTES)
    offsets = [arena.put([b"x"], 1) for _ in range(256)]
    for offset in offsets:
        arena.free(offset)
    whole = 256 * MIN_BLOCK_BYTES
    assert arena.put([bytes(whole)], whole) == 0
    arena.close()


def test_payload_larger_than_the_arena_is_refused():
    arena = Arena(8 * MIN_BLOCK_BYTES)
    assert arena.put([bytes(100_000)], 100_000) is None
    arena.close()


def test_error_names_the_memory_that_cannot_be_reserved():
    with pytest.raises(SharedMemoryError, match="MiB of shared memory for the arena"):
        Arena(1 << 60)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 300_000), st.integers(0, 10_000)), max_size=120
    )
)
def test_slots_never_overlap_and_all_memory_comes_back(steps):
    arena = Arena(1_000_000)
    held: dict[int, bytes] = {}
    try:
        for number, (is_put, num_bytes, pick) in enumerate(steps):
            if is_put:
                data = number.to_bytes(2, "big") * (num_bytes // 2)
                offset = arena.put([data], len(data))
                if offset is not None:
                    assert offset not in held
                    held[offset] = data
            elif held:
                offset = sorted(held)[pick % len(held)]
                assert read(arena, offset, len(held[offset])) == held.pop(offset)
                arena.free(offset)
        for offset, data in held.items():
            assert read(arena, offset, len(data)) == data
            arena.free(offset)
        assert arena.used_bytes == 0
        half = 512 * 1024
        assert arena.put([bytes(half)], half) is not None
    finally:
        arena.close()


def test_slots_are_counted_for_their_callers_until_they_are_free():
    arena = Arena(64 * 1024)
    slots = [arena.put([bytes(size)], size, caller) for size, caller in ((5, 1), (3000, 1), (9, 2))]
    nobodys = arena.put([b"x"], 1)
    assert arena.used_by == {1: 5 * 1024, 2: 1024}
    assert None not in slots
    assert nobodys is not None
    arena.free(slots[1])
    arena.free(nobodys)
    assert arena.used_by == {1: 1024, 2: 1024}
    arena.close()


def test_an_arena_is_divided_into_parts_that_are_allocated_apart():
    arena = Arena(10 * MIN_BLOCK_BYTES)
    parts = arena.give_away(3)
    assert arena.put([b"x"], 1) is None
    slots = [Slots(arena.memory.map, part.start, len(part)) for part in parts]
    offsets = [each.put([b"x"], 1) for each in slots for _ in range(3)]
    assert sorted(offsets) == [number * MIN_BLOCK_BYTES for number in range(9)]
    assert [each.put([b"x"], 1) for each in slots] == [None] * 3
    arena.close()


def test_an_arena_keeps_some_of_itself_if_told_to_when_it_is_divided():
    arena = Arena(10 * MIN_BLOCK_BYTES)
    parts = arena.give_away(2, 4 * MIN_BLOCK_BYTES)
    assert [len(part) for part in parts] == [3 * MIN_BLOCK_BYTES] * 2
    assert [arena.can_hold(num * MIN_BLOCK_BYTES) for num in (1, 4, 5)] == [True, True, False]
    assert [arena.put([b"x"], 1) for _ in range(5)][-1] is None
    assert arena.read(9 * MIN_BLOCK_BYTES, 1) == b"x"
    arena.close()
    given = Arena(4 * MIN_BLOCK_BYTES)
    given.give_away(2)
    assert not given.can_hold(1)
    given.close()


@given(st.lists(st.integers(0, 20_000), max_size=40), st.data())
def test_a_later_allocator_over_the_same_part_leaves_the_slots_of_the_earlier_one_alone(
    sizes, data
):
    arena = Arena(200_000)
    try:
        part = arena.give_away(2)[1]
        before = Slots(arena.memory.map, part.start, len(part))
        held = {}
        for num_bytes in sizes:
            offset = before.put([bytes(num_bytes)], num_bytes)
            if offset is not None:
                held[offset] = num_bytes
        for offset in data.draw(
            st.lists(st.sampled_from(sorted(held)), unique=True) if held else st.just([])
        ):
            before.free(offset)
            del held[offset]
        after = Slots(arena.memory.map, part.start, len(part))
        for offset, num_bytes in held.items():
            after.reserve(offset, num_bytes)
        assert after.used_bytes == before.used_bytes
        taken = [range(offset, offset + slot_bytes(held[offset])) for offset in held]
        while (offset := after.put([b"x"], 1)) is not None:
            assert part.start <= offset < part.stop
            assert not any(offset in each for each in taken)
        assert after.used_bytes == len(part)
        for offset in held:
            after.free(offset)
        assert after.used_bytes == len(part) - before.used_bytes
    finally:
        arena.close()


def stay() -> None:
    raise AssertionError("there is other room")


def test_an_open_slot_is_freed_unless_it_is_handed_on():
    arena = Arena(1 << 20)
    slots = [arena.open(5000, stay, caller=7) for _ in range(2)]
    assert [arena.open_bytes, arena.used_bytes, arena.used_by[7]] == [16384] * 3
    slots[0].view[:] = b"x" * 5000
    slots[0].is_handed_on = True
    for slot in slots:
        slot.close()
    assert arena.open_bytes == 0
    assert [arena.used_bytes, arena.used_by[7]] == [8192] * 2
    assert read(arena, slots[0].offset, 5000) == b"x" * 5000
    arena.free(slots[0].offset)
    assert [arena.used_bytes, arena.used_by[7]] == [0] * 2
    arena.close()


def test_open_slots_have_a_quarter_of_the_arena_and_a_caller_has_its_share():
    arena = Arena(1 << 20)
    half = 1 << 17
    slots = [arena.open(half, stay, caller=1), arena.open(half, stay, caller=1)]
    assert arena.open(1, stay, caller=1) is None
    for slot in slots:
        slot.is_handed_on = True
        slot.close()
    # It has 2/8. With one more it would have 3/8 of what nobody else has, which is all.
    assert arena.open(half, stay, caller=1, share=0.3) is None
    assert arena.open(half, stay, caller=2, share=0.3) is not None
    assert arena.open(half, stay, caller=1, share=0.5) is not None
    arena.close()


def test_an_arena_that_is_full_opens_no_slot():
    arena = Arena(8 * MIN_BLOCK_BYTES)
    assert None not in [arena.put([b"x"], 1) for _ in range(8)]
    assert arena.open(1, stay) is None
    assert arena.open_bytes == 0
    arena.close()


def test_open_slots_are_given_up_for_a_whole_payload_the_oldest_first():
    arena = Arena(16 * MIN_BLOCK_BYTES)
    slots: list[OpenSlot] = []
    for number in range(4):
        slot = arena.open(1, lambda number=number: slots[number].close())  # type: ignore[misc]
        assert slot is not None
        slots.append(slot)
    assert None not in [arena.put([], 1) for _ in range(12)]
    assert list(arena.open_slots) == slots
    assert arena.put([], 1) is not None
    assert list(arena.open_slots) == slots[1:]
    assert arena.put([], 17 * MIN_BLOCK_BYTES) is None
    arena.close()
