"""The header `Prefer` is read as RFC 7240 says."""

import pytest

from inferpool.service.api.preferences import Preferences, is_async, read_preferences


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("respond-async", Preferences(is_async=True)),
        ("Respond-Async; foo=bar, WAIT = 1", Preferences(is_async=True, wait_s=1)),
        ('wait="2", wait=9', Preferences(wait_s=2)),
        ("respond-async, wait=0", Preferences(is_async=True, wait_s=0)),
        *(
            (text, Preferences())
            for text in ("", ",;=", "wait", "wait=1.5", "wait=-1", "wait=²", "wait=1234567890")
        ),
    ],
)
def test_preferences_are_read(header: str, wanted: Preferences) -> None:
    assert read_preferences(header) == wanted


def test_what_was_followed_is_told() -> None:
    wanted = Preferences(is_async=True, wait_s=100)
    assert wanted.applied == "respond-async, wait=100"
    assert wanted.at_most(60).applied == "respond-async, wait=60"
    assert Preferences(is_async=True).at_most(60).applied == "respond-async"


def test_repeated_headers_are_one() -> None:
    assert is_async([(b"prefer", b"wait=3"), (b"prefer", b"respond-async"), (b"x", b"y")])
    assert not is_async([(b"prefer", b"wait=3"), (b"x-prefer", b"respond-async")])
