import io

import pytest
from PIL import Image

from inferpool.models.errors import InputError
from inferpool.models.vision.containers import MAX_EXIF_BYTES
from inferpool.models.vision.images import decode_image
from tests.fuzz import bombs
from tests.models.items import encoded, photo

CHELSEA = photo("chelsea").resize((90, 60))


def test_progressive_and_layered_jpegs_are_not_taken_for_bombs():
    assert decode_image(encoded(CHELSEA, progressive=True, quality=100)).size == (90, 60)
    decode_image(bombs.many_scans(64, 64, 90))
    with pytest.raises(InputError, match="made of too many scans: more than 100"):
        decode_image(bombs.many_scans(64, 64, 101))


def test_sequential_jpeg_is_held_to_the_scans_of_its_components():
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00"
    data = bombs.jpeg()
    first = data.index(b"\xff\xda")
    with pytest.raises(InputError, match="too many scans"):
        decode_image(data[:first] + scan * 200 + b"\xff\xd9")


def test_bytes_after_a_picture_do_not_count():
    data = bombs.jpeg() + b"\xff\xda\x00\x02" * 50_000
    assert decode_image(data).size == (64, 64)


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_exif_beyond_the_standard_is_refused(form):
    def with_exif(num_bytes: int) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, form, exif=bombs.exif_of_overlaps(num_bytes))
        return file.getvalue()

    assert decode_image(with_exif(60_000)).size == (8, 8)
    with pytest.raises(InputError, match=f"EXIF metadata; at most {MAX_EXIF_BYTES:,}"):
        decode_image(with_exif(MAX_EXIF_BYTES + 100))


def test_webp_is_measured_before_room_is_made_for_it():
    with pytest.raises(InputError, match="100 x 100 = 10,000 pixels; at most 9,999"):
        decode_image(encoded(photo("coffee").resize((100, 100)), "WEBP"), max_pixels=9_999)
    for options in ({"lossless": True}, {"exact": True, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}):
        data = encoded(CHELSEA, "WEBP", **options)
        assert decode_image(data, max_pixels=5_400).size == (90, 60)
        with pytest.raises(InputError, match="90 x 60"):
            decode_image(data, max_pixels=5_399)


def test_tiles_of_the_usual_size_are_taken_for_small_pictures():
    data = bombs.wide_tile(512)
    with pytest.raises(InputError, match="decoder error"):  # its one tile is cut off
        decode_image(data)
    with pytest.raises(InputError, match="16 x 16 pixels is in tiles of 2000 x 2000"):
        decode_image(bombs.wide_tile(2000))
