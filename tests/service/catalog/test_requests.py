"""Requests of operators for changes of models, and the errors in them."""

import pytest

from inferpool.service.catalog.requests import SwapOptions, read_add, read_swap
from inferpool.service.errors import InvalidInputError
from inferpool.service.settings.model import ModelSettings

ECHO = ModelSettings(source="echo")


def test_no_word_means_a_setting_of_a_model_and_a_bound_of_a_swap():
    assert not SwapOptions.model_fields.keys() & {*ModelSettings.model_fields, "name"}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"replicas": 0}, "replicas: 0 is not \"auto\" or a whole number of at least 1"),
        ({"replicas": True}, "replicas: True is not \"auto\" or a whole number of at least 1"),
        ({"replicsa": 1}, "replicsa: there is no such setting; did you mean replicas?"),
        ({"share": "much"}, "share: 'much' is not a number from 0.001 to 1000"),
        ({"source": None}, "source: None is not a text in quotes that is not empty"),
        ({"options": [1]}, "options: [1] is not a table"),
        ({"x" * 999: 1}, "x" * 80 + ": there is no such setting"),
        ({"policy": "bold"},
         "policy: 'bold' is not \"verified\" or \"shadow\" or \"canary\" or \"force\""),
        ({"min_agreement": 2, "wait_s": -1},
         "min_agreement: 2 is not a number from 0 to 1; "
         "wait_s: -1 is not a number from 0 to 86400"),
        ({"max_latency_ratio": 0}, "max_latency_ratio: 0 is not a number above 0"),
        ({"validation": 3}, "validation: 3 is not a text in quotes that is not empty"),
        ({"rollback_s": "300"}, "rollback_s: '300' is not a number from 0 to 86400"),
        ({"objective_p99_ms": 1e400}, "objective_p99_ms: inf is not a number above 0"),
    ],
)  # fmt: skip
def test_an_error_names_the_setting_and_what_it_takes(request_, text):
    with pytest.raises(InvalidInputError) as refused:
        read_swap(request_, ECHO)
    assert refused.value.message == text


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({}, "name: 'None' cannot be a model's name"),
        ({"name": "Cats"}, "name: 'Cats' cannot be"),
        ({"name": "a/b"}, "name: 'a/b' cannot be"),
        ({"name": "a\n"}, "cannot be a model's name"),
        ({"name": 7}, "name: '7' cannot be"),
        ({"name": "a", "ephemeral": "no"}, "ephemeral: must be true or false"),
        ({"name": "a"}, "source: 'a' is not a source"),
        ({"name": "a", "source": "echo", "policy": "force"}, "policy: is for another version"),
    ],
)
def test_an_error_in_a_model_to_add_is_told(request_, text):
    with pytest.raises(InvalidInputError) as refused:
        read_add(request_)
    assert text in refused.value.message
