from argparse import ArgumentParser

import pytest

from inferpool.service.tools.chaos.plan import add_flags, plan_of


def plan(*argv: str):
    parser = ArgumentParser()
    add_flags(parser)
    return plan_of(parser.parse_args(argv))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--kill-every", "x"), "'x' is not a number from 0"),
        (("--kill-every", "-1"), "'-1' is not a number from 0"),
        (("--seconds", "nan"), "'nan' is not a number from 0"),
        (("--requests", "0"), "'0' is not a whole number from 1"),
        (("--clients", "1.5"), "'1.5' is not a whole number from 1"),
        (("--inputs", "/nowhere"), "/nowhere is no folder"),
    ],
)
def test_wrong_flag_is_named_before_anything_starts(capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        plan(*(f"{argv[0]}={argv[1]}",))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_flags_make_a_plan_that_says_that_its_numbers_are_the_least():
    made = plan("--kills", "3", "--stop-every", "0")
    assert (made.kills, made.every_s["stop"], made.planned_kills) == (3, 0.0, 3)
    assert plan("--requests", "5000").text == (
        "until there are at least 5,000 requests and 10 kills, and one stop and one poison "
        "and one forkserver"
    )
    assert plan("--swap-every", "3").text.endswith(" and one forkserver and one swap")
    never = [f"--{fault}-every=0" for fault in ("kill", "stop", "poison", "forkserver")]
    assert plan(*never).text == "until there are at least 10,000 requests"
    assert plan("--seconds", "3").text == "for 3 s"


def test_hosts_are_struck_only_where_there_are_some_and_their_front_end_forks_nothing():
    assert plan().every_s["host"] == 0.0
    made = plan("--hosts", "3")
    assert (made.hosts, made.every_s["host"], made.every_s["forkserver"]) == (3, 5.0, 0.0)
    assert made.text.endswith(" and 10 kills, and one stop and one poison, and 3 hosts struck")
    assert plan("--hosts", "3", "--host-every", "0").every_s["host"] == 0.0
