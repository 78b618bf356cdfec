import pytest

from inferpool.service.tools.trial.connection import TrialError
from inferpool.service.tools.trial.generators import share_of
from tests.load.options import read_options
from tests.load.plan import plan_for


def _options(*words):
    return read_options([*words])


@pytest.mark.parametrize(
    ("url", "model", "whole"),
    [
        ("http://host:8000", [], "http://host:8000/predict"),
        ("host:8000/", [], "http://host:8000/predict"),
        ("https://host", ["--model", "a b"], "https://host/predict/a%20b"),
        ("http://host/v2/models/x/infer", [], "http://host/v2/models/x/infer"),
    ],
)
def test_a_host_is_enough_of_a_url(url, model, whole):
    assert _options("closed", url, *model).url == whole


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("1.5s", 1.5), ("10m", 600), ("2h", 7200), ("1d", 86400)]
)
def test_durations_have_units(text, seconds):
    assert _options("open", "h", "--rate", "1", "-d", text).duration_s == seconds


def test_the_key_is_the_first_line_that_is_no_comment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# mine\n\nsecret-secret-secret\nother\n")
    headers = _options("closed", "h", "--key-file", str(file), "--timeout-ms", "250").headers
    assert headers["Authorization"] == "Bearer secret-secret-secret"
    assert headers["X-Timeout-Ms"] == "250"


def test_ramp_has_an_objective_of_its_own_unless_one_is_given():
    assert read_options(["ramp", "h"]).thresholds.p99_ms == 50
    given = read_options(["ramp", "h", "--p50-ms", "5", "--errors", "1%"]).thresholds
    assert (given.p99_ms, given.p50_ms) == (None, 5)
    assert given.errors is not None
    assert given.errors.allowed(1000) == 10


def test_there_are_no_more_processes_than_connections():
    assert _options("closed", "h", "-c", "2", "--processes", "8").processes == 2


def test_shares_add_up_to_the_plan():
    words = ("closed", "h", "-c", "7", "-n", "100", "--json", "{}")
    shares = [share_of(plan_for(_options(*words)), index, 3) for index in range(3)]
    assert sum(each.connections for each in shares) == 7
    assert sum(each.num_requests or 0 for each in shares) == 100
    assert len({each.seed for each in shares}) == 3


@pytest.mark.parametrize(
    "words",
    [
        ["closed", "ftp://host"],
        ["closed", "http://host/x", "--model", "m"],
        ["closed", "host", "--header", "nonsense"],
        ["closed", "host", "--key-file", "/nowhere"],
        ["closed", "host", "--body", "/nowhere"],
    ],
)
def test_unusable_options_are_an_error(words):
    with pytest.raises(TrialError):
        plan_for(read_options(words))


@pytest.mark.parametrize("words", [["open", "h"], ["closed", "h", "-d", "soon"], ["closed"]])
def test_wrong_options_exit_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as error:
        read_options(words)
    assert error.value.code == 2
    assert "usage" in capsys.readouterr().err
