from pathlib import Path

import pytest

from inferpool.service.settings.loader import load
from inferpool.service.settings.settings import shows_errors


def test_settings_cannot_be_changed(tmp_path):
    settings = load({}, {}, tmp_path).settings
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1


def test_the_arena_holds_two_of_the_largest_bodies(tmp_path):
    loaded = load({}, {"INFERPOOL_MAX_BODY_BYTES": "1000000000"}, tmp_path)
    assert loaded.settings.arena_bytes >= 2_000_000_000
    loaded = load({}, {"INFERPOOL_ARENA_BYTES": "auto"}, tmp_path)
    assert 2**25 <= loaded.settings.arena_bytes <= 2**28


def test_keys_have_shares_only_where_there_are_several(tmp_path):
    def key_share(keys: str, share: str | None = None) -> float:
        env = {"INFERPOOL_PREDICT_KEYS": keys}
        if share is not None:
            env["INFERPOOL_PER_KEY_SHARE"] = share
        return load({}, env, tmp_path).settings.key_share

    one, two = "k" * 16, f"{'k' * 16},{'l' * 16}"
    assert load({}, {}, tmp_path).settings.key_share == 1
    assert key_share(one) == 1
    assert key_share(two) == 0.75
    assert key_share(two, "0.5") == 0.5
    assert key_share(two, "1") == 1


@pytest.mark.parametrize(
    ("env", "at_terminal", "elsewhere"),
    [
        ({}, True, False),
        ({"HOST": "::1"}, True, False),
        ({"HOST": "localhost"}, True, False),
        ({"HOST": "0.0.0.0"}, False, False),
        ({"HOST": "example.org"}, False, False),
        *(
            ({key: "k" * 40}, False, False)
            for key in ("PREDICT_KEYS", "METRICS_KEYS", "ADMIN_KEYS")
        ),
        ({"FORWARDED_ALLOW_IPS": "10.0.0.5"}, False, False),
        ({"SHOW_ERRORS": "true", "HOST": "0.0.0.0", "PREDICT_KEYS": "k" * 40}, True, True),
        ({"SHOW_ERRORS": "false"}, False, False),
        ({"SHOW_ERRORS": "auto"}, True, False),
    ],
)
def test_texts_of_errors_are_shown_where_only_their_author_is(
    env: dict[str, str], at_terminal: bool, elsewhere: bool, tmp_path: Path
):
    variables = {f"INFERPOOL_{name}": value for name, value in env.items()}
    settings = load({}, variables, tmp_path).settings
    assert shows_errors(settings, at_terminal=True) is at_terminal
    assert shows_errors(settings, at_terminal=False) is elsewhere
