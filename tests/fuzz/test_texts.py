"""Short campaigns of `python -m tests.fuzz` by the protocols of texts."""

from collections.abc import Iterator
from typing import get_args

import pytest

from tests.e2e.running import Running
from tests.fuzz.campaign import Protocol, campaign, service
from tests.fuzz.inputs import HostileInput
from tests.fuzz.texts import TEXT_PROTOCOLS, make_text_input, text_complaint

SEED = 20261129
_NUM_INPUTS = 500


@pytest.fixture(scope="module")
def texts_target() -> Iterator[Running]:
    with service(replicas=1, protocol="embeddings") as target:
        yield target


@pytest.mark.measures
@pytest.mark.slow
@pytest.mark.parametrize(
    "protocol", [each for each in get_args(Protocol) if each in TEXT_PROTOCOLS]
)
def test_hostile_calls_about_texts_harm_nothing(texts_target: Running, protocol: Protocol):
    verdict = campaign(texts_target, num_inputs=_NUM_INPUTS, seed=SEED, protocol=protocol)
    assert verdict.offences == []
    ((kind, statuses),) = verdict.statuses.items()
    assert kind == f"texts-{protocol}"
    assert {"200", "404", "405"} <= set(statuses)
    assert statuses["200"] >= _NUM_INPUTS // 20


def test_a_call_about_texts_comes_from_its_seed_and_number_alone():
    for protocol in TEXT_PROTOCOLS:
        made = [make_text_input(protocol, 1, number) for number in range(50)]
        assert made == [make_text_input(protocol, 1, number) for number in range(50)]
        assert made != [make_text_input(protocol, 2, number) for number in range(50)]


@pytest.mark.parametrize(
    ("path", "status", "body", "is_offence"),
    [
        ("/v1/embeddings", 400, b'{"error":{"message":"no","type":"t","code":"c"}}', False),
        ("/v1/embeddings", 400, b'{"error":"no"}', True),
        ("/v1/embeddings", 200, b"{", True),
        ("/v2/rerank", 400, b'{"message":"no","detail":"no"}', False),
        ("/v2/rerank", 404, b'{"detail":"no"}', True),
        ("/embed", 422, b'{"error":"no","error_type":"Validation"}', False),
        ("/tei/encoder/embed", 422, b'{"error":"no"}', True),
        ("/elsewhere", 404, b"{}", False),
    ],
)
def test_the_judge_knows_the_forms_of_errors(path: str, status: int, body: bytes, is_offence: bool):
    data = f"POST {path} HTTP/1.1\r\n\r\n".encode()
    given = HostileInput(number=1, kind="texts-tei", data=data, is_framed=True)
    assert bool(text_complaint(given, status, body)) == is_offence
