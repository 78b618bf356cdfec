from argparse import ArgumentParser

import pytest

from inferpool.service.cli.main import run
from inferpool.service.settings.names import FlagError
from inferpool.service.tools.place.plan import PlacePlan, add_flags, plan_of


def plan(line: str, **environ: str) -> PlacePlan:
    parser = ArgumentParser()
    add_flags(parser)
    return plan_of(parser.parse_args(line.split()), environ)


def test_agents_get_the_address_the_flags_after_the_dashes_and_the_keys():
    told = plan(
        "--join front:7 --gpus-per-host 0 -- --devices cuda:0 --insecure",
        INFERPOOL_CLUSTER_KEYS="secret-of-the-cluster",
        INFERPOOL_PREDICT_KEYS="none of theirs",
    )
    assert " ".join(told.arguments) == "agent --join front:7 --devices cuda:0 --insecure"
    assert told.environ == {"INFERPOOL_CLUSTER_KEYS": "secret-of-the-cluster"}
    assert (told.max_hosts, told.verify) == (None, True)
    assert plan("--stop").stop


def test_load_decides_between_two_bounds():
    told = plan(
        "--join front:7 --front-end front:80 --max-hosts 9 --min-hosts 2 --insecure",
        INFERPOOL_METRICS_KEYS="0123456789abcdef,other-key-of-sixteen",
    )
    assert (told.front_end, told.metrics_key) == ("http://front:80", "0123456789abcdef")
    assert (told.min_hosts, told.max_hosts, told.verify) == (2, 9, False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "--join"),
        ("--join f:7,g:", "--join: 'g:' is not HOST:PORT"),
        ("--join f:7 --front-end http://f", "--max-hosts"),
        ("--join f:7 --front-end ftp://f --max-hosts 2", "neither http"),
        ("--join f:7 --min-hosts 5 --max-hosts 2", "more than --max-hosts"),
        ("--join f:7 --min-hosts 0", "--min-hosts: 0"),
        ("--join f:7 --gpus-per-host -1", "--gpus-per-host: -1"),
        ("--join f:7 --drain-timeout-s nan", "--drain-timeout-s"),
    ],
)
def test_flags_that_make_no_sense_are_refused(line: str, said: str):
    with pytest.raises(FlagError, match=said):
        plan(line)


def test_the_command_takes_flags_of_agents_after_dashes(capsys):
    assert run(["place", "--join", "f:7", "--ca-file", "/none", "--", "--devices", "cpu"]) == 2
    assert "--ca-file: /none" in capsys.readouterr().err
