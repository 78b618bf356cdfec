"""Short campaigns of `python -m tests.fuzz` by the protocols of TorchServe and of platforms."""

from collections.abc import Iterator

import pytest

from tests.e2e.running import Running
from tests.fuzz.campaign import Protocol, campaign, service
from tests.fuzz.inputs import HostileInput
from tests.fuzz.torchserve import SERVER_INPUTS, VERTEX_PREDICT, is_told_to_fail, server_complaint

SEED = 20261129
_NUM_INPUTS = 500


@pytest.fixture(scope="module")
def torchserve_target() -> Iterator[Running]:
    with service(replicas=1, protocol="management") as target:
        yield target


@pytest.fixture(scope="module")
def platform_target() -> Iterator[Running]:
    with service(replicas=1, protocol="sagemaker") as target:
        yield target


def harms_nothing(target: Running, protocol: Protocol, statuses: set[str]) -> None:
    verdict = campaign(target, num_inputs=_NUM_INPUTS, seed=SEED, protocol=protocol)
    assert verdict.offences == []
    ((kind, found),) = verdict.statuses.items()
    assert kind == protocol
    assert statuses <= set(found)
    assert found["200"] >= _NUM_INPUTS // 20


@pytest.mark.measures
@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["torchserve", "management"])
def test_hostile_calls_of_torchserve_s_clients_harm_nothing(
    torchserve_target: Running, protocol: Protocol
):
    harms_nothing(torchserve_target, protocol, {"400", "404", "405"})


@pytest.mark.measures
@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["sagemaker", "vertex"])
def test_hostile_calls_of_platforms_harm_nothing(platform_target: Running, protocol: Protocol):
    harms_nothing(platform_target, protocol, {"400", "404", "405", "415"})


def test_a_call_of_another_server_comes_from_its_seed_and_number_alone():
    for make in SERVER_INPUTS.values():
        made = [make(1, number) for number in range(30)]
        assert made == [make(1, number) for number in range(30)]
        assert made != [make(2, number) for number in range(30)]


@pytest.mark.parametrize(
    ("kind", "path", "body", "is_offence"),
    [
        ("torchserve", "/predictions/x", b'{"code":404,"type":"T","message":"no"}', False),
        ("torchserve", "/predictions/x?a=1", b'{"code":400,"type":"T","message":"no"}', True),
        ("torchserve", "/predictions/x", b'{"detail":"no"}', True),
        ("torchserve", "/predict/x", b'{"detail":"no"}', False),
        ("management", "/models", b'{"code":404,"type":"T","message":"no"}', False),
        ("management", "/models/x", b"{", True),
        ("sagemaker", "/invocations", b'{"code":404,"type":"T","message":"no"}', False),
        ("sagemaker", "/invocations", b'{"error":"no"}', True),
        ("vertex", VERTEX_PREDICT, b'{"error":"no"}', False),
        ("vertex", VERTEX_PREDICT, b'{"message":"no"}', True),
    ],
)
def test_the_judge_knows_the_forms_of_other_servers_errors(
    kind: str, path: str, body: bytes, is_offence: bool
):
    data = f"POST {path} HTTP/1.1\r\n\r\n".encode()
    given = HostileInput(number=1, kind=kind, data=data, is_framed=True)
    assert bool(server_complaint(given, 404, body)) == is_offence


@pytest.mark.parametrize(
    ("sent", "status", "said", "is_told"),
    [
        (b'{"raise": true}', 503, b"Prediction failed", True),
        (b'{"n": 1}', 503, b"Prediction failed", False),
        (b'{"raise": true}', 500, b"Prediction failed", False),
        (b'{"n": 1}', 501, b"", True),
    ],
)
def test_the_judge_knows_handlers_that_were_told_to_fail(
    sent: bytes, status: int, said: bytes, is_told: bool
):
    data = b"POST /predictions/parts HTTP/1.1\r\n\r\n" + sent
    given = HostileInput(number=1, kind="torchserve", data=data, is_framed=True)
    assert is_told_to_fail(given, status, said) == is_told
