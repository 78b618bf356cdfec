"""Readers: what they make of inputs, and that no end of one of them loses an input."""

import io
import multiprocessing
import os
from multiprocessing.context import ForkServerProcess

import numpy as np
import pytest
import torch
from PIL import Image

from inferpool.models.vision.images import decode_image
from inferpool.models.vision.photos import sample_jpegs
from inferpool.service.batch.reading import end_readers, read_ahead
from tests.service.batch.listed import Listed


def read(source, num_readers=0, max_pixels=None, **options):
    """Return what readers give, in one list."""
    chunks = read_ahead(
        source,
        range(len(source)),
        num_readers=num_readers,
        chunk=4,
        room=8,
        max_pixels=max_pixels,
        **options,
    )
    return [given for chunk in chunks for given in chunk]


def npy(array):
    """Return a file of numpy."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_pictures_become_the_pixels_that_workers_would_decode():
    jpeg = sample_jpegs()[0]
    for num_readers in (0, 1):
        (given,) = read(Listed("image", [jpeg]), num_readers, max_pixels=10**8)
        picture = np.asarray(decode_image(jpeg))
        assert (given.header.dtype, given.header.shape) == ("uint8", picture.shape)
        assert bytes(given.data) == picture.tobytes()
        assert given.payload.is_shared() == bool(num_readers)
    (given,) = read(Listed("image", [jpeg]))
    assert (bytes(given.data), given.header) == (jpeg, None)


def test_a_picture_that_is_broken_or_too_large_is_refused():
    png = io.BytesIO()
    Image.new("RGB", (100, 100)).save(png, "PNG")
    contents = [png.getvalue(), png.getvalue()[:50], None, sample_jpegs()[0][:3000]]
    small, broken, unread, cut = read(Listed("image", contents), max_pixels=9_999)
    assert "10,000 pixels; at most 9,999" in small.input.error
    assert broken.input.code == small.input.code == "invalid_input"
    assert (unread.input.error, unread.input.code) == ("no", "unreadable")
    assert cut.input.error
    assert not any(len(each.data) for each in (small, broken, unread, cut))


def test_pictures_that_have_no_room_in_shared_memory_are_left_to_the_workers():
    room = {"max_chunk_bytes": 100_000}
    png = io.BytesIO()
    Image.new("RGB", (150, 150)).save(png, "PNG")
    large = os.urandom(200_000)
    pixels, left = read(Listed("image", [png.getvalue()] * 2), max_pixels=10**8, **room)
    assert (pixels.header is None, left.header) == (False, None)
    assert bytes(left.data) == png.getvalue()
    small, alone = read(Listed("image", [b"x" * 90_000, large]), **room)
    assert (bytes(small.data), small.payload is None) == (b"x" * 90_000, False)
    assert (bytes(alone.data), alone.payload) == (large, None)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f8").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype="i4").reshape(2, 3)),
        np.array(3, "u2"),
        np.zeros((0, 3), "f2"),
        np.array([True, False]),
    ],
)
def test_files_of_numpy_become_tensors(array):
    (given,) = read(Listed("npy", [npy(array)]))
    dtype = getattr(torch, given.header.dtype)
    tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="))).to(dtype)
    assert given.header.shape == array.shape
    assert bytes(given.data) == tensor.contiguous().numpy().tobytes()


def test_what_no_tensor_can_hold_is_refused():
    zipped = io.BytesIO()
    np.savez(zipped, a=1)
    huge = npy(np.zeros(1, "f8")).replace(b"(1,)", b"(10000000000000,)")
    contents = [npy(np.array([1j])), npy(np.array(["a"])), zipped.getvalue(), b"no", huge]
    for given in read(Listed("npy", [*contents, npy(np.array([{}], object))])):
        assert given.input.error
        assert given.input.code == "invalid_input"


def test_an_input_that_ends_its_reader_is_left_to_the_workers_and_none_is_lost():
    jpeg = sample_jpegs()[0]
    source = Listed("image", [jpeg] * 60, deadly=5)
    found = read(source, num_readers=1, max_pixels=10**8)
    assert [each.input.index for each in found] == list(range(60))
    assert (bytes(found[5].data), found[5].header) == (jpeg, None)
    assert found[59].header is not None, "other readers are started"


def test_readers_that_are_killed_lose_nothing():
    found = []
    source = Listed("bytes", [bytes([number]) * 5000 for number in range(40)])
    for chunk in read_ahead(source, range(3, 40), num_readers=1, chunk=2, room=8, max_pixels=None):
        found += [(each.input.index, bytes(each.data)[0]) for each in chunk]
        if len(found) == 10:
            end_readers()
    assert found == [(number, number) for number in range(3, 40)]
    assert not any(
        isinstance(each, ForkServerProcess) for each in multiprocessing.active_children()
    )
