"""Requests of operators for changes of models, and the errors in them."""

import pytest

from inferpool.service.errors import InvalidInputError
from inferpool.service.parts.swap.requests import SwapOptions, read_add, read_swap
from inferpool.service.settings.model import ModelSettings

ECHO = ModelSettings(source="echo")


def test_no_word_means_a_setting_of_a_model_and_a_bound_of_a_swap():
    assert not SwapOptions.model_fields.keys() & {*ModelSettings.model_fields, "name"}


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"replicsa": 1}, "replicsa: there is no such setting; did you mean replicas?"),
        ({"share": "much"}, "share: 'much' is not a number from 0.001 to 1000"),
        ({"source": None}, "source: None is not a text in quotes of up to 4096 characters"),
        ({"spread": True},
         "spread: it is gone: leave it out; the devices of a replica are those of one host"),
        ({"x" * 999: 1}, "x" * 80 + ": there is no such setting"),
        ({"policy": "bold"},
         "policy: 'bold' is not \"verified\" or \"shadow\" or \"canary\" or \"force\""),
        ({"min_agreement": 2, "wait_s": -1},
         "min_agreement: 2 is not a number from 0 to 1; "
         "wait_s: -1 is not a number from 0 to 86400"),
        ({"placement": "tensor", "source": "a:B", "devices_per_replica": 1024, "replicas": 1000},
         "devices_per_replica: 1024 makes 1024000 processes with replicas = 1000; a model has 4096 "
         "at most"),
        ({"replicas": 64, "decoders": 64},
         "decoders: 64 makes 4160 processes with replicas = 64; a model has 4096 at most"),
        ({"options": {"a": [0] * 100_001}},
         "options: {'a': [" + "0, " * 23 + "0... has more than 100000 values, or 10000 lists and "
         "tables"),
        ({"options": {"a": [[]] * 10_000}},
         "options: {'a': [" + "[], " * 17 + "[]... has more than 100000 values, or 10000 lists and "
         "tables"),
        ({"max_latency_ratio": 0},
         "max_latency_ratio: 0 is not a number above 0 and up to 1000000000"),
        ({"validation": 3}, "validation: 3 is not a text in quotes of up to 4096 characters"),
        ({"rollback_s": "300"}, "rollback_s: '300' is not a number from 0 to 86400"),
        ({"objective_p99_ms": 1e400},
         "objective_p99_ms: inf is not a number above 0 and up to 86400000"),
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
