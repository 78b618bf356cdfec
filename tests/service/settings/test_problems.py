"""Texts about settings name what a person can type."""

import pytest

from inferpool.service.settings.model import ModelSettings
from inferpool.service.settings.names import FLAGS
from inferpool.service.settings.problems import with_ways
from inferpool.service.settings.settings import Settings

FIELDS = [*Settings.model_fields, *ModelSettings.model_fields]


@pytest.mark.parametrize("name", [name for name in FIELDS if "_" in name and name not in FLAGS])
def test_a_setting_without_a_flag_has_its_variable_beside_it(name: str):
    of_model = "MODELS__NAME__" if name in ModelSettings.model_fields else ""
    named = f"{name} (INFERPOOL_{of_model}{name.upper()})"
    assert with_ways(f"raise {name}, or lower {name}") == f"raise {named}, or lower {named}"


@pytest.mark.parametrize(
    "text",
    [
        "set cluster_port too",  # has a flag
        "leave out share",  # may be a word
        "set arena_bytes (INFERPOOL_ARENA_BYTES)",
        "old_first=true, and INFERPOOL_ARENA_BYTES",
    ],
)
def test_other_words_stay_as_they_are(text: str):
    assert with_ways(text) == text
