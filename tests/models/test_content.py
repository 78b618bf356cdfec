"""Contents that can be sent, and those that cannot."""

import pytest

from inferpool.models.content import Content, bare_types


@pytest.mark.parametrize(
    "media_type", ["image/png", "text/html; charset=utf-8", "application/vnd.x+json", "a/b"]
)
def test_bytes_with_a_type_can_be_sent(media_type: str) -> None:
    assert not Content(b"1", media_type, {"X-Mood": "fine"}).fault


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (Content("text", "text/plain"), "must be bytes, not str"),  # type: ignore[arg-type]
        (Content(b"", "png"), "one type such as image/png"),
        (Content(b"", "image/*"), "one type such as image/png"),
        (Content(b"", "image/png\r\nx: y"), "one type such as image/png"),
        (Content(b"", "application/json"), "return the value itself"),
        (Content(b"", "a/b", {str(each): "" for each in range(17)}), "17 headers; at most 16"),
        (Content(b"", "a/b", {"x": "y" * 4096}), "4,097 bytes; at most 4,096"),
        (Content(b"", "a/b", {"x": "1\r\n2"}), "printable ASCII"),
        (Content(b"", "a/b", {"x y": "1"}), "no name of a header"),
        (Content(b"", "a/b", ["x"]), "must be a dict"),  # type: ignore[arg-type]
    ],
)
def test_a_content_that_cannot_be_sent_says_why(content: Content, told: str) -> None:
    assert told in content.fault


@pytest.mark.parametrize(
    "name",
    ["Set-Cookie", "Content-Length", "content-security-policy", "Location", "Connection",
     "Access-Control-Allow-Origin", "X-Request-Id", "Transfer-Encoding", "Server-Timing"],
)  # fmt: skip
def test_headers_that_are_not_a_models_to_set_are_refused(name: str) -> None:
    assert (
        f"{name!r} of a Content is not a model's to set" in Content(b"", "a/b", {name: "1"}).fault
    )


def test_declared_types_are_bare_and_a_single_string_is_refused() -> None:
    assert bare_types(["Image/PNG; q=1", "image/png", "a/b"]) == ("image/png", "a/b")
    with pytest.raises(ValueError, match="must be a list"):
        bare_types("image/png")
