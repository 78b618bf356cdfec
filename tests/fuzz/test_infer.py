"""Short campaigns of `python -m tests.fuzz --protocol infer` and `--protocol grpc`."""

import grpc
import pytest

from tests.e2e.running import Running
from tests.fuzz.campaign import campaign
from tests.fuzz.grpc_client import GrpcExchange
from tests.fuzz.infer import KINDS, HostileCall, make_grpc_call, make_infer_input

pytestmark = [pytest.mark.measures, pytest.mark.slow]

SEED = 20261129


def test_hostile_calls_over_http_harm_nothing(target: Running):
    verdict = campaign(target, num_inputs=600, seed=SEED, protocol="infer")
    assert verdict.offences == []
    assert set(verdict.statuses) == set(KINDS)
    found = set().union(*verdict.statuses.values())
    assert {"200", "400", "404", "405", "413", "415"} <= found


def test_hostile_calls_over_grpc_harm_nothing(target: Running):
    verdict = campaign(target, num_inputs=1_200, seed=SEED, protocol="grpc", num_connections=8)
    assert verdict.offences == []
    found = set().union(*verdict.statuses.values())
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"} <= found


def test_a_call_comes_from_its_seed_and_number_alone():
    for make in (make_infer_input, make_grpc_call):
        assert [make(1, number) for number in range(50)] == [make(1, n) for n in range(50)]
        assert make(1, 5) != make(2, 5)


@pytest.mark.parametrize(
    ("code", "message", "is_offence"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, b"", False),
        (grpc.StatusCode.INTERNAL, b"", True),
        (grpc.StatusCode.UNKNOWN, b"timeout", True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, b"", True),
        (grpc.StatusCode.DEADLINE_EXCEEDED, b"timeout", False),
    ],
)
def test_the_judge_sees_codes_that_must_not_be(
    code: grpc.StatusCode, message: bytes, is_offence: bool
):
    call = HostileCall(number=1, kind="grpc-infer", method="/a/b", messages=[message])
    assert bool(GrpcExchange(call, code, "why").offence) == is_offence


def test_the_judge_counts_the_answers_of_a_stream():
    call = HostileCall(
        number=1, kind="grpc-stream", method="/a", messages=[b"", b""], is_stream=True
    )
    assert not GrpcExchange(call, answers=[b"", b""]).offence
    assert GrpcExchange(call, answers=[b""]).offence
    assert GrpcExchange(call, answers=[b"", b"\x0a\x05"]).offence
