"""Inputs that are made up from what a model declares."""

import pytest

from inferpool.models.spec import TensorSpec
from inferpool.service.parts.swap.inputs import InputRecorder, inputs_of
from inferpool.workers.shared.arena import Arena
from tests.fakes import FakeEngine, ref_to
from tests.service.pools import make_pool

MIB = 1 << 20


async def test_live_inputs_are_recorded_whole_in_their_share_and_up_to_a_number(arena: Arena):
    pool = make_pool(FakeEngine(), arena)
    recorder = InputRecorder(pool, most=2, share=0.5)
    for number in range(10):
        recorder.take(ref_to(b"a%d" % number), [b"a", b"%d" % number])
        assert recorder.is_full == (number >= 3)
    assert [each.payload for each in recorder.take_all()] == [b"a1", b"a3"]
    large = bytes(33 * MIB)
    for _ in range(4):
        recorder.take(ref_to(large), [large])
    assert len(recorder.take_all()) == 1, "64 MiB at most"


@pytest.mark.parametrize(
    ("inputs", "num", "num_bytes"),
    [
        ([], 0, 0),
        ([("x", "float32", (-1, 3))], 8, 12),
        ([("x", "float16", (-1, -1)), ("y", "bool", (2,))], 8, 17),
        ([("x", "uint8", (-1, 20 * MIB))], 3, 20 * MIB),
        ([("x", "float64", (-1, 9 * MIB))], 0, 0),
        ([("x", "uint8", (-1, 0))], 8, 0),
        ([("x", "uint8", ())], 0, 0),
    ],
)
async def test_few_large_inputs_are_made_up(arena: Arena, inputs, num, num_bytes):
    pool = make_pool(FakeEngine(), arena)
    pool.inputs = [TensorSpec(name=name, dtype=d, shape=shape) for name, d, shape in inputs]
    made_up = await inputs_of(pool)
    assert [len(each.payload) for each in made_up] == [num_bytes] * num
    assert all(each.is_made_up for each in made_up)
