import httptools
import pytest

from inferpool.service.api.wire.protocol import below
from tests.service.api.server import POST, serve


@pytest.mark.parametrize(
    ("url", "rest"),
    [
        (b"/m/predict?x=/m", b"/predict?x=/m"),
        (b"/m", b"/"),
        (b"/m/", b"/"),
        (b"/m?x", b"/?x"),
        (b"/m/m/predict", b"/m/predict"),
        (b"/m//predict", b"//predict"),
        (b"/predict", b"/predict"),
        (b"/models", b"/models"),
        (b"/", b"/"),
        (b"http://h/m/predict?x", b"/predict?x"),
        (b"http://h", b"/"),
    ],
)
def test_a_path_before_ours_is_taken_off_once(url: bytes, rest: bytes):
    assert below(b"/m", url) == rest


def test_text_that_is_no_url_is_refused():
    with pytest.raises(httptools.HttpParserError):
        below(b"/m", b"h h")


async def test_calls_come_with_the_path_or_without_again_and_again():
    async with serve() as server, server.connect() as client:
        server.protocol.predict.root_path = b"/m"
        for path in (b"/m/predict", b"/predict", b"/m/predict/fake/", b"/predict/fake") * 2:
            head = POST.replace(b"/predict", path)
            assert await client.status(head + b"content-length: 1\r\n\r\nx") == 200, path
        assert await client.status(POST.replace(b"/predict", b"/n/predict") + b"\r\n") == 404
