"""A short campaign of `python -m tests.fuzz`, and offences that its judge must see."""

from pathlib import Path

import pytest

from tests.e2e.running import Running
from tests.fuzz.campaign import Verdict, campaign, judge, keep, read_input
from tests.fuzz.client import FuzzAnswer, RawExchange
from tests.fuzz.inputs import KINDS, HostileInput, make_input

pytestmark = [pytest.mark.measures, pytest.mark.slow]

SEED = 20261121


def test_hostile_inputs_harm_nothing(target: Running):
    verdict = campaign(target, num_inputs=2_500, seed=SEED)
    assert verdict.offences == []
    assert verdict.num_inputs == 2_500
    assert set(verdict.statuses) == set(KINDS)
    found = set().union(*verdict.statuses.values())
    assert {"200", "400", "404", "405", "406", "413", "415", "422"} <= found


def test_an_input_comes_from_its_seed_and_number_alone():
    for number in range(100):
        assert make_input(1, number) == make_input(1, number)
    assert make_input(1, 5) != make_input(2, 5)


PROBLEM = b'{"status":400,"detail":"no"}'
HEAD = b"HTTP/1.1 %b X\r\ncontent-type: application/problem+json"


@pytest.mark.parametrize(
    ("status", "body", "is_offence"),
    [
        (400, PROBLEM, False),
        (400, b"{", True),
        (422, PROBLEM, True),
        (500, b'{"status":500,"detail":"oh"}', True),
        (504, b'{"status":504,"detail":"late"}', True),
        (0, b"", True),
    ],
)
def test_the_judge_sees_answers_that_must_not_be(status: int, body: bytes, is_offence: bool):
    input = HostileInput(number=3, kind="json", data=b"", is_framed=True)
    verdict = Verdict()
    judge(RawExchange(input, [FuzzAnswer(status, HEAD % (b"%03d" % status), body)]), verdict)
    assert bool(verdict.offences) == is_offence
    judge(RawExchange(input, error="neither answered nor closed"), verdict)
    assert verdict.offences[-1] == ("neither answered nor closed", input)


@pytest.mark.parametrize("line", [b"x-evil: 1", b"date: a\nb", b"date: \x7f", b"date"])
def test_the_judge_sees_a_line_that_a_client_smuggled_into_an_answer(line: bytes):
    input = HostileInput(number=3, kind="shape", data=b"", is_framed=True)
    verdict = Verdict()
    head = HEAD % b"200"
    judge(RawExchange(input, [FuzzAnswer(200, head + b"\r\ndate: now", b"")]), verdict)
    assert verdict.offences == []
    judge(RawExchange(input, [FuzzAnswer(200, head + b"\r\n" + line, b"")]), verdict)
    ((reason, _),) = verdict.offences
    assert reason.startswith("200, with a line that is not ours: ")


def test_offending_inputs_are_kept_and_can_be_read_again(tmp_path: Path):
    input = HostileInput(number=7, kind="head", data=b"GET \0", is_framed=False)
    verdict = Verdict()
    verdict.offend("why", input)
    (path,) = keep(verdict, tmp_path)
    assert read_input(path) == input
    assert path.with_suffix(".txt").read_text() == "why\n"
