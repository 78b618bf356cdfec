from argparse import ArgumentParser
from pathlib import Path

import pytest

from inferpool.service.settings.loader import load
from inferpool.service.tools.chaos.plan import ChaosPlan, add_flags, plan_of, shown_share
from inferpool.service.tools.chaos.run import rows_for

_FILE = """
port = 9
default_timeout_s = 7.0
tls_certificate = "cert.pem"
[models.mine]
source = "torchvision:resnet18"
weights = "none"
options = { n = 1 }
[models.echo]
batch_timeout_s = 11.0
"""


def plan(line: str) -> ChaosPlan:
    parser = ArgumentParser()
    add_flags(parser)
    return plan_of(parser.parse_args(line.split()))


def test_the_progress_moves_with_each_thing_that_is_to_be_done():
    shown = [shown_share(shares) for shares in ([0, 0], [0.5, 0], [7.0, 0], [7.0, 1], [8.0, 2.0])]
    assert shown == [0, 0.25, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--kill-every=x", "'x' is not a number from 0"),
        ("--kill-every=-1", "'-1' is not a number from 0"),
        ("--seconds=nan", "'nan' is not a number from 0"),
        ("--requests=0", "'0' is not a whole number from 1"),
        ("--clients=1.5", "'1.5' is not a whole number from 1"),
        ("--inputs=/nowhere", "/nowhere is no folder"),
    ],
)
def test_wrong_flag_is_named_before_anything_starts(capsys, flag: str, message: str):
    with pytest.raises(SystemExit, match="2"):
        plan(flag)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--requests 5000 --stop-every 0", "5,000 requests and 10 kills, and one poison and one f"),
        ("--swap-every 3", " and one forkserver and one swap"),
        ("--kill-every 0 --stop-every 0 --poison-every 0 --forkserver-every 0", "10,000 requests"),
        ("--seconds 3", "for 3 s"),
        ("--burst-every 3 --exit-every 2", " and one forkserver and one exit and one burst"),
        ("--hosts 3", " and one stop and one poison, and 3 hosts struck"),
    ],
)
def test_plan_says_that_its_numbers_are_the_least(line: str, text: str):
    assert text in plan(line).text


@pytest.mark.parametrize(
    ("line", "num"),
    [("--kills 3", 3), ("--seconds 9 --kill-every 2", 4), ("--kills 3 --kill-every 0", 0)],
)
def test_kills_are_planned_by_their_number_or_by_the_time(line: str, num: int):
    assert plan(line).planned_kills == num


def test_hosts_are_struck_only_where_there_are_some_and_their_front_end_forks_nothing():
    assert plan("").every_s["host"] == plan("--hosts 3 --host-every 0").every_s["host"] == 0.0
    made = plan("--hosts 3")
    assert (made.hosts, made.every_s["host"], made.every_s["forkserver"]) == (3, 5.0, 0.0)


def test_subject_has_the_users_settings_except_address_keys_and_the_default_batch_timeout(
    tmp_path: Path,
):
    (tmp_path / "inferpool.toml").write_text(_FILE)
    loaded = load({}, {"INFERPOOL_PREDICT_KEYS": "k" * 20}, tmp_path)
    found = {key: value for key, value, _ in rows_for(loaded, can_be_poisoned=False)}
    assert found["default_timeout_s",] == 7.0
    assert found["speed_search",] is False
    assert found["models", "mine", "source"] == "torchvision:resnet18"
    assert found["models", "mine", "batch_timeout_s"] == 5.0
    assert found["models", "echo", "batch_timeout_s"] == 11.0
    assert not [key for key in found if key == ("port",) or "keys" in key[0] or "tls" in key[0]]
    wrapped = {key[2:]: value for key, value, _ in rows_for(loaded, can_be_poisoned=True)
               if key[:2] == ("models", "mine")}  # fmt: skip
    assert wrapped["source",] == "inferpool.models.sources.poisonable:Poisonable"
    assert wrapped["weights",] == "DEFAULT"
    own = {"source": "torchvision:resnet18", "weights": "none", "options": {"n": 1}}
    assert {name: wrapped["options", name] for name in own} == own
